"""Figures for the report of a detector: predictions beside the ground truth, precision against recall, AP by class.

# n detections, m objects
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import isnan
from typing import NamedTuple

import numpy as np
from PIL import Image as PIL
from PIL.Image import Image

from polaformer.data.colours import class_colours
from polaformer.data.drawing import draw_objects
from polaformer.data.masks import mask_of
from polaformer.data.sources.coco import CocoSource
from polaformer.errors import ImageError
from polaformer.tasks.detection.average_precision import ImageResult
from polaformer.tasks.detection.counts import DetectionCounts
from polaformer.tasks.figures import Curves, Figure, PictureRow, Pictures, Rows, Text, selection

NUM_WORST, NUM_TYPICAL = 4, 4
MIN_SCORE = 0.3  # of detections that are shown …
SHARE_OF_BEST = 0.5  # … or of the highest score, if that is less
MAX_SHOWN = 30  # detections in one picture, those with the highest scores
MIN_IOU = 0.5  # of a detection that finds an object
SIDE = 480  # pixels of the longer side of a picture
MAX_CLASSES = 200  # in the table


class ObjectRecall(NamedTuple):
    """How many of the objects of an image were found, without crowd regions."""

    num_found: int
    num_objects: int

    @property
    def recall(self) -> float:
        """The share of the objects that were found, 1 in an image without objects."""
        return self.num_found / self.num_objects if self.num_objects else 1.0


def collect_figures(counts: DetectionCounts, source: CocoSource, split: str = "validation") -> dict[str, Figure]:
    """The figures of the report, by heading; images that can no longer be read are passed over."""
    return {
        "Predictions": _predictions(counts, source, split) or Text(f"None of the {split} images could be read."),
        "Precision and recall": _curves(counts, split),
        "COCO metrics": coco_metrics(counts),
        "Average precision by class": class_table(counts, source.classes, split),
    }


def found_objects(image: ImageResult, min_score: float) -> ObjectRecall:
    """How many objects have a detection of their class with an IoU of at least MIN_IOU and a score of at least `min_score`.

    A detection finds one object, that with the highest IoU; those with the highest scores choose first.
    """
    wanted = np.flatnonzero(~image.crowd)
    free = set(wanted.tolist())
    overlaps = _box_iou(image.found_boxes, image.true_boxes)  # (n, m)
    for index in np.argsort(-image.scores, kind="stable").tolist():
        if image.scores[index] < min_score:
            break
        same = [one for one in free if image.true_labels[one] == image.labels[index] and overlaps[index, one] >= MIN_IOU]
        if same:
            free.remove(max(same, key=lambda one: (overlaps[index, one], -one)))
    return ObjectRecall(len(wanted) - len(free), len(wanted))


def _box_iou(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The IoU of every two boxes, (n, 4) and (m, 4) as left, top, width, height → (n, m)."""
    ends, other_ends = boxes[:, :2] + boxes[:, 2:], others[:, :2] + others[:, 2:]
    sides = np.minimum(ends[:, None], other_ends) - np.maximum(boxes[:, None, :2], others[:, :2])
    shared = sides.clip(0).prod(axis=2)
    either = boxes[:, None, 2:].prod(axis=2) + others[:, 2:].prod(axis=1) - shared
    return np.divide(shared, either, out=np.zeros_like(shared), where=either > 0)


def _predictions(counts: DetectionCounts, source: CocoSource, split: str) -> Pictures | None:
    """The images with the lowest recall, then some that are drawn at random; None if none can be read."""
    best = max((float(image.scores.max()) for image in counts.images.values() if len(image.scores)), default=0.0)
    min_score = min(MIN_SCORE, SHARE_OF_BEST * best)
    found = {number: found_objects(image, min_score) for number, image in counts.images.items()}
    by_recall = sorted(found, key=lambda number: (found[number].recall, -found[number].num_objects, number))
    images = _readable(source, (number for number in by_recall if found[number].recall < 1))
    worst = dict(islice(images, NUM_WORST))
    rest = sorted(found.keys() - worst.keys())
    random.Random(0).shuffle(rest)
    typical = dict(islice(_readable(source, rest), NUM_TYPICAL))
    names = {source.image_id(index): source.name(index) for index in range(len(source))}
    rows = [
        _row(f"{names[number]} ({why})", image, counts.images[number], source.classes, min_score)
        for why, chosen in (("lowest recall", worst), ("drawn at random", typical))
        for number, image in chosen.items()
    ]
    chosen = selection(len(worst), "with the lowest recall, those with the most objects first", len(typical))
    caption = (
        f"Of the {len(found):,} {split} images: {chosen}. "
        f"Detections with a score ≥ {100 * min_score:.3g} % are shown (at most {MAX_SHOWN}). "
        f"An object counts as found if a detection with such a score has its class and an IoU ≥ {MIN_IOU}."
    )
    return Pictures(rows, caption) if rows else None


def _readable(source: CocoSource, numbers: Iterable[int]) -> Iterator[tuple[int, Image]]:
    """The images by id, in the size in which they are shown, without those that can no longer be read."""
    places = {source.image_id(index): index for index in range(len(source))}
    for number in numbers:
        try:
            yield number, _resized(source.read(places[number], 3))
        except ImageError:
            continue


