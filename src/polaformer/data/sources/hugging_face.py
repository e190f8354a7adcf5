"""Hugging Face datasets, from a local folder, through timm's reader."""

import os
from pathlib import Path
from typing import Any

from PIL.Image import Image

from polaformer.data.images import EXTENSIONS, decode, read_file
from polaformer.data.sources import parquet
from polaformer.data.sources.arrow import is_plain_stream
from polaformer.errors import DataError, ImageError
from polaformer.extras import require
from polaformer.regular_files import MAX_BYTES, too_large_reason

PARQUET, PACKED = (".parquet", ".geoparquet", ".gpq"), (".zip", ".tar", ".h5", ".hdf5", ".lance", ".vortex")


class HuggingFace:
    """One split, with images in column `image` and labels in column `label`."""

    def __init__(self, root: Path, split: str) -> None:
        from timm.data.readers.reader_hfds import ReaderHfds

        self.reader = ReaderHfds(str(root), split=split)
        self.split = split
        by_label = sorted((label, name) for name, label in self.reader.class_to_idx.items())
        self.classes = tuple(name for _, name in by_label)
        given = list(self.reader.dataset["label"])
        missing = [index for index, label in enumerate(given) if label is None or not 0 <= label < len(self.classes)]
        if missing:
            raise DataError(f"{root}: {len(missing)} images have no label, first {self.name(missing[0])}; remove or label them")
        self.labels = [int(label) for label in given]

    def __len__(self) -> int:
        return len(self.reader)

    def name(self, index: int) -> str:
        """The split and the index in it."""
        return f"{self.split}/{index}"

    def read(self, index: int, channels: int) -> Image:
        """The image."""
        return decode(self.content(index), self.name(index), channels=channels)

    def content(self, index: int) -> bytes:
        """The bytes of the image file, stored in its row or separately."""
        row = self.reader.dataset.data.column("image")[index]
        path = row["path"].as_py() if row.is_valid else None
        if row.is_valid and row["bytes"].is_valid and (size := row["bytes"].as_buffer().size):
            if size > MAX_BYTES:
                raise ImageError(f"{self.name(index)} cannot be read: {too_large_reason(size, MAX_BYTES)}; check the dataset")
            return row["bytes"].as_py()
        if not path:
            raise ImageError(f"{self.name(index)} cannot be read: it is missing; check the dataset")
        return read_file(path)


def open_splits(folder: str) -> tuple[HuggingFace, HuggingFace | None]:
    """The training split and, if there is one, the validation or test split; raises DataError. Nothing is downloaded."""
    require("data", "datasets")
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # a dataset may refer to remote files
    root = Path(folder)
    if not folder or not root.is_dir():
        raise DataError(f"there is no folder {folder}; download the dataset first, and give its folder after hfds:")
    _check_files(root)
    splits = _split_names(root)
    if "train" not in splits:
        raise DataError(f"{folder} has the splits {', '.join(splits) or 'none'}; a split 'train' is needed")
    val = next((name for name in ("validation", "val", "test") if name in splits), None)
    train = _open(root, "train")
    return train, None if val is None else _open(root, val)


def _open(root: Path, split: str) -> HuggingFace:
    try:
        found = HuggingFace(root, split)
        # The reader adds the column if it is missing.
        if found.reader.dataset.data.column("image").null_count == len(found):
            raise ValueError("there are no images")
        return found
    except DataError:
        raise
    except Exception as error:
        # The package raises whatever its readers raise.
        raise DataError(
            f"{root} has no column 'image' of images and 'label' of classes ({_line(error)}); rename them"
        ) from error


def _check_files(root: Path) -> None:
    """Raises DataError for files that `datasets` would wait for forever, or unpack until memory or the disk is full."""
    seen: set[str] = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        where = os.path.realpath(folder)
        if where in seen:  # a link to a parent
            folders.clear()
            continue
        seen.add(where)
        for path in (Path(folder, name) for name in names):
            if path.exists() and (problem := _problem(path)):
                raise DataError(f"{path} {problem}")


def _problem(path: Path) -> str | None:
    from datasets.utils.extract import Extractor

    if not path.is_file():
        return "is not a regular file; remove it from the dataset"
    extension = path.suffix.lower()
    if extension in EXTENSIONS:
        return None  # read one at a time, by `content`
    if extension in PARQUET:
        return parquet.problem(path, "store its images as files")
    status = path.stat()
    on_disk = min(status.st_size, getattr(status, "st_blocks", status.st_size) * 512)
    if status.st_size > max(MAX_BYTES, on_disk):
        return f"cannot be read: {too_large_reason(status.st_size, max(MAX_BYTES, on_disk))}; remove it from the dataset"
    elif extension == ".arrow":
        return _arrow_problem(path)
    elif extension in PACKED or Extractor.infer_extractor_format(path):
        return "is an archive or compressed; unpack it, and remove it from the dataset"
    return None


def _arrow_problem(path: Path) -> str | None:
    try:
        if is_plain_stream(path):
            return None
        what = "it is compressed, or has columns of types other than numbers, strings, structs and lists"
    except Exception as error:
        what = _line(error)
    return f"is not a usable Arrow stream: {what}; write it again with Dataset.to_parquet"


def _split_names(root: Path) -> list[str]:
    import datasets

    try:
        found: Any = datasets.get_dataset_split_names(str(root))
    except Exception as error:
        raise DataError(f"{root} is not a dataset that the package `datasets` can read: {_line(error)}; check it") from error
    return list(found)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
