"""Pathfinder: are two markers connected by a dashed contour? 32×32 grey images, in the release's files.

A level of difficulty is a directory with imgs/BATCH/sample_NUMBER.png and metadata/BATCH.npy. Its metadata are not NumPy files,
whatever their names say, but lines of text: folder, file, number, label, and how the image was drawn.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polaformer.data.images import decode, read_file
from polaformer.data.randomness import derive
from polaformer.data.sources.lra.datasets import DATASETS, SIDE
from polaformer.data.sources.lra.sequences import SequenceSplit
from polaformer.errors import DataError
from polaformer.regular_files import read_regular, reason

CLASSES = DATASETS["pathfinder"].classes
IMAGES, METADATA = "imgs", "metadata"
HARD = "curv_contour_length_14"  # the level of every published table
MAX_METADATA_BYTES = 2**26
NUMPY = b"\x93NUMPY"


class Index(NamedTuple):
    """The images of a level, in the order of its metadata."""

    level: Path
    files: list[str]  # relative to the level
    labels: list[int]
    is_empty: list[bool]  # whether the file has no bytes, as one of the release has; it is skipped


def level_name(contour_length: int) -> str:
    """The directory of a level."""
    return f"curv_contour_length_{contour_length}"


def metadata_file(level: Path, batch: int) -> Path:
    """The file that lists the images of a batch."""
    return level / METADATA / f"{batch}.npy"


def image_name(index: int) -> str:
    """The file of an image, in the folder of its batch."""
    return f"sample_{index}.png"


def holds(path: Path) -> bool:
    """Whether it is a level, or a directory with a level in it."""
    return _is_level(path) or bool(_levels_in(path))


def load(
    path: Path, advance: Callable[[int, int], object] = lambda done, total: None, *, seed: int = 0
) -> dict[str, SequenceSplit]:
    """The splits: a random 80 %, 10 % and 10 % of the images; raises DataError. Progress is in images.

    path: a level, or a directory with levels: of several, the hard one. The release has no splits; `seed` chooses them among
    all listed images, so that an empty file, which is skipped, moves no other image to another split.
    """
    index = read_index(path)
    pixels = np.zeros((len(index.files), SIDE * SIDE), dtype=np.uint8)
    for number, file in enumerate(index.files):
        if not index.is_empty[number]:
            pixels[number] = _read(index.level / file)
        if number % 1000 == 999:
            advance(number + 1, len(index.files))
    splits = {name: _sequences(index, pixels, which) for name, which in split_indices(len(index.files), seed).items()}
    without = [name for name, split in splits.items() if not len(split)]
    if without:
        raise DataError(f"{index.level} lists {len(index.files)} images, with none for {', '.join(without)}; give at least 10")
    return splits


def read_index(path: Path) -> Index:
    """The images that the metadata of a level list; raises DataError that names file and line."""
    index = Index(_find_level(path), [], [], [])
    for file in _metadata_files(index.level):
        _read_metadata(file, index)
    if all(index.is_empty):
        where = index.level / METADATA
        raise DataError(f"{where} lists no images with content; fetch it again, or run `polaformer data pathfinder`")
    return index


def split_indices(number: int, seed: int) -> dict[str, np.ndarray]:
    """Which of `number` samples are in each split, in ascending order."""
    # Ranks of random floats, whose stream does not depend on the version of NumPy.
    order = np.random.Generator(np.random.PCG64(derive("pathfinder split", seed))).random(number).argsort(kind="stable")
    tenth = number // 10
    parts = np.split(order, [number - 2 * tenth, number - tenth])
    return dict(zip(("train", "val", "test"), map(np.sort, parts), strict=True))


def statistics(split: SequenceSplit) -> dict[str, Any]:
    """The common statistics, plus skipped images, the percentage of visible pixels, their quantiles, and the mean intensity."""
    if not len(split):
        return split.statistics() | {"skipped": len(split.skipped)}
    pixels = np.stack([split.read(index) for index in range(len(split))])
    shares = 100 * (pixels > 0).mean(1)
    visible = pixels[pixels > 0]
    low, median, high, bright = (round(float(one), 1) for one in np.quantile(visible, (0.25, 0.5, 0.75, 0.9)))
    return {
        **split.statistics(),
        "skipped": len(split.skipped),
        "visible_percent": {
            "mean": round(float(shares.mean()), 2),
            "sd": round(float(shares.std(ddof=min(1, len(split) - 1))), 2),
            "least": round(float(shares.min()), 1),
            "most": round(float(shares.max()), 1),
        },
        "intensity": round(float(pixels.mean()), 2),
        "visible_quantiles": {"25 %": low, "50 %": median, "75 %": high, "90 %": bright},
    }


def _sequences(index: Index, pixels: np.ndarray, which: np.ndarray) -> SequenceSplit:
    """The images at `which`, without the empty ones."""
    labels, is_empty = np.array(index.labels, dtype=np.int64), np.array(index.is_empty)
    kept, names = which[~is_empty[which]], {one: f"{index.level / index.files[one]}" for one in which}
    offsets = np.arange(len(kept) + 1, dtype=np.int64) * (SIDE * SIDE)
    own = np.arange(len(kept), dtype=np.int64)[:, None]
    skipped = {number: names[one] for number, one in enumerate(which) if is_empty[one]}
    chosen = [names[one] for one in kept]
    return SequenceSplit(CLASSES, pixels[kept].reshape(-1), offsets, own, labels[kept], str(index.level), chosen, skipped)


def _read(file: Path) -> np.ndarray:
    image = decode(read_file(file), str(file), channels=1)
    if image.size != (SIDE, SIDE):
        raise DataError(f"{file} has {image.width}×{image.height} pixels instead of {SIDE}×{SIDE}; fetch it again")
    return np.asarray(image).reshape(-1)


def _find_level(path: Path) -> Path:
    if _is_level(path):
        return path
    found = _levels_in(path)
    if HARD in found:
        return path / HARD
    if len(found) == 1:
        return path / found[0]
    if found:
        raise DataError(f"{path} has several levels ({', '.join(found)}); give one of them")
    raise DataError(f"{path} has no folders {IMAGES} and {METADATA}; give a level of pathfinder32, such as {HARD}")


def _is_level(path: Path) -> bool:
    return os.path.isdir(path / METADATA) and os.path.isdir(path / IMAGES)


def _levels_in(path: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(path) if name.startswith("curv_") and _is_level(path / name))
    except (OSError, ValueError):
        return []


def _metadata_files(level: Path) -> list[Path]:
    """Numbered batches in the order of their numbers, then others."""
    try:
        names = [name for name in os.listdir(level / METADATA) if name.endswith(".npy") and not name.startswith(".")]
    except OSError as error:
        raise DataError(f"{level / METADATA} cannot be listed: {reason(error)}; check its permissions") from error
    stems = sorted((name.removesuffix(".npy") for name in names), key=lambda stem: (not stem.isdecimal(), len(stem), stem))
    return [level / METADATA / f"{stem}.npy" for stem in stems]


def _read_metadata(file: Path, index: Index) -> None:
    """Adds the images that a metadata file lists to the index."""
    try:
        content = read_regular(file, MAX_METADATA_BYTES)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {reason(error)}; check its permissions, or fetch it again") from error
    if content.startswith(NUMPY):
        raise DataError(f"{file} is a NumPy file; the release's are text: write one line per image, fields separated by spaces")
    for number, line in enumerate(content.decode("utf-8", "backslashreplace").splitlines(), start=1):
        where = f"{file}, line {number}"
        fields = line.split()
        if len(fields) < 4:
            raise DataError(f"{where} has {len(fields)} fields; it must have at least 4: folder, file, number and label")
        if not all(_NAME.fullmatch(part) for part in (*fields[0].split("/"), fields[1])):
            raise DataError(f"{where} names {fields[0]}/{fields[1]}, which is not a path below {index.level}; fetch it again")
        if fields[3] not in ("0", "1"):
            raise DataError(f"{where}: the label is {fields[3]!r}; it must be 0 or 1")
        _add(f"{fields[0]}/{fields[1]}", int(fields[3]), where, index)


_NAME = re.compile(r"\w[\w.-]*")


def _add(file: str, label: int, where: str, index: Index) -> None:
    try:
        size = os.stat(index.level / file).st_size
    except OSError as error:
        # Without the line there would be other splits; an empty file keeps the place of its image.
        raise DataError(f"{where}: {file} cannot be read: {reason(error)}; fetch it again, or write an empty file") from error
    index.files.append(file)
    index.labels.append(label)
    index.is_empty.append(not size)
