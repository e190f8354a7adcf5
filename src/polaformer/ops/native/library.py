"""Builds a C++ file of this library once for this machine, with the compiler that is there, and loads it.

The result is kept in a folder of the user's own, under a name made from the source, the compiler, its options, the processor
and the result itself. It is written elsewhere and moved into place, so that processes which build at the same time do not meet
halfway; and it is loaded only if it is what its name says, for loading half a file ends the process.

Which options a compiler knows is asked with a few lines, and then it compiles once: a compiler that was killed, or found the
disk full, is no reason to keep a slower kernel for good.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HEADERS = Path(__file__).parent
OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-w")
# What compilers call the processor that they run on, and OpenMP; the first that is known is taken, "" always is.
FOR_THIS_PROCESSOR = ("-march=native", "-mcpu=native", "")
THREADS = ("-fopenmp", "")
# What compilers say, without fault of an option, when they are killed or have no room.
NO_FAULT_OF_AN_OPTION = (
    "signal",
    "unable to execute command",
    "No space left",
    "out of memory",
    "annot allocate",
    "virtual memory exhausted",
)
# Has the compiler write the newest instructions of the processor, which an older assembler may not know, and look for OpenMP.
PROBE = """
#if defined(_OPENMP)
#include <omp.h>
#endif
extern "C" void probe(float* to, const float* from, int count) {
#if defined(__FLT16_MAX__)
    for (int i = 0; i < count; i++) to[i] += (float)(_Float16)from[i];
#endif
    for (int i = 0; i < count; i++) to[i] += from[i] > 0 ? from[i] * to[i] : 0;
}
"""
WORKSHOP = "polaformer-build-"  # begins the names of the folders to build in
LEFT_OVER = 24 * 3600.0  # seconds after which such a folder belongs to a build that was killed
UID_MAP, OVERFLOW_UID = Path("/proc/self/uid_map"), Path("/proc/sys/kernel/overflowuid")
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
    for path in (*reversed(folder.parents), folder):
        if path == folder or not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)  # parents too, whatever the umask is
    folder = folder.resolve()  # a link in the path could be turned elsewhere after the check
    if hasattr(os, "getuid"):
        _check_private(folder)
    return folder


def _check_private(folder: Path) -> None:
    """Raises PermissionError if anybody but this user and root can write into the folder, or replace it or one of its parents.

    In a parent that others can write into, as /tmp, the sticky bit keeps them from renaming what is not theirs. A parent may be
    open to a group that has nobody else in it, as with a umask of 002.
    """
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to somebody else or can be written by others")
    for parent in folder.parents:
        above = parent.stat()
        is_kept = bool(above.st_mode & stat.S_ISVTX)
        to_all, to_group = above.st_mode & stat.S_IWOTH, above.st_mode & stat.S_IWGRP and not _is_private(parent, above.st_gid)
        if not _is_trusted(parent, above.st_uid) or ((to_all or to_group) and not is_kept):
            raise PermissionError(f"{parent}, above {folder}, belongs to somebody else or can be written by others")


def _is_trusted(parent: Path, owner: int) -> bool:
    """Whether the owner is this user or root, who has a number of nobody's inside a user namespace that does not know him."""
    if owner in (0, os.getuid()):
        return True
    with contextlib.suppress(OSError):
        is_namespace = UID_MAP.read_text().split() != ["0", "0", "4294967295"]
        return is_namespace and owner == int(OVERFLOW_UID.read_text()) and not os.access(parent, os.W_OK)
    return False


