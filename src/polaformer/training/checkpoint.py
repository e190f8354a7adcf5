"""Checkpoints that are whole or not there: directories of files, with a manifest of their digests.

A checkpoint is written beside its place (`.tmp-…`), every file and the directory are synced to the disk, then it is renamed to
`step-000001200`, a name that is never used twice, and only then are older ones removed. Bytes are checked against the manifest
before anything in them is looked at. Nothing here knows what the files hold.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from polaformer.errors import DataError
from polaformer.regular_files import open_regular, read_regular, reason

MANIFEST = "manifest.json"
FORMAT = "polaformer-checkpoint-1"
_NAME = re.compile(r"step-(\d{9,})(?:-(\d+))?")
_TEMPORARY = ".tmp-"
MOST_BYTES = 4 * 2**30  # of a file that is read whatever room it takes on the disk; a larger one must take a share of it there
MOST_COMPRESSED = 8  # bytes of a larger file for each on the disk; weights hardly compress, sparse files take no room at all


class DamagedError(DataError):
    """A checkpoint is not what was written; the message names the file, what was expected and what was found."""


class Found(NamedTuple):
    """The newest valid checkpoint and its files, and newer ones that were passed over, with what is wrong with them."""

    path: Path
    files: dict[str, bytes]
    damaged: dict[Path, str]


def write(folder: Path, step: int, files: Mapping[str, bytes], *, keep: int) -> Path:
    """Writes a checkpoint, then removes all but the newest `keep`; raises OSError, and then the older ones are untouched."""
    os.makedirs(folder, exist_ok=True)
    temporary = folder / f"{_TEMPORARY}{step:09d}-{os.getpid()}"
    _remove(temporary)
    os.mkdir(temporary)
    try:
        for name, content in files.items():
            _write_file(temporary / name, content)
        _write_file(temporary / MANIFEST, _manifest(files))
        _sync(temporary)
        final = _unused(folder, step)
        os.rename(temporary, final)
    except BaseException:
        _remove(temporary)
        raise
    _sync(folder)
    _prune(folder, keep)
    return final


def read(path: Path) -> dict[str, bytes]:
    """The files of a checkpoint, every byte checked; raises DamagedError."""
    return {name: _file(path / name, expected) for name, expected in _listed(path).items()}


def newest(folder: Path) -> Found | None:
    """The valid checkpoint of the highest step in a folder; damaged ones are named and passed over; None if there is none."""
    damaged: dict[Path, str] = {}
    for path in reversed(ordered(folder)):
        try:
            return Found(path, read(path), damaged)
        except DamagedError as error:
            damaged[path] = str(error)
    if damaged:
        raise DamagedError("no checkpoint can be used:", *(f"  {problem}" for problem in damaged.values()))
    return None


def at_step(folder: Path, step: int) -> dict[str, bytes]:
    """The files of the checkpoint of a step; raises DamagedError if there is none or it is damaged."""
    found = [path for path in ordered(folder) if path.name.startswith(f"step-{step:09d}")]
    if not found:
        raise DamagedError(f"{folder} has no checkpoint of step {step}; it was removed")
    return read(found[-1])


def set_aside(path: Path) -> None:
    """Takes a damaged checkpoint out of the way, so that it is neither resumed from nor counted among those that are kept."""
    target, number = path.with_name(f"damaged-{path.name}"), 0
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"damaged-{path.name}-{number}")
    os.rename(path, target)


def ordered(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first, valid or not."""
    if not folder.is_dir():
        return []
    found = [(match, folder / match.string) for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    return [path for match, path in sorted(found, key=lambda one: (int(one[0][1]), int(one[0][2] or 0)))]


def _manifest(files: Mapping[str, bytes]) -> bytes:
    listed = {name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()}
    body: dict[str, Any] = {"format": FORMAT, "files": listed}
    return _canonical(body | {"sha256": hashlib.sha256(_canonical(body)).hexdigest()})


def _listed(path: Path) -> dict[str, dict[str, Any]]:
    """The files that the manifest lists. It holds its own digest and can be written in one way only."""
    content = _bytes(path / MANIFEST)
    try:
        manifest = json.loads(content)
        digest = manifest.pop("sha256")
        whole = hashlib.sha256(_canonical(manifest)).hexdigest()
        if digest != whole or _canonical(manifest | {"sha256": digest}) != content:
            raise ValueError(f"it is not what was written with sha256 {digest}")
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r} but this library reads {FORMAT!r}")
        for name, about in manifest["files"].items():
            if Path(name).name != name:
                raise ValueError(f"{name!r} is no plain name of a file")
            if not isinstance(about["bytes"], int) or not isinstance(about["sha256"], str):
                raise ValueError(f"what it says of {name!r} is no size and digest")
        return dict(manifest["files"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path / MANIFEST} is damaged: {error}; use another checkpoint") from error


def _canonical(value: Any) -> bytes:
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True) + "\n").encode()


def _bytes(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {reason(error)}; use another checkpoint") from error


def _file(path: Path, expected: Mapping[str, Any]) -> bytes:
    """The bytes of a file of the manifest. Its size is compared before it is read: a manifest can name any."""
    try:
        with open_regular(path) as file:
            about = os.fstat(file.fileno())
            _compare(path, "bytes", expected, about.st_size)
            if about.st_size > max(MOST_BYTES, MOST_COMPRESSED * 512 * about.st_blocks):
                raise OSError(f"it has {about.st_size:,} bytes but takes {512 * about.st_blocks:,} on the disk")
            content = file.read(about.st_size)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {reason(error)}; use another checkpoint") from error
    _compare(path, "sha256", expected, hashlib.sha256(content).hexdigest())
    return content


def _compare(path: Path, kind: str, expected: Mapping[str, Any], found: int | str) -> None:
    if found != expected[kind]:
        raise DamagedError(f"{path} is damaged: {kind} should be {expected[kind]} but is {found}; use another checkpoint")


def _write_file(path: Path, content: bytes) -> None:
    """With the plain calls of the operating system, so that a test can stop between any two of them."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        rest = memoryview(content)
        while len(rest):
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unused(folder: Path, step: int) -> Path:
    """A name that is not taken, whatever stands there."""
    name, number = f"step-{step:09d}", 0
    while os.path.lexists(folder / (name if number == 0 else f"{name}-{number}")):
        number += 1
    return folder / (name if number == 0 else f"{name}-{number}")


def _prune(folder: Path, keep: int) -> None:
    """Removes what is older than the newest `keep`, and what a killed process left half written."""
    for name in os.listdir(folder):
        if name.startswith(_TEMPORARY):
            _remove(folder / name)
    for path in ordered(folder)[:-keep]:
        # Renamed first, so that a kill half-way leaves no checkpoint that lacks files.
        doomed = folder / f"{_TEMPORARY}{path.name}"
        _remove(doomed)
        os.rename(path, doomed)
        _remove(doomed)


def _remove(folder: Path) -> None:
    if os.path.islink(folder):  # it could lead to any folder
        os.unlink(folder)
        return
    if not os.path.isdir(folder):
        return
    for name in os.listdir(folder):
        os.unlink(folder / name)
    os.rmdir(folder)
