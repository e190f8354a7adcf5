"""Image: CIFAR-10 as sequences of grey levels, row by row. The symbols are the grey levels.

Two forms are read: CIFAR-10's binary form (data_batch_1.bin to data_batch_5.bin, test_batch.bin), and an array file (.npz) with
x_train, y_train, x_test and y_test. The Python form consists of pickles, which can run code when they are read: it is refused.
"""

import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from polaformer.data.randomness import derive
from polaformer.data.sources import arrays
from polaformer.data.sources.lra.datasets import DATASETS, SIDE
from polaformer.data.sources.lra.lines import Meter, ReportBytes, size_on_disk
from polaformer.data.sources.lra.sequences import SequenceSplit
from polaformer.errors import DataError
from polaformer.regular_files import MAX_BYTES, open_regular, read_regular, reason

CLASSES = DATASETS["image"].classes
PIXELS = SIDE * SIDE
RECORD = 1 + 3 * PIXELS  # bytes: the label, then the red, green and blue planes
TRAIN, TEST = tuple(f"data_batch_{number}.bin" for number in range(1, 6)), ("test_batch.bin",)
NAMES = "batches.meta.txt"
FOLDERS = ("", "cifar-10-batches-bin")
# Grey = floor(255.5 · (0.2989 R + 0.5870 G + 0.1140 B) / 255) = floor((2989 R + 5870 G + 1140 B) · 511 / 5,100,000).
WEIGHTS, DIVISOR = (2989 * 511, 5870 * 511, 1140 * 511), 5_100_000
CHUNK = 1000  # images that are converted at a time
SEED, VAL_SHARE = 0, 10  # one image in ten is held out
BINARY = "the binary form (cifar-10-binary.tar.gz, unpacked: data_batch_1.bin to data_batch_5.bin and test_batch.bin)"