def _is_private(parent: Path, group: int) -> bool:
    """Whether this user alone is in the group, which then has the user's name, and no access list lets in others."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:  # a user or a group without a name, as in containers
        return False
    with contextlib.suppress(OSError, AttributeError):  # a file system or a system without them
        if "system.posix_acl_access" in os.listxattr(parent):
            return False
    return group == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def fingerprint(source: Path, compiler: list[str]) -> str:
    """Differs whenever the compiled file would."""
    parts = (
        *(file.read_bytes() for file in (source, *sorted(source.parent.glob("*.h")), *sorted(HEADERS.glob("*.h")))),
        _version(tuple(compiler)).encode(),
        " ".join((*compiler, *OPTIONS, *FOR_THIS_PROCESSOR, *THREADS)).encode(),
        _processor().encode(),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def find_built(folder: Path, name: str) -> Path | None:
    """The compiled file of that name if it is there, whole."""
    return next((path for path in sorted(folder.glob(f"{name}-*.*.so")) if _is_whole(path, name)), None)


def _is_whole(path: Path, name: str) -> bool:
    return path.name.startswith(f"{name}-{checksum(path)}.")


def options_of(library: ctypes.CDLL) -> list[str]:
    """The options, beside OPTIONS, that a loaded library was built with, as the name of its file tells."""
    return [f"-{option}" for option in Path(library._name).suffixes[-2][1:].split("+") if option != "plain"]


def checksum(path: Path) -> str:
    """Of the file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:24]


def build(source: Path, compiler: list[str], folder: Path, name: str) -> Path:
    """Compiles the source, in seconds, and returns where it lies; raises BuildError with the compiler's first complaint."""
    _remove_left_over(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=WORKSHOP) as workshop:
        options = known_options(compiler, Path(workshop))
        kind = "for this processor" if set(options) & set(FOR_THIS_PROCESSOR) else "for any processor of this kind"
        logger.warning("polaformer: compiling %s %s, once; it takes some seconds", source.name, kind)
        target = Path(workshop) / source.stem
        complaint = _compile(compiler, options, source, target)
        if complaint is not None:
            raise BuildError(f"{compiler[0]} failed: {complaint}")
        tag = "+".join(option.lstrip("-") for option in options) or "plain"
        path = folder / f"{name}-{checksum(target)}.{tag}.so"
        os.replace(target, path)
    return path


def known_options(compiler: list[str], folder: Path) -> list[str]:
    """Those of FOR_THIS_PROCESSOR and THREADS to compile with, found with PROBE in the folder.

    Raises BuildError where the compiler fails with it whatever the options, or fails without fault of an option.
    """
    source, target = folder / "probe.cpp", folder / "probe"
    source.write_text(PROBE)
    best = [option for option in (FOR_THIS_PROCESSOR[0], THREADS[0]) if option]
    if _compile(compiler, best, source, target) is None:
        return best
    found = [
        next((one for one in options if not one or _compile(compiler, [one], source, target) is None), "")
        for options in (FOR_THIS_PROCESSOR, THREADS)
    ]
    # Last, so that what was in its way while options were tried is most likely still there.
    complaint = _compile(compiler, [one for one in found if one], source, target)
    if complaint is not None:
        raise BuildError(f"{compiler[0]} failed: {complaint}")
    return [one for one in found if one]


def _compile(compiler: list[str], options: list[str], source: Path, target: Path) -> str | None:
    """Compiles; returns the first complaint, None for none; raises BuildError for one that has nothing to do with options."""
    target.unlink(missing_ok=True)
    found = _run([*compiler, *OPTIONS, *options, f"-I{HEADERS}", str(source), "-o", str(target)], timeout=300)
    if found.returncode == 0 and target.exists():
        return None
    if found.returncode < 0:
        raise BuildError(f"{compiler[0]} was ended by signal {-found.returncode}; try again, perhaps with more memory free")
    if any(words in found.stderr for words in NO_FAULT_OF_AN_OPTION):
        lines = [line.strip() for line in found.stderr.splitlines()]
        telling = next(line for line in lines if any(words in line for words in NO_FAULT_OF_AN_OPTION))
        raise BuildError(f"{compiler[0]} failed: {telling}")
    return _first_complaint(found.stderr)


def _remove_left_over(folder: Path) -> None:
    """Removes the folders of builds that were killed."""
    for path in folder.glob(f"{WORKSHOP}*"):
        with contextlib.suppress(OSError):  # another process may be quicker
            if time.time() - path.stat().st_mtime > LEFT_OVER:
                shutil.rmtree(path)


def _run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    english = os.environ | {"LC_ALL": "C"}  # what it says is read
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, errors="replace", env=english)
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
