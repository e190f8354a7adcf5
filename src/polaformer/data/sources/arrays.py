"""Array files: .npz with x_train, y_train and, optionally, x_test, y_test and classes. Nothing in them is unpickled."""

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from polaformer.data.images import from_array
from polaformer.errors import DataError
from polaformer.regular_files import MAX_BYTES, open_regular, reason

MAX_CLASSES = 10**6


class Arrays:
    """Images (N, height, width) or (N, height, width, 3), uint8, and one label per image."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], split: str) -> None:
        self.images, self.classes, self.split = images, classes, split
        self.labels = [int(label) for label in labels]

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        """The split and the index in it."""
        return f"{self.split}/{index}"

    def read(self, index: int, channels: int) -> Image.Image:
        """The image."""
        return from_array(self.images[index], channels=channels)

    def content(self, index: int) -> bytes:
        """The pixels."""
        return self.images[index].tobytes()


def open_splits(path: Path) -> tuple[Arrays, Arrays | None]:
    """The training split and, if there is one, the test split; raises DataError."""
    arrays = _read(path)
    missing = [name for name in ("x_train", "y_train") if name not in arrays]
    if missing:
        raise DataError(
            f"{path} has no {' and no '.join(missing)}; it needs x_train and y_train, and may have x_test and y_test"
        )
    for split in ("train", "test"):
        _check(path, split, arrays)
    classes = _classes(path, arrays)
    train = Arrays(arrays["x_train"], arrays["y_train"], classes, "train")
    return train, Arrays(arrays["x_test"], arrays["y_test"], classes, "test") if "x_test" in arrays else None


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with open_regular(path) as opened:
            with zipfile.ZipFile(opened) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
            # A genuine file of uncompressed arrays may be larger: it takes as much room on the disk.
            most = max(MAX_BYTES, getattr(os.fstat(opened.fileno()), "st_blocks", 0) * 512)
            if unpacked > most:
                raise ValueError(f"it unpacks to {unpacked:,} bytes, more than the {most:,} allowed")
            opened.seek(0)
            with np.load(opened, allow_pickle=False) as file:
                return {name: _array(file, name) for name in file.files}
    except Exception as error:
        # A damaged file can raise nearly anything inside zipfile, zlib and NumPy; it all means the same.
        what = reason(error) or type(error).__name__
        raise DataError(
            f"{path} is not a complete .npz of plain arrays: {what}; write it again with numpy.savez or, if it is too large, "
            "as a folder or a .tar"
        ) from error


def _array(file: Any, name: str) -> np.ndarray:
    """The array of that name; raises ValueError if the file holds fewer bytes than the array takes in memory.

    NumPy reads nothing for items of zero bytes but may give them a size: a small file could hold arrays without limit.
    """
    entry = file.zip.getinfo(name if name in file.zip.NameToInfo else f"{name}.npy")
    array = file[name]
    if not isinstance(array, np.ndarray) or array.itemsize == 0 or array.nbytes > entry.file_size:
        raise ValueError(f"{name} is not a complete array")
    return array


def _classes(path: Path, arrays: dict[str, np.ndarray]) -> tuple[str, ...]:
    """The class names in the file, or the class numbers as strings."""
    largest = max(int(arrays[name].max(initial=0)) for name in ("y_train", "y_test") if name in arrays)
    if largest >= MAX_CLASSES:
        raise DataError(f"{path} has the label {largest}; give integers below {MAX_CLASSES:,}")
    given = arrays.get("classes")
    if given is None:
        return tuple(str(label) for label in range(largest + 1))
    if given.ndim != 1 or given.dtype.kind != "U" or not largest < len(given) <= MAX_CLASSES:
        raise DataError(
            f"{path}: classes has shape {given.shape} and type {given.dtype}, but the largest label is {largest}; give a list "
            f"of {largest + 1:,} to {MAX_CLASSES:,} names (strings), or leave classes out"
        )
    return tuple(given.tolist())


def _check(path: Path, split: str, arrays: dict[str, np.ndarray]) -> None:
    images, labels = arrays.get(f"x_{split}"), arrays.get(f"y_{split}")
    if images is None and labels is None:
        return
    if images is None or labels is None:
        raise DataError(f"{path} has only one of x_{split} and y_{split}; give both")
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or images.shape[3:] not in ((), (3,)) or 0 in images.shape[1:]:
        raise DataError(
            f"{path}: x_{split} is {images.dtype} of shape {images.shape}; give uint8 of shape (N, height, width) or "
            "(N, height, width, 3)"
        )
    if labels.shape != images.shape[:1] or not np.issubdtype(labels.dtype, np.integer) or (labels.size and labels.min() < 0):
        raise DataError(f"{path}: y_{split} is {labels.dtype} of shape {labels.shape}; give {len(images)} integers ≥ 0")
