"""Reading and writing of untrusted paths: regular files only, and no more bytes than allowed.

A FIFO, device or socket in place of a file could block a reader or writer forever; a sparse file of a few kilobytes could fill
all memory; a symbolic link in place of a file to write could lead anywhere.
"""

import errno
import io
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

from polaformer.errors import CannotWriteError, SettingsError

LOCK = ".lock"  # of a folder
MAX_BYTES = 2**30  # of one image, array file, configuration or journal
# Limit of what a compressed or sparse file takes in memory: this many bytes, or this many times its size on disk.
MAX_UNPACKED, MAX_RATIO = 2**28, 20


class NotRegularError(OSError):
    """The path is not a regular file."""

    def __init__(self) -> None:
        super().__init__("it is not a regular file")


def open_regular(path: str | PathLike[str]) -> io.BufferedReader:
    """The file, open for reading; raises OSError for anything but a regular file."""
    _check(os.stat(path))  # before opening, which has side effects on some devices
    file = open(path, "rb", opener=_open_nonblocking)  # noqa: SIM115, the caller closes it
    try:
        _check(os.fstat(file.fileno()))  # the path may have been replaced in between
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: str | PathLike[str], most: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file; raises OSError, also for a file of more than `most` bytes, without reading it."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(too_large_reason(size, most))
        return file.read(size)


def open_to_write(path: Path) -> int:
    """A file descriptor for writing, without truncation; creates a missing file, follows no symbolic link.

    Raises OSError as open_regular does.
    """
    flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a FIFO without reader, or a socket
            raise NotRegularError from error
        raise
    try:
        _check(os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def write_atomically(path: Path, text: str) -> None:
    """Writes to a temporary file beside the target, syncs and renames it: a kill leaves either the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # left by a kill; or a link or FIFO, which must not be opened
    with open(temporary, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextmanager
def locked(folder: Path, done: str) -> Iterator[None]:
    """Locks a folder for this process; however the process ends, the operating system releases the lock.

    done: what is being done to it ("trained"), for the SettingsError if another process has locked it.
    """
    import fcntl  # which Windows lacks

    with writing(folder / LOCK):
        handle = open_to_write(folder / LOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise SettingsError(f"{folder} is being {done} by another process; wait for it, or stop it") from error
    except OSError as error:
        hint = "make sure that only one process writes to it"
        warnings.warn(f"{folder} cannot be locked ({error.strerror}); {hint}", stacklevel=2)
    try:
        yield
    finally:
        os.close(handle)


@contextmanager
def writing(what: str | PathLike[str]) -> Iterator[None]:
    """Turns an OSError raised inside the context into a CannotWriteError that names `what`."""
    try:
        yield
    except CannotWriteError:
        raise
    except OSError as error:
        raise CannotWriteError(f"cannot write to {what}: {reason(error)}; free some space, or give a writable path") from error


def unpacked_limit(*files: os.stat_result) -> int:
    """The number of bytes that files may take in memory, all together, once they are unpacked."""
    on_disk = sum(min(status.st_size, getattr(status, "st_blocks", status.st_size) * 512) for status in files)
    return max(MAX_UNPACKED, MAX_RATIO * on_disk)


def too_large_reason(size: int, most: int = MAX_BYTES) -> str:
    """Why a file of `size` bytes is refused, for a message."""
    return f"it has {size:,} bytes, more than the {most:,} allowed"


def reason(error: Exception) -> str:
    """Why a file cannot be read, for a message, without the path and error number that the operating system adds."""
    return getattr(error, "strerror", None) or str(error)


def _check(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotRegularError


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
