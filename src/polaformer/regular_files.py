"""Reading and writing where files may come from anywhere: regular files only, and no more bytes than are allowed.

A FIFO, a device or a socket under the name of a file could keep a reader or a writer waiting forever; a sparse file of a few
kilobytes on the disk could fill all memory; a symbolic link under the name of a file to write could lead anywhere.
"""

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

from polaformer.errors import CannotWriteError

MOST_BYTES = 2**30  # of one image, array file, configuration or journal


class NotRegularError(OSError):
    """Something else than a regular file stands under the name of one."""

    def __init__(self) -> None:
        super().__init__("it is not a regular file")


def open_regular(path: str | PathLike[str]) -> io.BufferedReader:
    """The file, open for reading; raises OSError for anything but a regular file."""
    _check(os.stat(path))  # before opening, which has effects on some devices
    file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115, the caller closes it
    try:
        _check(os.fstat(file.fileno()))  # what was opened may be another file than what was looked at
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: str | PathLike[str], most: int = MOST_BYTES) -> bytes:
    """The bytes of a regular file; raises OSError, also for a file of more than `most` bytes, which is not read."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(too_large(size, most))
        return file.read(size)


def open_to_write(path: Path) -> int:
    """A handle for writing without emptying it, of a file that is made if there is none; raises OSError as open_regular does.

    A symbolic link is not followed.
    """
    flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a FIFO that nobody reads, or a socket
            raise NotRegularError from error
        raise
    try:
        _check(os.fstat(handle))
    except OSError:
        os.close(handle)
        raise
    return handle


def write_whole(path: Path, text: str) -> None:
    """Writes beside the target, syncs and renames, so that a kill leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # what a kill left behind; or a link or a FIFO, which must not be opened
    with open(temporary, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextmanager
def writing(what: str | PathLike[str]) -> Iterator[None]:
    """Turns a failure of the operating system inside into a CannotWriteError that names what could not be written."""
    try:
        yield
    except CannotWriteError:
        raise
    except OSError as error:
        raise CannotWriteError(
            f"cannot write to {what}: {reason(error)}; make room, or give a place that can be written to"
        ) from error


def too_large(size: int, most: int = MOST_BYTES) -> str:
    """What is wrong with a file of that many bytes, for a message."""
    return f"it has {size:,} bytes, more than the {most:,} that are allowed"


def reason(error: Exception) -> str:
    """Why a file cannot be read, for a message, without the path and the number that the operating system adds."""
    return getattr(error, "strerror", None) or str(error)


def _check(about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise NotRegularError


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
