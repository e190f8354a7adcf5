"""Builds a C++ file of this library once per machine, with the compiler found there, and loads it.

The result is kept in a private cache directory (see `cache`). It is built elsewhere and moved into place, so that processes
that build at the same time do not see each other's unfinished files.
"""

import ctypes
import logging
import os
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

from polaformer.ops.native import cache, compiler
from polaformer.ops.native.compiler import BuildError

logger = logging.getLogger("polaformer")
warned_reasons = set[str]()


class Kernel(NamedTuple):
    """A loaded library, or the reason, in one line, why there is none."""

    library: ctypes.CDLL | None
    reason: str | None

    def options(self) -> list[str]:
        """The options, beyond those of every build, that it was compiled with; empty without a library."""
        return [] if self.library is None else cache.options_of(Path(self.library._name))

    def has_threads(self) -> bool:
        """Whether its compiler supported OpenMP."""
        return self.library is not None and bool(self.library.has_threads())

    def has_float16(self) -> bool:
        """Whether its compiler supported float16."""
        return self.library is not None and bool(self.library.has_float16())


def find_kernel(source: Path) -> Kernel:
    """The library compiled from the source, or the reason why there is none."""
    try:
        return Kernel(load(source), None)
    except BuildError as error:
        return Kernel(None, str(error))


def warn_of_plain_path(what: str, reason: str) -> None:
    """Warns that plain PyTorch computes `what`; once per reason, since one reason usually concerns every kernel."""
    if reason not in warned_reasons:
        warned_reasons.add(reason)
        warnings.warn(f"polaformer: plain PyTorch computes {what}, slower: {reason}", stacklevel=3)


def load(source: Path) -> ctypes.CDLL:
    """The library compiled from the source, now or earlier; raises BuildError with the reason in one line."""
    if os.environ.get("POLAFORMER_NATIVE", "1") == "0":
        raise BuildError("switched off by POLAFORMER_NATIVE=0")
    command = compiler.find_compiler()
    if command is None:
        requested = os.environ.get("CXX")
        raise BuildError(
            f"the variable CXX names {requested!r}, which does not exist"
            if requested
            else "no C++ compiler found (g++, clang++ or c++; the variable CXX can name one)"
        )
    name = f"{source.stem}-{cache.fingerprint(source, command)}"
    try:
        directory = cache.cache_directory()
        path = cache.find_built(directory, name) or build(source, command, directory, name)
    except OSError as error:
        raise BuildError(f"no place for the compiled kernel: {error}; POLAFORMER_CACHE can name one") from error
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the compiled kernel cannot be loaded: {error}") from error


def build(source: Path, command: list[str], directory: Path, name: str) -> Path:
    """Compiles the source into the directory, which takes seconds; returns the path, raises BuildError with the first error."""
    cache.remove_abandoned_builds(directory)
    with tempfile.TemporaryDirectory(dir=directory, prefix=cache.BUILD_PREFIX) as workspace:
        options = compiler.supported_options(command, Path(workspace))
        kind = "for this processor" if set(options) & set(compiler.FOR_THIS_PROCESSOR) else "for any processor of this kind"
        logger.warning("polaformer: compiling %s %s, once; it takes some seconds", source.name, kind)
        target = Path(workspace) / source.stem
        compiler.compile_source(command, options, source, target)
        path = directory / cache.file_name(name, target, options)
        os.replace(target, path)
    return path
