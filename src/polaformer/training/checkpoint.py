"""Atomic checkpoints: directories of files with a manifest of their digests, either complete or absent.

A checkpoint is written to a temporary directory (`.tmp-…`); every file and the directory are synced to the disk; then it is
renamed to `step-000001200`, a name that is never reused; only then are older ones removed. Bytes are checked against the
manifest before they are parsed. Nothing here depends on what the files contain.
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
MAX_BYTES = 4 * 2**30  # a larger file is read only if it is not sparse: it must occupy enough of the disk
MAX_COMPRESSION = 8  # bytes of a larger file per byte on the disk; weights hardly compress, sparse files occupy nothing


class DamagedError(DataError):
    """A checkpoint differs from what was written; the message names the file, what was expected and what was found."""


class FoundCheckpoint(NamedTuple):
    """The newest valid checkpoint and its files, and the newer, damaged ones that were skipped, with their problems."""

    path: Path
    files: dict[str, bytes]
    damaged: dict[Path, str]


def write(folder: Path, step: int, files: Mapping[str, bytes], *, keep: int) -> Path:
    """Writes a checkpoint, then removes all but the newest `keep`. If this raises OSError, the older ones are untouched."""
    os.makedirs(folder, exist_ok=True)
    temporary = folder / f"{_TEMPORARY}{step:09d}-{os.getpid()}"
    _remove(temporary)
    os.mkdir(temporary)
    try:
        for name, content in files.items():
            _write_file(temporary / name, content)
        _write_file(temporary / MANIFEST, _manifest(files))
        _sync(temporary)
        final = _unused_path(folder, step)
        os.rename(temporary, final)
    except BaseException:
        _remove(temporary)
        raise
    _sync(folder)
    _prune(folder, keep)
    return final


def read(path: Path) -> dict[str, bytes]:
    """The files of a checkpoint, with every byte checked; raises DamagedError."""
    return {name: _read_checked(path / name, expected) for name, expected in _read_manifest(path).items()}


def newest(folder: Path) -> FoundCheckpoint | None:
    """The valid checkpoint with the highest step, and the damaged ones that were skipped; None if there are no checkpoints.

    Raises DamagedError if all of them are damaged.
    """
    damaged: dict[Path, str] = {}
    for path in reversed(list_checkpoints(folder)):
        try:
            return FoundCheckpoint(path, read(path), damaged)
        except DamagedError as error:
            damaged[path] = str(error)
    if damaged:
        raise DamagedError("no checkpoint can be used:", *(f"  {problem}" for problem in damaged.values()))
    return None


def at_step(folder: Path, step: int) -> dict[str, bytes]:
    """The files of the checkpoint of a step; raises DamagedError if it is missing or damaged."""
    found = [path for path in list_checkpoints(folder) if path.name.startswith(f"step-{step:09d}")]
    if not found:
        raise DamagedError(f"{folder} has no checkpoint of step {step}; it was removed")
    return read(found[-1])


def set_aside(path: Path) -> None:
    """Renames a damaged checkpoint, so that it is neither resumed from nor counted among those that are kept."""
    target, number = path.with_name(f"damaged-{path.name}"), 0
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"damaged-{path.name}-{number}")
    os.rename(path, target)


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a directory, oldest first, valid or not."""
    if not folder.is_dir():
        return []
    found = [(match, folder / match.string) for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    return [path for match, path in sorted(found, key=lambda one: (int(one[0][1]), int(one[0][2] or 0)))]


def _manifest(files: Mapping[str, bytes]) -> bytes:
    listed = {name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()}
    body: dict[str, Any] = {"format": FORMAT, "files": listed}
    return _canonical(body | {"sha256": hashlib.sha256(_canonical(body)).hexdigest()})


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """The files that the manifest lists. It contains its own digest, and only its canonical form is valid."""
    content = _read_bytes(path / MANIFEST)
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
                raise ValueError(f"{name!r} is not a plain file name")
            if not isinstance(about["bytes"], int) or not isinstance(about["sha256"], str):
                raise ValueError(f"its entry for {name!r} is not a size and a digest")
        return dict(manifest["files"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path / MANIFEST} is damaged: {error}; use another checkpoint") from error


def _canonical(value: Any) -> bytes:
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True) + "\n").encode()


def _read_bytes(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {reason(error)}; use another checkpoint") from error


def _read_checked(path: Path, expected: Mapping[str, Any]) -> bytes:
    """The bytes of a file of the manifest. Its size is compared before it is read: a manifest can name any file."""
    try:
        with open_regular(path) as file:
            about = os.fstat(file.fileno())
            _check(path, "bytes", expected, about.st_size)
            if about.st_size > max(MAX_BYTES, MAX_COMPRESSION * 512 * about.st_blocks):
                raise OSError(f"it has {about.st_size:,} bytes but takes {512 * about.st_blocks:,} on the disk")
            content = file.read(about.st_size)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {reason(error)}; use another checkpoint") from error
    _check(path, "sha256", expected, hashlib.sha256(content).hexdigest())
    return content


def _check(path: Path, kind: str, expected: Mapping[str, Any], found: int | str) -> None:
    if found != expected[kind]:
        raise DamagedError(f"{path} is damaged: {kind} should be {expected[kind]} but is {found}; use another checkpoint")


def _write_file(path: Path, content: bytes) -> None:
    """Writes with plain system calls, so that a test can stop between any two of them."""
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


def _unused_path(folder: Path, step: int) -> Path:
    """A path for the checkpoint of a step at which there is nothing yet, not even a dangling link."""
    name, number = f"step-{step:09d}", 0
    while os.path.lexists(folder / (name if number == 0 else f"{name}-{number}")):
        number += 1
    return folder / (name if number == 0 else f"{name}-{number}")


def _prune(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints, and those that a killed process left half written."""
    for name in os.listdir(folder):
        if name.startswith(_TEMPORARY):
            _remove(folder / name)
    for path in list_checkpoints(folder)[:-keep]:
        # Rename first, so that a kill halfway leaves no checkpoint with missing files.
        doomed = folder / f"{_TEMPORARY}{path.name}"
        _remove(doomed)
        os.rename(path, doomed)
        _remove(doomed)


def _remove(folder: Path) -> None:
    if os.path.islink(folder):  # it may point to any directory
        os.unlink(folder)
        return
    if not os.path.isdir(folder):
        return
    for name in os.listdir(folder):
        os.unlink(folder / name)
    os.rmdir(folder)
