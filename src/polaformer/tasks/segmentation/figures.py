"""Figures for the report of a segmenter: predictions beside the ground truth, IoU by class, which classes are confused."""

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import isnan
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image as PIL
from PIL.Image import Image

from polaformer.data.class_maps import draw_classes
from polaformer.data.sources.label_sets import IGNORED
from polaformer.data.sources.semantic import SemanticSource
from polaformer.errors import ImageError
from polaformer.tasks.figures import Confusion, Figure, PictureRow, Pictures, Rows, Text, selection
from polaformer.tasks.segmentation.counts import ClassIoU, SegmentationCounts

if TYPE_CHECKING:
    from polaformer.tasks.segmentation.predictor import SegmentationPredictor

NUM_WORST, NUM_TYPICAL = 4, 4
SIDE = 480  # pixels of the longer side of a picture
MAX_CLASSES = 200  # in the table


class Labelled(NamedTuple):
    """An image with its true classes."""

    number: int
    image: Image
    truth: np.ndarray


def collect_figures(
    counts: SegmentationCounts, source: SemanticSource, predictor: "SegmentationPredictor", split: str = "validation"
) -> dict[str, Figure]:
    """The figures of the report, by heading; images that can no longer be read are passed over."""
    return {
        "IoU by class": class_table(counts, source.classes, split),
        "Predictions": _predictions(counts, source, predictor, split) or Text(f"None of the {split} images could be read."),
        "Confusion of classes": Confusion(counts.confusion, source.classes, split, parts="pixels"),
    }


def _predictions(
    counts: SegmentationCounts, source: SemanticSource, predictor: "SegmentationPredictor", split: str
) -> Pictures | None:
    """For each of the worst classes the image that misses most of it, then images drawn at random; None if none can be read."""
    results, why = counts.images, _missed_classes(counts, source.classes)
    worst = list(islice(_readable(source, why), NUM_WORST))
    rest = sorted(results.keys() - {one.number for one in worst})
    random.Random(0).shuffle(rest)
    typical = list(islice(_readable(source, rest), NUM_TYPICAL))
    rows = [
        _row(f"{source.name(one.number)} ({why.get(one.number, '') if one in worst else 'drawn at random'})", one, predictor)
        for one in (*worst, *typical)
    ]
    chosen = selection(len(worst), "with the most missed pixels of the classes with the lowest IoU", len(typical))
    caption = (
        f"Of the {len(results):,} {split} images: {chosen}. "
        "Pixels without a class in the truth do not count; they are shown uncoloured there."
    )
    return Pictures(rows, caption) if rows else None


def _missed_classes(counts: SegmentationCounts, classes: Sequence[str]) -> dict[int, str]:
    """For each class, the worst first, the index of the image that misses most of it, with the classes of which it does."""
    found: dict[int, list[str]] = {}
    for one in sorted(counts.per_class(), key=lambda one: (one.iou, one.label)):
        if one.label in counts.most_missed:
            index = counts.most_missed[one.label].image
            found.setdefault(index, []).append(f"{classes[one.label]}, IoU {one.iou:.1f} %")
    return {index: "misses " + "; ".join(missed) for index, missed in found.items()}


def _readable(source: SemanticSource, indices: Iterable[int]) -> Iterator[Labelled]:
    """The images with their truths, without those that can no longer be read."""
    for index in indices:
        try:
            yield Labelled(index, *source.pair(index))
        except ImageError:
            continue


def _row(title: str, one: Labelled, predictor: "SegmentationPredictor") -> PictureRow:
    """The image, the truth and the prediction side by side."""
    found, counted = predictor.segment(one.image), one.truth != IGNORED
    share = f": {100 * (found == one.truth)[counted].mean():.1f} % of the pixels right" if counted.any() else ""
    size = _shown_size(one.image)
    image = one.image.convert("RGB").resize(size, PIL.Resampling.LANCZOS, reducing_gap=3.0)
    true, predicted = (
        draw_classes(image, _resized(labels, size), predictor.classes, predictor.colours) for labels in (one.truth, found)
    )
    return PictureRow(title, (("image", image), ("ground truth", true), (f"prediction{share}", predicted)))


def _shown_size(image: Image) -> tuple[int, int]:
    factor = SIDE / max(image.size)
    return max(1, round(factor * image.width)), max(1, round(factor * image.height))


def _resized(labels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return np.asarray(PIL.fromarray(labels).resize(size, PIL.Resampling.NEAREST))


def class_table(counts: SegmentationCounts, classes: Sequence[str], split: str) -> Rows:
    """The classes that some pixel has or got, those with the lowest IoU first."""
    results, num_pixels = counts.per_class(), int(counts.confusion.sum())
    known = sorted((one for one in results if not isnan(one.iou)), key=lambda one: (one.iou, one.label))
    rows = [_class_row(one, classes, num_pixels) for one in known[:MAX_CLASSES]]
    caption = (
        f"In % of the {num_pixels:,} labelled pixels of the {split} images, the lowest IoU first. Accuracy: share of the "
        "pixels of the class that got it. mIoU is the mean of the column IoU."
    )
    if len(known) > MAX_CLASSES:
        caption += f" Only the first {MAX_CLASSES} are listed."
    if without := [classes[one.label] for one in results if isnan(one.iou)]:
        caption += f" Neither there nor predicted: {', '.join(without[:20])}{' …' * (len(without) > 20)}."
    return Rows(("class", "pixels", "predicted", "IoU", "accuracy"), rows, caption, numeric=True)


def _class_row(one: ClassIoU, classes: Sequence[str], num_pixels: int) -> tuple[str, ...]:
    shares = (f"{100 * number / num_pixels:.2f}" for number in (one.num_pixels, one.num_predicted))
    return classes[one.label], *shares, _number(one.iou), _number(one.accuracy)


def _number(value: float) -> str:
    return "–" if isnan(value) else f"{value:.1f}"