def holds(path: Path) -> bool:
    """Whether the path is CIFAR-10 in its binary form, or an array file with x_train."""
    with suppress(OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        if path.suffix != ".npz" or path.is_dir():
            return _folder(path) is not None
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            return "x_train.npy" in archive.namelist()
    return False


def load(path: Path, advance: Callable[[int, int], object] = lambda done, total: None) -> dict[str, SequenceSplit]:
    """The splits train, val and test; raises DataError. advance: called with the number of bytes read, and of all bytes.

    One image in ten of the training images is in val: 5,000 of CIFAR-10's 50,000.
    """
    if path.suffix == ".npz" and not path.is_dir():
        splits = _load_arrays(path)
        advance(1, 1)
    else:
        splits = _load_binary(_binary_folder(path), advance)
    return {**_hold_out(splits["train"]), **{name: split for name, split in splits.items() if name != "train"}}


def statistics(split: SequenceSplit) -> dict[str, Any]:
    """The common statistics, plus the mean grey level and the share of black pixels, which published models mask as padding."""
    grey = split.symbols.reshape(-1, PIXELS)[split.documents[:, 0]]
    return split.statistics() | {"mean_grey": round(float(grey.mean()), 2), "black": round(float(np.mean(grey == 0)), 5)}


def to_grey(red: np.ndarray, green: np.ndarray, blue: np.ndarray) -> np.ndarray:
    """The grey levels of uint8 channels, as TensorFlow converts them, in exact integer arithmetic.

    Departs: TensorFlow computes in float32, which is off by one grey level for one colour in 70,000.
    """
    tables = [np.arange(256, dtype=np.int32) * weight for weight in WEIGHTS]
    grey = np.empty(red.shape, dtype=np.uint8)
    for start in range(0, len(red), CHUNK):
        part = slice(start, start + CHUNK)
        grey[part] = (tables[0][red[part]] + tables[1][green[part]] + tables[2][blue[part]]) // DIVISOR
    return grey


def held_out(number: int) -> np.ndarray:
    """Which of `number` training images are for validation: the same ones everywhere, in ascending order."""
    order = sorted(range(number), key=lambda index: derive("image", SEED, number, index))
    return np.sort(np.asarray(order[: number // VAL_SHARE], dtype=np.int64))


def _hold_out(train: SequenceSplit) -> dict[str, SequenceSplit]:
    is_val = np.zeros(len(train), dtype=bool)
    is_val[held_out(len(train))] = True
    return {name: _chosen(train, np.flatnonzero(is_val == flag)) for name, flag in (("train", False), ("val", True))}


def _chosen(split: SequenceSplit, indices: np.ndarray) -> SequenceSplit:
    """The images at `indices`, without the pixels of the others."""
    names = None if split.names is None else [split.names[index] for index in indices]
    return replace(_sequences(split.symbols.reshape(-1, PIXELS)[indices], split.labels[indices], split.origin), names=names)


def _sequences(grey: np.ndarray, labels: np.ndarray, origin: str) -> SequenceSplit:
    offsets = PIXELS * np.arange(len(grey) + 1, dtype=np.int64)
    documents = np.arange(len(grey), dtype=np.int64)[:, None]
    return SequenceSplit(CLASSES, grey.reshape(-1), offsets, documents, labels.astype(np.int64), origin)


# The binary form


def _folder(path: Path) -> Path | None:
    folders = [path / below for below in FOLDERS]
    return next((folder for folder in folders if any((folder / name).exists() for name in (*TRAIN, *TEST))), None)


def _binary_folder(path: Path) -> Path:
    """The folder of the binary form; raises DataError that says what the path holds instead."""
    try:
        found = _folder(path)
        if found is None:
            names = [*path.iterdir(), *(path / "cifar-10-batches-py").glob("*")] if path.is_dir() else [path]
            if any(name.name.startswith("data_batch_") or name.suffix in (".pickle", ".pkl") for name in names):  # without .bin
                raise DataError(f"{path} holds the Python form, pickles, which are not read; fetch {BINARY}")
            raise DataError(f"{path} is not CIFAR-10; give {BINARY}, or an .npz with x_train, y_train, x_test and y_test")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}; check it and its permissions") from error
    missing = [name for name in (*TRAIN, *TEST) if not (found / name).exists()]
    if missing:
        raise DataError(f"{found} has no {', no '.join(missing)}; fetch {BINARY} again")
    return found


def _load_binary(folder: Path, advance: Callable[[int, int], object]) -> dict[str, SequenceSplit]:
    _check_names(folder / NAMES)
    report = Meter(size_on_disk(*(folder / name for name in (*TRAIN, *TEST))), advance)
    return {"train": _join(folder, TRAIN, report), "test": _join(folder, TEST, report)}


def _join(folder: Path, files: tuple[str, ...], report: ReportBytes) -> SequenceSplit:
    """All images of some files as one split."""
    batches = [_read_batch(folder / name, report) for name in files]
    names = [
        f"{name}, record {number}" for name, (_, labels) in zip(files, batches, strict=True) for number in range(len(labels))
    ]
    grey, labels = (np.concatenate(part) for part in zip(*batches, strict=True))
    return replace(_sequences(grey, labels, str(folder)), names=names)


def _read_batch(path: Path, report: ReportBytes) -> tuple[np.ndarray, np.ndarray]:
    """Grey levels (N, 1024) and labels (N,) of one file."""
    try:
        content = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}; fetch {BINARY} again") from error
    if not content or len(content) % RECORD:
        raise DataError(f"{path} has {len(content):,} bytes, not a multiple of {RECORD:,}; fetch {BINARY} again")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD)
    wrong = np.flatnonzero(records[:, 0] >= len(CLASSES))
    if len(wrong):
        label = int(records[wrong[0], 0])
        raise DataError(f"{path}, record {wrong[0]}: label is {label}, not 0 to {len(CLASSES) - 1}; fetch {BINARY} again")
    planes = records[:, 1:].reshape(-1, 3, PIXELS)
    report(len(content))
    return to_grey(planes[:, 0], planes[:, 1], planes[:, 2]), records[:, 0]


def _check_names(path: Path) -> None:
    """Raises DataError if the file of class names, which may be missing, has others than CIFAR-10's."""
    if not path.exists():
        return
    try:
        names = read_regular(path, 2**16).decode("utf-8", "backslashreplace").split()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}; fetch {BINARY} again") from error
    if tuple(names) != CLASSES:
        raise DataError(f"{path} lists {', '.join(names[:12]) or 'nothing'}; CIFAR-10 has {', '.join(CLASSES)}")


# The array file


def _load_arrays(path: Path) -> dict[str, SequenceSplit]:
    train, test = arrays.open_splits(path)
    if test is None:
        raise DataError(f"{path} has no x_test and y_test; add them")
    return {"train": _from_arrays(path, train), "test": _from_arrays(path, test)}


def _from_arrays(path: Path, source: arrays.Arrays) -> SequenceSplit:
    images, split = source.images, source.split
    if images.shape[1:3] != (SIDE, SIDE) or not len(images):
        raise DataError(f"{path}: x_{split} has shape {images.shape}; give images of {SIDE}×{SIDE} pixels")
    if len(source.classes) > len(CLASSES):
        raise DataError(f"{path} has {len(source.classes)} classes; CIFAR-10 has {len(CLASSES)}")
    named = source.classes != tuple(str(label) for label in range(len(source.classes)))
    if named and source.classes != CLASSES:
        raise DataError(f"{path} has the classes {', '.join(source.classes)}; CIFAR-10 has {', '.join(CLASSES)}")
    grey = images if images.ndim == 3 else to_grey(images[..., 0], images[..., 1], images[..., 2])
    names = [f"{path.name}, {source.name(index)}" for index in range(len(images))]
    return replace(_sequences(grey.reshape(-1, PIXELS), np.asarray(source.labels), str(path)), names=names)
