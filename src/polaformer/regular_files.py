"""Opening and reading files that may come from anywhere: regular files only, and no more bytes than are allowed.

A FIFO, a device or a socket under the name of a file could keep a reader waiting forever; a sparse file of a few kilobytes on
the disk could fill all memory.
"""

import io
import os
import stat
from os import PathLike

MOST_BYTES = 2**30  # of one image, array file, configuration or journal


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


def too_large(size: int, most: int = MOST_BYTES) -> str:
    """What is wrong with a file of that many bytes, for a message."""
    return f"it has {size:,} bytes, more than the {most:,} that are allowed"


def reason(error: Exception) -> str:
    """Why a file cannot be read, for a message, without the path and the number that the operating system adds."""
    return getattr(error, "strerror", None) or str(error)


def _check(about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise OSError("it is not a regular file")


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
