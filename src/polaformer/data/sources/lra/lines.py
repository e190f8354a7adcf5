"""Lines and JSON objects of text files, plain or compressed (.gz, .xz), with limits: a few kilobytes can unpack to gigabytes.

A line ends at a line feed alone, or at a carriage return and a line feed. str.splitlines would also split at characters that
occur inside reviews.
"""

import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from polaformer.errors import DataError
from polaformer.regular_files import open_regular, reason, unpacked_limit

JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.xz")
MAX_LINE = 2**24  # bytes; a paper has about 10**5
CHUNK = 2**20  # bytes that are read, or unpacked, at a time
MAX_DICTIONARY = 2**28  # bytes that unpacking an .xz may take by itself; `xz -9` needs 2**26

ReportBytes = Callable[[int], object]  # called with the number of bytes of a file read since the last call


def read_lines(path: Path, report: ReportBytes = lambda count: None) -> Iterator[bytes]:
    """The lines of a file in order, without their ends; raises DataError. The last line need not have an end."""
    try:
        with open_regular(path) as file:
            yield from _lines(path, _limited(path, file, report))
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        what = reason(error) or type(error).__name__
        raise DataError(f"{path} cannot be read: {what}; check the path, or fetch it again") from error


def read_objects(path: Path, report: ReportBytes = lambda count: None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON object of each line, with its line number from 1; raises DataError."""
    for number, line in enumerate(read_lines(path, report), start=1):
        yield number, _object(path, number, line)


def first_object(path: Path) -> dict[str, Any]:
    """The JSON object of the first line; {} if there is none, whatever the reason."""
    try:
        return next((found for _, found in read_objects(path)), {})
    except DataError:
        return {}


def at_line(path: Path, number: int, noun: str = "line") -> str:
    """The place in a file, as messages name it."""
    return f"{path}, {noun} {number}"


class Meter:
    """Adds up the bytes read from several files, and reports them with the total."""

    def __init__(self, total: int, advance: Callable[[int, int], object]) -> None:
        self.total, self.done, self.advance = total, 0, advance

    def __call__(self, count: int) -> None:
        """Adds the bytes that were just read."""
        self.done += count
        self.advance(self.done, self.total)


def size_on_disk(*paths: Path) -> int:
    """The sizes of the files together, in bytes; 0 for a missing one, which reading reports."""
    return sum(os.path.getsize(path) for path in paths if path.is_file())


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:  # invalid UTF-8 is a ValueError, too
        what = "the line is empty" if not line.strip() else reason(error)
        raise DataError(f"{at_line(path, number)} is not JSON: {what}; write one object per line") from error
    if not isinstance(found, dict):
        raise DataError(f"{at_line(path, number)} is JSON but not an object; write one object per line")
    return found


def _lines(path: Path, chunks: Iterator[bytes]) -> Iterator[bytes]:
    number, rest = 1, b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r")
        number += len(whole)
        if len(rest) > MAX_LINE:
            raise DataError(f"{at_line(path, number)} has more than the {MAX_LINE:,} bytes allowed; shorten or split it")
    if rest:
        yield rest.removesuffix(b"\r")


def _limited(path: Path, file: io.BufferedReader, report: ReportBytes) -> Iterator[bytes]:
    """The unpacked content; raises DataError if there is more of it than a genuine file of that size would hold."""
    most, total, before = unpacked_limit(os.fstat(file.fileno())), 0, 0
    unpack = {".gz": _from_gzip, ".xz": _from_xz}.get(path.suffix, _plain)
    for chunk in unpack(file):
        total += len(chunk)
        if total > most:
            raise DataError(f"{path} holds more than the {most:,} bytes allowed for a file of its size on disk; check it")
        report(file.tell() - before)
        before = file.tell()
        yield chunk


def _plain(file: io.BufferedReader) -> Iterator[bytes]:
    while chunk := file.read(CHUNK):
        yield chunk


def _from_gzip(file: io.BufferedReader) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file, mode="rb") as unpacked:
        while chunk := unpacked.read(CHUNK):
            yield chunk


def _from_xz(file: io.BufferedReader) -> Iterator[bytes]:
    """The content of all streams of the file. lzma.LZMAFile has no limit of memory: a header can ask for gigabytes."""
    rest = file.read(CHUNK)
    while rest:
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_DICTIONARY)
        while not stream.eof:
            if stream.needs_input and not rest and not (rest := file.read(CHUNK)):
                raise EOFError("the file ends inside the compressed data")
            yield stream.decompress(rest, CHUNK)
            rest = b""
        rest = stream.unused_data.lstrip(b"\0")  # streams may be padded with zeros
        while not rest and (padded := file.read(CHUNK)):
            rest = padded.lstrip(b"\0")
