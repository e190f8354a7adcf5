"""Generates Pathfinder as the Long Range Arena does: images in the release's files, drawn in batches.

An image has two long contours, some short ones, and two markers, which lie on the same long contour or not.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from polaformer.data.randomness import derive
from polaformer.data.sources.lra import pathfinder
from polaformer.data.sources.lra import pathfinder_stamps as stamps
from polaformer.data.sources.lra.generation import BeginStage, Progress, ignore, in_processes, opening
from polaformer.data.sources.lra.pathfinder_contours import Pairs, Segments, add_distractors, grow_pairs, integers
from polaformer.data.sources.lra.pathfinder_stamps import AREA, PATCH
from polaformer.errors import DataError
from polaformer.regular_files import write_atomically

TARGET_CONTRAST = 0.75 * 2
DISTRACTOR_CONTRAST = 2.0  # brighter than the long contours: a shortcut in the original data
CONTOUR_LENGTHS = range(3, 23)  # fewer segments leave no distractors, more hardly ever fit
BATCH_IMAGES = 1000  # drawn from one seed
VERSION = 1  # changes with the images that a seed gives


def generate(
    out: Path,
    num_images: int,
    contour_length: int,
    seed: int,
    *,
    num_workers: int = 1,
    overwrite: bool = False,
    stage: BeginStage = ignore,
) -> dict[str, Any]:
    """Writes images to the release's files in `out`, and returns the manifest.

    Resumes after a kill; the bytes depend on the numbers and the seed alone. Raises SettingsError if `out` has something else.
    """
    sizes = [min(BATCH_IMAGES, num_images - first) for first in range(0, num_images, BATCH_IMAGES)]
    generator = f"pathfinder {VERSION}"
    about = {"generator": generator, "seed": seed, "images": num_images, "contour_length": contour_length}
    level = out / pathfinder.level_name(contour_length)
    with opening(out, about, ["curv_contour_length_*"], overwrite=overwrite) as target:
        if target.manifest is not None:
            return target.manifest
        pending = [number for number in range(len(sizes)) if not pathfinder.metadata_file(level, number).exists()]
        done, advance = num_images - sum(sizes[number] for number in pending), stage("generating")
        advance(done, num_images)
        for written in in_processes(partial(write_batch, level, sizes, contour_length, seed), pending, num_workers):
            done += written
            advance(done, num_images)
        splits = _describe(level, num_images, stage("checking"))
        return target.finish({"dataset": "pathfinder", "classes": list(pathfinder.CLASSES), "splits": splits})


def write_batch(level: Path, sizes: list[int], contour_length: int, seed: int, number: int) -> int:
    """Draws and writes batch `number`, its metadata last, and returns the number of images."""
    random = np.random.Generator(np.random.PCG64(derive("pathfinder", VERSION, contour_length, seed, number)))
    images, labels = draw_images(sizes[number], contour_length, random)
    folder, file = level / pathfinder.IMAGES / str(number), pathfinder.metadata_file(level, number)
    for one in (folder, file.parent):
        one.mkdir(parents=True, exist_ok=True)
    rows = []
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image).save(folder / pathfinder.image_name(index))
        drawing = f"1.0 {contour_length} {distractor_length(contour_length)} {stamps.LENGTH} {stamps.THICKNESS} {stamps.GAP} 1"
        rows.append(f"{pathfinder.IMAGES}/{number} {pathfinder.image_name(index)} {index} {label} {drawing}\n")
    write_atomically(file, "".join(rows))
    return len(images)


def draw_images(number: int, contour_length: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 32, 32) of uint8, and labels (N,): 1 if the markers are the two ends of one contour, otherwise 0."""
    labels = integers(random, 2, number)
    pairs = grow_pairs(number, contour_length, random)
    distractors = add_distractors(pairs.occupied, distractor_length(contour_length), random)
    canvas = np.zeros((number, AREA))
    for contour in (pairs.first, pairs.second):
        _draw(canvas, contour, TARGET_CONTRAST)
    for contour in distractors:
        _draw(canvas, contour, DISTRACTOR_CONTRAST)
    return stamps.bytescale(np.maximum(stamps.window(canvas), _draw_markers(pairs, labels, random))), labels


def _describe(level: Path, num_images: int, advance: Progress) -> dict[str, Any]:
    """The splits as they are read back."""
    splits = pathfinder.load(level, advance)
    found = sum(len(split) for split in splits.values())
    if found != num_images:
        raise DataError(f"{level} has {found} readable images instead of {num_images}; remove it, and generate it again")
    return {
        name: {"samples": len(split), "sha256": split.digest(), "statistics": pathfinder.statistics(split)}
        for name, split in splits.items()
    }


def distractor_length(contour_length: int) -> int:
    """The number of segments of a distractor."""
    return contour_length // 3


def _draw(canvas: np.ndarray, contour: Segments, contrast: float) -> None:
    """Draws a contour on each of the canvases, (N, AREA)."""
    for start, direction in zip(contour.start.T, contour.direction.T, strict=True):
        there = np.flatnonzero(start >= 0)
        patch = (there * AREA + start[there])[:, None] + PATCH
        canvas.ravel()[patch] = np.maximum(canvas.ravel()[patch], contrast * stamps.LINES[direction[there]] / 255)


def _draw_markers(pairs: Pairs, labels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A disc where one contour begins, and one where it (label 1) or the other contour ends: (N, 32, 32), 0 to 1."""
    starts = np.stack([pairs.first.start, pairs.second.start])  # (2, N, L)
    image = np.arange(len(labels))
    begins = integers(random, 2, len(labels))
    ends = np.where(labels == 1, begins, 1 - begins)
    discs = (_MARKERS[stamps.coordinates(starts[which, image, at])] for which, at in ((begins, 0), (ends, -1)))
    return np.maximum(*discs) / 255


_MARKERS = stamps.markers()
