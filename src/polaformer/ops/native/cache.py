"""The private cache directory of compiled kernels, and the names of the files in it.

A name is made of the source's name, a fingerprint of everything that the compiled file depends on, a checksum of the compiled
file, and its options. Files are loaded only if their checksum matches: loading half a file would kill the process.
"""

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import stat
import sys
import time
from pathlib import Path

from polaformer.ops.native import compiler

BUILD_PREFIX = "polaformer-build-"  # of the names of directories to build in
ABANDONED_AFTER = 24 * 3600.0  # seconds after which such a directory belongs to a build that was killed
UID_MAP, OVERFLOW_UID = Path("/proc/self/uid_map"), Path("/proc/sys/kernel/overflowuid")


def cache_directory() -> Path:
    """The directory of compiled kernels, created if needed, and writable by nobody else: its files are executed.

    POLAFORMER_CACHE, or polaformer under XDG_CACHE_HOME, or under ~/.cache; raises OSError if it cannot be used.
    """
    requested = os.environ.get("POLAFORMER_CACHE")
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        directory = (Path(requested).expanduser() if requested else base / "polaformer").absolute()
    except RuntimeError as error:  # a user without a home, as in containers
        raise FileNotFoundError(str(error)) from error
    for path in (*reversed(directory.parents), directory):
        if path == directory or not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)  # parents too, whatever the umask is
    directory = directory.resolve()  # a symbolic link in the path could be redirected after the check
    if hasattr(os, "getuid"):
        _check_private(directory)
    return directory


def _check_private(directory: Path) -> None:
    """Raises PermissionError if anyone but this user and root can write into the directory, or replace it or a parent of it.

    In a parent that others can write to, such as /tmp, the sticky bit keeps them from renaming what is not theirs. A parent may
    be writable by a group without other members, as with a umask of 002.
    """
    state = directory.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(f"{directory} belongs to another user or is writable by others")
    for parent in directory.parents:
        above = parent.stat()
        is_sticky = bool(above.st_mode & stat.S_ISVTX)
        by_all, by_group = above.st_mode & stat.S_IWOTH, above.st_mode & stat.S_IWGRP and not _is_private(parent, above.st_gid)
        if not _is_trusted(parent, above.st_uid) or ((by_all or by_group) and not is_sticky):
            raise PermissionError(f"{parent}, above {directory}, belongs to another user or is writable by others")


def _is_trusted(parent: Path, owner: int) -> bool:
    """Whether the owner is this user or root, who appears as the overflow user in a user namespace that does not map him."""
    if owner in (0, os.getuid()):
        return True
    with contextlib.suppress(OSError):
        is_namespace = UID_MAP.read_text().split() != ["0", "0", "4294967295"]
        return is_namespace and owner == int(OVERFLOW_UID.read_text()) and not os.access(parent, os.W_OK)
    return False


def _is_private(parent: Path, group: int) -> bool:
    """Whether this user is the only member of the group, which then has the user's name, and no access list admits others."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:  # a user or a group without a name, as in containers
        return False
    with contextlib.suppress(OSError, AttributeError):  # a file system or a platform without them
        if "system.posix_acl_access" in os.listxattr(parent):
            return False
    return group == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def fingerprint(source: Path, command: list[str]) -> str:
    """Differs whenever the file compiled by this compiler command would."""
    headers = (*sorted(source.parent.glob("*.h")), *sorted(compiler.HEADERS.glob("*.h")))
    parts = (
        *(file.read_bytes() for file in (source, *headers)),
        compiler.version(tuple(command)).encode(),
        " ".join((*command, *compiler.OPTIONS, *compiler.FOR_THIS_PROCESSOR, *compiler.THREADS)).encode(),
        _processor().encode(),
    )
    return _digest(b"\0".join(parts))


@functools.cache
def _processor() -> str:
    """What distinguishes this kind of processor from others."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{sys.platform} {platform.machine()} {platform.processor()}"
    relevant = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(relevant)))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]


def file_name(name: str, library: Path, options: list[str]) -> str:
    """The name in the cache of a library, compiled with these options, whose source and fingerprint are in `name`."""
    tag = "+".join(option.lstrip("-") for option in options) or "plain"
    return f"{name}-{_digest(library.read_bytes())}.{tag}.so"


def options_of(path: Path) -> list[str]:
    """The options, beyond those of every build, that a file was compiled with according to its name."""
    return [f"-{option}" for option in path.suffixes[-2][1:].split("+") if option != "plain"]


def find_built(directory: Path, name: str) -> Path | None:
    """The compiled file of that name if it is there and intact."""
    paths = sorted(directory.glob(f"{name}-*.*.so"))
    return next((path for path in paths if path.name.startswith(f"{name}-{_digest(path.read_bytes())}.")), None)


def remove_abandoned_builds(directory: Path) -> None:
    """Removes the directories of builds that were killed."""
    for path in directory.glob(f"{BUILD_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process may be quicker
            if time.time() - path.stat().st_mtime > ABANDONED_AFTER:
                shutil.rmtree(path)