def _resized(image: Image) -> Image:
    factor = SIDE / max(image.size)
    size = max(1, round(factor * image.width)), max(1, round(factor * image.height))
    return image.convert("RGB").resize(size, PIL.Resampling.LANCZOS, reducing_gap=3.0)


def _row(title: str, image: Image, result: ImageResult, classes: Sequence[str], min_score: float) -> PictureRow:
    """The ground truth, and beside it the detections."""
    num_found, num_objects = found_objects(result, min_score)
    shown = np.argsort(-result.scores, kind="stable")[:MAX_SHOWN]
    shown = shown[result.scores[shown] >= min_score]
    told = f", {num_found} of {_how_many(num_objects, 'object')} found" if num_objects else ""
    crowds = f" and {_how_many(num_crowds, 'crowd region')}" if (num_crowds := int(result.crowd.sum())) else ""
    return PictureRow(
        title,
        (
            (f"ground truth: {_how_many(num_objects, 'object')}{crowds}", _draw_truth(image, result, classes)),
            (f"prediction: {_how_many(len(shown), 'detection')}{told}", _draw_detections(image, result, classes, shown)),
        ),
    )


def _how_many(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _draw_truth(image: Image, result: ImageResult, classes: Sequence[str]) -> Image:
    colours = class_colours(classes)
    crowds = {name: f"{name} (crowd)" for name in classes}
    names = [classes[label] for label in result.true_labels]
    texts = [crowds[name] if crowd else name for name, crowd in zip(names, result.crowd, strict=True)]
    corners = np.concatenate([result.true_boxes[:, :2], result.true_boxes[:, :2] + result.true_boxes[:, 2:]], axis=1)
    masks = _masks(result, result.true_masks, image)
    colours |= {crowds[name]: colour for name, colour in colours.items()}
    return draw_objects(image, corners * _scale(image, result), texts, None, masks, colours)


def _draw_detections(image: Image, result: ImageResult, classes: Sequence[str], shown: np.ndarray) -> Image:
    names = [classes[label] for label in result.labels[shown]]
    masks = _masks(result, result.masks and [result.masks[index] for index in shown], image)
    boxes = result.boxes[shown] * _scale(image, result)
    return draw_objects(image, boxes, names, result.scores[shown], masks, class_colours(classes))


def _scale(image: Image, result: ImageResult) -> np.ndarray:
    """By what the corners of boxes are multiplied to get into the picture."""
    return np.array([image.width / result.width, image.height / result.height] * 2)


def _masks(result: ImageResult, masks: Sequence[str | None] | None, image: Image) -> Iterator[np.ndarray] | None:
    """The masks in the size of the picture, one at a time; empty where there is none."""
    if masks is None:
        return None
    size = (result.height, result.width)
    whole = (mask_of(() if counts is None else result.rle(counts), size) for counts in masks)
    return (np.asarray(PIL.fromarray(255 * mask).resize(image.size, PIL.Resampling.BILINEAR)) > 127 for mask in whole)


def _curves(counts: DetectionCounts, split: str) -> Curves:
    caption = (
        f"Precision at each recall on the {split} images, as COCO takes it (the highest precision at that recall or above)"
    )
    return Curves(counts.curves(), "recall", "precision", f"{caption}, mean over classes with objects.", unit_square=True)


def coco_metrics(counts: DetectionCounts) -> Rows:
    """All of COCO's numbers, of boxes and, if there are any, of masks."""
    record = counts.record()
    names = [name.removeprefix("box_") for name in record if name.startswith("box_")]
    values = ([_number(record[f"{kind}_{name}"]) for kind in counts.kinds] for name in names)
    caption = (
        "In %. AP: mean over IoU thresholds from 0.5 to 0.95 and over classes; AP50, AP75: at one threshold; small: up to 32² "
        "pixels, large: from 96² on. AR1, AR10, AR100: recall with so many detections per image and class; the others with 100."
    )
    rows = [(name.replace("_", " "), *row) for name, row in zip(names, values, strict=True)]
    return Rows(("metric", *counts.kinds), rows, caption, numeric=True)


def class_table(counts: DetectionCounts, classes: Sequence[str], split: str) -> Rows:
    """The classes with objects, those with the lowest AP first."""
    results = counts.per_class()
    known = sorted((one for one in results if not isnan(one.box_ap)), key=lambda one: (one.box_ap, -one.num_objects, one.label))
    columns = ("class", "objects", "box AP", "box AP50") + ("mask AP", "mask AP50") * counts.with_masks
    rows = []
    for one in known[:MAX_CLASSES]:
        values = [value for value in (one.box_ap, one.box_ap50, one.mask_ap, one.mask_ap50) if value is not None]
        rows.append((classes[one.label], f"{one.num_objects:,}", *map(_number, values)))
    caption = f"AP in % of the {len(known)} classes with objects in the {split} images, the lowest first."
    if len(known) > MAX_CLASSES:
        caption += f" Only the first {MAX_CLASSES} are listed."
    if len(known) < len(results):
        without = [classes[one.label] for one in results if isnan(one.box_ap)]
        caption += f" Without objects: {', '.join(without[:20])}{' …' * (len(without) > 20)}."
    return Rows(columns, rows, caption, numeric=True)


def _number(value: float) -> str:
    return "–" if isnan(value) else f"{value:.1f}"
