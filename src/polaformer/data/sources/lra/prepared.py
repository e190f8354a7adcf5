"""The prepared form of any dataset: a directory with manifest.json and one safetensors file per split.

The manifest is written last, so that a directory that has one is complete. It holds the dataset's name and classes; for each
split the number of samples, the file with its size and digest, and statistics; and how the directory was made (`about`).
Everything is checked on reading: a file may be damaged, or written by anyone.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from polaformer.data.sources.lra.sequences import SPLITS, SequenceSplit
from polaformer.errors import DataError, SettingsError
from polaformer.regular_files import open_regular, read_regular, reason, too_large_reason, unpacked_limit, write_atomically

MANIFEST, FORMAT = "manifest.json", "polaformer-sequences-1"
MAX_MANIFEST = 2**20  # bytes
FILES = {split: f"{split}.safetensors" for split in SPLITS}
TENSORS = {"symbols": (np.uint8, 1), "offsets": (np.int64, 1), "documents": (np.int64, 2), "labels": (np.int64, 1)}
KEYS: dict[str, type] = {"dataset": str, "classes": list, "splits": dict, "about": dict}
SPLIT_KEYS: dict[str, type] = {"samples": int, "file": str, "bytes": int, "sha256": str, "statistics": dict}
REWRITE = "write it again with `polaformer data` and --overwrite"

Manifest = dict[str, Any]


def holds(path: Path) -> bool:
    """Whether the path is a prepared directory of any dataset, even if damaged."""
    with suppress(OSError, ValueError):
        return FORMAT.encode() in read_regular(path / MANIFEST, MAX_MANIFEST)
    return False


def load(path: Path) -> dict[str, SequenceSplit]:
    """The splits of a prepared directory; raises DataError."""
    manifest = read_manifest(path)
    classes = tuple(manifest["classes"])
    return {split: _read_split(path, classes, about) for split, about in manifest["splits"].items()}


def read_manifest(path: Path) -> Manifest:
    """The manifest of a prepared directory; raises DataError."""
    file = path / MANIFEST
    try:
        manifest = json.loads(read_regular(file, MAX_MANIFEST))
        _check_manifest(manifest)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} is not a manifest of sequences: {reason(error)}; {REWRITE}") from error
    return manifest


def existing(out: Path, dataset: str, about: Mapping[str, Any], *, overwrite: bool = False) -> Manifest | None:
    """The manifest of a directory that is finished and was made the same way; None if it has yet to be written.

    Raises SettingsError for a directory that holds anything else, DataError for one with a damaged manifest.
    overwrite: replace a prepared directory of any kind.
    """
    if not os.path.lexists(out):
        return None
    if not out.is_dir():
        raise SettingsError(f"{out} is not a directory; give another one with --out")
    if holds(out) and not overwrite:
        manifest = read_manifest(out)
        if (manifest["dataset"], manifest["about"]) != (dataset, json.loads(json.dumps(about))):
            what = f"{manifest['dataset']}, made in another way or from other files"
            raise SettingsError(f"{out} holds {what}; give another directory with --out, or --overwrite")
        if _is_complete(out, manifest):
            return manifest
    ours = {_temporary(out, split).name for split in SPLITS} | {f".{MANIFEST}.tmp"}
    ours |= {MANIFEST, *FILES.values()} if holds(out) else {file for file in FILES.values() if _is_ours(out / file)}
    others = sorted({entry.name for entry in out.iterdir()} - ours)
    if others:
        raise SettingsError(f"{out} is not empty: it holds {others[0]}; give another directory with --out")
    return None


def write(
    splits: Mapping[str, SequenceSplit],
    out: Path,
    dataset: str,
    about: Mapping[str, Any],
    *,
    statistics: Callable[[SequenceSplit], dict[str, Any]] = SequenceSplit.statistics,
    overwrite: bool = False,
) -> Manifest:
    """Writes the splits and returns the manifest; a directory that `existing` returns is left alone. Also raises OSError.

    about: how the data were made, for JSON; a directory made another way is not replaced unless `overwrite`.
    """
    if (found := existing(out, dataset, about, overwrite=overwrite)) is not None:
        return found
    out.mkdir(parents=True, exist_ok=True)
    (out / MANIFEST).unlink(missing_ok=True)  # from now on the directory is not complete
    written = {split: _write_split(_compact(sequences), out, split, statistics) for split, sequences in splits.items()}
    for split, file in FILES.items():
        if split in splits:
            os.replace(_temporary(out, split), out / file)
        else:
            (out / file).unlink(missing_ok=True)
    classes = list(next(iter(splits.values())).classes)
    manifest = {"format": FORMAT, "dataset": dataset, "classes": classes, "splits": written, "about": dict(about)}
    _check_manifest(manifest)
    write_atomically(out / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return manifest


def _temporary(out: Path, split: str) -> Path:
    return out / f".{FILES[split]}.tmp"


def _is_ours(file: Path) -> bool:
    """Whether a file was written here; the process may have been killed before writing the manifest."""
    with suppress(OSError, SafetensorError):
        open_regular(file).close()
        with safe_open(file, framework="np") as opened:
            return (opened.metadata() or {}).get("format") == FORMAT
    return False


def _is_complete(out: Path, manifest: Manifest) -> bool:
    """Whether the files have their sizes; their digests are compared when they are read."""
    files = {out / about["file"]: about["bytes"] for about in manifest["splits"].values()}
    return all(file.is_file() and file.stat().st_size == size for file, size in files.items())


def _write_split(
    sequences: SequenceSplit, out: Path, split: str, statistics: Callable[[SequenceSplit], dict[str, Any]]
) -> dict[str, Any]:
    """Writes the temporary file of a split and returns its entry in the manifest."""
    temporary = _temporary(out, split)
    temporary.unlink(missing_ok=True)  # left by a kill; or a link or FIFO, which must not be opened
    try:
        save_file({name: np.ascontiguousarray(getattr(sequences, name)) for name in TENSORS}, temporary, {"format": FORMAT})
    except SafetensorError as error:  # how the library reports OS errors
        raise OSError(str(error)) from error
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
        size, digest = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
    about = {"samples": len(sequences), "file": FILES[split], "bytes": size, "sha256": digest}
    return about | {"statistics": statistics(sequences)}


def _compact(split: SequenceSplit) -> SequenceSplit:
    """The same samples with the documents in the order of their first use, and without those that no sample uses."""
    used, first, numbers = np.unique(split.documents, return_index=True, return_inverse=True)
    order = np.argsort(first)
    if np.array_equal(used[order], np.arange(len(split.offsets) - 1)):
        return split
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    documents = [split.symbols[split.offsets[one] : split.offsets[one + 1]] for one in used[order]]
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in documents], dtype=np.int64)]).astype(np.int64)
    renumbered = ranks[numbers].reshape(split.documents.shape)
    return SequenceSplit(split.classes, np.concatenate(documents), offsets, renumbered, split.labels, split.origin, split.names)


def _check_manifest(manifest: Any) -> None:
    """Raises ValueError."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    _check_keys(manifest, KEYS, "")
    classes, splits = manifest["classes"], manifest["splits"]
    if len(classes) < 2 or not all(isinstance(name, str) for name in classes) or len(set(classes)) < len(classes):
        raise ValueError("classes are not two or more different names")
    if not splits or not set(splits) <= set(SPLITS):
        raise ValueError(f"its splits are {', '.join(splits) or 'none'}, not some of {', '.join(SPLITS)}")
    for split, about in splits.items():
        if not isinstance(about, dict):
            raise ValueError(f"its entry for {split} is not an object")
        _check_keys(about, SPLIT_KEYS, f"{split}: ")
        if about["file"] != FILES[split]:
            raise ValueError(f"{split}: file is {about['file']!r}, not {FILES[split]!r}")
        if about["samples"] < 1:
            raise ValueError(f"{split}: samples is {about['samples']}, not an integer ≥ 1")


