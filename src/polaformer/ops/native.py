"""Builds a C++ file of this library once for this machine, with the compiler that is there, and loads it.

The result is kept in a folder of the user's own, under a name made from the source, the compiler, its options, the processor
and the result itself. It is written elsewhere and moved into place, so that processes which build at the same time do not meet
halfway; and it is loaded only if it is what its name says, for loading half a file ends the process.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-w")
# What compilers call the processor that they run on, and OpenMP; the first combination that compiles is taken.
FOR_THIS_PROCESSOR = ("-march=native", "-mcpu=native", "")
THREADS = ("-fopenmp", "")
logger = logging.getLogger("polaformer")


class BuildError(Exception):
    """Why there is no library: one line."""


def load(source: Path) -> ctypes.CDLL:
    """The compiled file as a library; raises BuildError, which says in one line why it cannot be had."""
    if os.environ.get("POLAFORMER_NATIVE", "1") == "0":
        raise BuildError("switched off by POLAFORMER_NATIVE=0")
    compiler = find_compiler()
    if compiler is None:
        wanted = os.environ.get("CXX")
        raise BuildError(
            f"the variable CXX names {wanted!r}, which is not there"
            if wanted
            else "no C++ compiler found (g++, clang++ or c++; the variable CXX can name one)"
        )
    name = f"{source.stem}-{fingerprint(source, compiler)}"
    try:
        folder = cache_folder()
        path = find_built(folder, name) or build(source, compiler, folder, name)
    except OSError as error:
        raise BuildError(f"no place for the compiled kernel: {error}; POLAFORMER_CACHE can name one") from error
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the compiled kernel cannot be loaded: {error}") from error


def find_compiler() -> list[str] | None:
    """The command of a C++ compiler: that of the variable CXX if it is set, else the first that is there; None without one."""
    text = os.environ.get("CXX", "")
    try:
        wanted = shlex.split(text)
    except ValueError:  # an unclosed quotation mark: then it is no list of words
        wanted = [text]
    for command in [wanted] if wanted else [["g++"], ["clang++"], ["c++"]]:
        if shutil.which(command[0]):
            return command
    return None


def cache_folder() -> Path:
    """The folder for compiled kernels, made if need be, and nobody else's: what lies there is run.

    POLAFORMER_CACHE, or polaformer under XDG_CACHE_HOME, or under ~/.cache; raises OSError if it cannot be had.
    """
    wanted = os.environ.get("POLAFORMER_CACHE")
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = (Path(wanted).expanduser() if wanted else base / "polaformer").absolute()
    except RuntimeError as error:  # a user without a home, as in containers
        raise FileNotFoundError(str(error)) from error
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.stat()
    if hasattr(os, "getuid") and (state.st_uid != os.getuid() or state.st_mode & 0o022):
        raise PermissionError(f"{folder} belongs to somebody else or can be written by others")
    return folder


def fingerprint(source: Path, compiler: list[str]) -> str:
    """Differs whenever the compiled file would."""
    parts = (
        *(file.read_bytes() for file in (source, *sorted(source.parent.glob("*.h")))),
        _version(tuple(compiler)).encode(),
        " ".join((*compiler, *OPTIONS)).encode(),
        _processor().encode(),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def find_built(folder: Path, name: str) -> Path | None:
    """The compiled file of that name if it is there, whole."""
    return next((path for path in sorted(folder.glob(f"{name}-*.so")) if path.stem == f"{name}-{checksum(path)}"), None)


def checksum(path: Path) -> str:
    """Of the file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:24]


def build(source: Path, compiler: list[str], folder: Path, name: str) -> Path:
    """Compiles the source, in seconds, and returns where it lies; raises BuildError with the compiler's first complaint."""
    logger.warning("polaformer: compiling %s for this processor, once; it takes some seconds", source.name)
    complaint = ""
    with tempfile.TemporaryDirectory(dir=folder) as workshop:
        target = Path(workshop) / source.stem
        for options in ((processor, threads) for threads in THREADS for processor in FOR_THIS_PROCESSOR):
            found = _run([*compiler, *OPTIONS, *filter(None, options), str(source), "-o", str(target)], timeout=300)
            if found.returncode == 0 and target.exists():
                path = folder / f"{name}-{checksum(target)}.so"
                os.replace(target, path)
                return path
            complaint = complaint or _first_complaint(found.stderr)
    raise BuildError(f"{compiler[0]} failed: {complaint}")


def _run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error


def _first_complaint(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it said nothing")


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"], timeout=60).stdout


@functools.cache
def _processor() -> str:
    """What tells this kind of processor from others."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{sys.platform} {platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
