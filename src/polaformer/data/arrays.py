"""Array files: .npz with x_train and y_train, x_test and y_test, and, if wanted, classes. Nothing in them is unpickled."""

import io
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from polaformer.data.images import from_array
from polaformer.errors import DataError


class Arrays:
    """Images (N, height, width) or (N, height, width, 3) of bytes, with a label each."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], part: str) -> None:
        self.images, self.classes, self.part = images, classes, part
        self.labels = [int(label) for label in labels]

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        """The part and the place in it."""
        return f"{self.part}/{index}"

    def read(self, index: int, channels: int) -> Image.Image:
        """The image."""
        return from_array(self.images[index], channels=channels)

    def content(self, index: int) -> bytes:
        """The pixels."""
        return self.images[index].tobytes()


def open_splits(path: Path) -> tuple[Arrays, Arrays | None]:
    """The training part, and the test part where there is one; raises DataError."""
    arrays = _read(path)
    missing = [name for name in ("x_train", "y_train") if name not in arrays]
    if missing:
        raise DataError(
            f"{path} has no {' and no '.join(missing)}; it needs x_train and y_train, and may have x_test and y_test"
        )
    for part in ("train", "test"):
        _check(path, part, arrays)
    largest = max(int(arrays[name].max(initial=0)) for name in ("y_train", "y_test") if name in arrays)
    given = arrays.get("classes")
    classes = tuple(str(i) for i in range(largest + 1)) if given is None else tuple(str(name) for name in given.tolist())
    if len(classes) <= largest:
        raise DataError(f"{path} names {len(classes)} classes but has the label {largest}; name them all, or leave classes out")
    train = Arrays(arrays["x_train"], arrays["y_train"], classes, "train")
    return train, Arrays(arrays["x_test"], arrays["y_test"], classes, "test") if "x_test" in arrays else None


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zipfile.zlib.error, KeyError) as error:  # type: ignore[attr-defined]
        raise DataError(f"{path} is no .npz of plain arrays: {error}; write it again with numpy.savez") from error


def _check(path: Path, part: str, arrays: dict[str, np.ndarray]) -> None:
    images, labels = arrays.get(f"x_{part}"), arrays.get(f"y_{part}")
    if images is None and labels is None:
        return
    if images is None or labels is None:
        raise DataError(f"{path} has only one of x_{part} and y_{part}; give both")
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3):
        raise DataError(
            f"{path}: x_{part} is {images.dtype} of shape {images.shape}; give bytes (uint8) of shape (N, height, width) or "
            "(N, height, width, 3)"
        )
    if labels.shape != images.shape[:1] or not np.issubdtype(labels.dtype, np.integer) or (labels.size and labels.min() < 0):
        raise DataError(
            f"{path}: y_{part} is {labels.dtype} of shape {labels.shape}; give {len(images)} whole numbers of at least 0"
        )