def _check_keys(found: Mapping[str, Any], wanted: Mapping[str, type], where: str) -> None:
    for key, kind in wanted.items():
        if not isinstance(found.get(key), kind) or isinstance(found[key], bool):
            raise ValueError(f"{where}{key} is missing or not of type {kind.__name__}")


def _read_split(folder: Path, classes: tuple[str, ...], about: Mapping[str, Any]) -> SequenceSplit:
    path = folder / about["file"]
    try:
        _check_bytes(path, about)
        with safe_open(path, framework="np") as file:
            if set(file.keys()) != set(TENSORS):
                raise ValueError(f"it holds {', '.join(sorted(file.keys())) or 'nothing'}, not {', '.join(TENSORS)}")
            tensors = {name: file.get_tensor(name) for name in TENSORS}
        _check_tensors(tensors, len(classes), about["samples"])
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{path} is damaged: {reason(error)}; {REWRITE}") from error
    return SequenceSplit(classes, **tensors, origin=str(path))


def _check_bytes(path: Path, about: Mapping[str, Any]) -> None:
    """Raises ValueError or OSError. The size is compared first: a sparse file could have any."""
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        if status.st_size != about["bytes"]:
            raise ValueError(f"it should have {about['bytes']:,} bytes but has {status.st_size:,}")
        if status.st_size > unpacked_limit(status):
            raise ValueError(too_large_reason(status.st_size, unpacked_limit(status)))
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != about["sha256"]:
        raise ValueError(f"sha256 should be {about['sha256']} but is {digest}")


def _check_tensors(tensors: Mapping[str, np.ndarray], num_classes: int, samples: int) -> None:
    """Raises ValueError unless every number refers to something that exists."""
    for name, (dtype, ndim) in TENSORS.items():
        if tensors[name].dtype != dtype or tensors[name].ndim != ndim:
            raise ValueError(f"{name} is {tensors[name].dtype} with {tensors[name].ndim} dimensions")
    symbols, offsets, documents, labels = (tensors[name] for name in TENSORS)
    if labels.shape != (samples,) or documents.shape[0] != samples or documents.shape[1] < 1:
        raise ValueError(f"labels have shape {labels.shape} and documents {documents.shape}, for {samples} samples")
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(symbols) or np.any(offsets[1:] < offsets[:-1]):
        raise ValueError(f"offsets do not rise from 0 to {len(symbols)}, the number of symbols")
    if documents.min() < 0 or documents.max() >= len(offsets) - 1:
        raise ValueError(f"a sample has a document that is not one of the {len(offsets) - 1}")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(f"a label is not a number from 0 to {num_classes - 1}")
