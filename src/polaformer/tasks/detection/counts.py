"""What an evaluation of a detector counts: detections and the objects of the images, by image.

# n detections of an image, H height, W width
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from polaformer.data.detection_images import DetectionBatch
from polaformer.data.masks import compressed, rle_from_mask, rle_of
from polaformer.ops.grid import Grid
from polaformer.tasks.detection.average_precision import AveragePrecision, ImageResult, Kind, average_precision
from polaformer.tasks.detection.detections import Detections, paste_masks, rescaled

MAX_PASTED = 50_000_000  # pixels of the masks that are pasted at once: 50 MB
CURVE_THRESHOLDS = (0.5, 0.75)


class ClassResult(NamedTuple):
    """What a detector achieves on one class: AP in %, NaN without objects; None for masks that are not counted."""

    label: int
    num_objects: int  # without crowd regions
    box_ap: float
    box_ap50: float
    mask_ap: float | None
    mask_ap50: float | None


@dataclass
class DetectionCounts:
    """Detections and objects of every image: the average precision is exactly equal for any number of processes.

    with_masks: whether the detector predicts masks, whose average precision is then counted too.
    """

    num_classes: int
    with_masks: bool = False
    images: dict[int, ImageResult] = field(default_factory=dict)  # by COCO's image id
    bad: list[str] = field(default_factory=list)  # one line for every image that could not be read
    _evaluated: dict[Kind, AveragePrecision] = field(default_factory=dict, init=False, repr=False, compare=False)

    def add(self, model: nn.Module, batch: DetectionBatch) -> None:
        """Adds what the model detects in the images of a batch."""
        self.bad += batch.bad
        if not len(batch):
            return
        detected: list[Detections] = model(batch.images, batch.mask, batch.sizes)
        for found, size, truth in zip(detected, batch.sizes, batch.truths, strict=True):
            self.add_image(rescaled(found, size, (truth["height"], truth["width"])), truth)

    def add_image(self, found: Detections, truth: dict[str, Any]) -> None:
        """Adds the detections of an image, in its original pixels.

        truth: "image_id", "height", "width" and "annotations", each as in a COCO file but with the index of its class.
        """
        number = truth["image_id"]
        if number in self.images:
            raise ValueError(f"DetectionCounts: image {number} was counted twice; image ids must be unique")
        self.images[number] = _image_result(found, truth, self.with_masks)
        self._evaluated = {}

    @classmethod
    def merge(cls, parts: "Sequence[DetectionCounts]") -> "DetectionCounts":
        """The images of all processes."""
        bad = sorted(line for part in parts for line in part.bad)
        images = {number: image for part in parts for number, image in part.images.items()}
        if len(images) < (total := sum(len(part.images) for part in parts)):
            raise ValueError(f"DetectionCounts: {total - len(images)} images were counted twice; image ids must be unique")
        return cls(parts[0].num_classes, parts[0].with_masks, images, bad)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What the average precision is counted of."""
        return ("box", "mask") if self.with_masks else ("box",)

    def record(self) -> dict[str, Any]:
        """Numbers of images and detections, and COCO's twelve numbers in % for boxes and masks: box_AP, box_AP50, mask_AP …"""
        numbers = {f"{kind}_{name}": value for kind in self.kinds for name, value in self._evaluate(kind).numbers().items()}
        num_detections = sum(len(image.scores) for image in self.images.values())
        return {"samples": len(self.images), "detections": num_detections, **numbers}

    def summary(self) -> dict[str, str]:
        """The result for people."""
        record = self.record()
        found = {}
        for kind in self.kinds:
            for name in ("AP", "AP50", "AP75"):
                found[f"{kind} {name}"] = _percent(record[f"{kind}_{name}"])
        areas = [_percent(record[f"box_AP_{area}"]).removesuffix(" %") for area in ("small", "medium", "large")]
        return found | {"box AP S / M / L": f"{' / '.join(areas)} %"}

    def per_class(self) -> list[ClassResult]:
        """The result of each class, in the order of the classes."""
        counts = np.zeros(self.num_classes, dtype=np.int64)
        for image in self.images.values():
            counts += np.bincount(image.true_labels[~image.crowd], minlength=self.num_classes)
        boxes = self._evaluate("box").per_class()
        masks = self._evaluate("mask").per_class() if self.with_masks else [(None, None)] * self.num_classes
        rows = zip(counts.tolist(), boxes, masks, strict=True)
        return [ClassResult(label, number, *box, *mask) for label, (number, box, mask) in enumerate(rows)]

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """Points (recall, precision), means over the classes with objects, by name: "box, IoU ≥ 0.5" and others."""
        return {
            f"{kind}, IoU ≥ {threshold:g}": self._evaluate(kind).curve(threshold)
            for kind in self.kinds
            for threshold in CURVE_THRESHOLDS
        }

    def results(self, category_ids: Sequence[int], kind: Kind = "box") -> list[dict[str, Any]]:
        """The detections in COCO's results format, with the ids that the classes have in the file.

        One kind at a time: given both, COCO's tools take the area of a detection from its box, which changes mask AP_small,
        AP_medium and AP_large.
        """
        if len(category_ids) != self.num_classes:
            raise ValueError(f"results: there are {len(category_ids)} category ids for {self.num_classes} classes")
        if kind not in self.kinds:
            raise ValueError(f"results: there are no results of kind {kind!r}; there are {', '.join(self.kinds)}")
        return [
            {"image_id": number, "category_id": category_ids[label], **place, "score": score}
            for number, image in sorted(self.images.items())
            for label, score, place in zip(image.labels.tolist(), image.scores.tolist(), _places(image, kind), strict=True)
        ]

    def _evaluate(self, kind: Kind) -> AveragePrecision:
        if kind not in self._evaluated:
            self._evaluated[kind] = average_precision(self.images, self.num_classes, kind)
        return self._evaluated[kind]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_evaluated": {}}  # can be computed again


def _image_result(found: Detections, truth: dict[str, Any], with_masks: bool) -> ImageResult:
    size, annotations = (truth["height"], truth["width"]), truth["annotations"]
    boxes = np.array([one["bbox"] for one in annotations], dtype=np.float64).reshape(-1, 4)
    return ImageResult(
        *size,
        boxes=_array(found.boxes.reshape(-1, 4), np.float32),
        scores=_array(found.scores, np.float32),
        labels=_array(found.labels, np.int32),
        masks=tuple(_encoded(found, size)) if with_masks else None,
        true_boxes=boxes,
        true_areas=np.array([one["area"] for one in annotations], dtype=np.float64),
        true_labels=np.array([one["category_id"] for one in annotations], dtype=np.int32),
        crowd=np.array([one.get("iscrowd", 0) for one in annotations], dtype=bool),
        true_masks=tuple(_counts_of(one.get("segmentation"), size) for one in annotations) if with_masks else None,
    )


def _counts_of(segmentation: Any, size: Grid) -> str | None:
    """The counts of the compressed run lengths of a segmentation in one of COCO's forms."""
    if segmentation is None:
        return None
    if isinstance(segmentation, dict):
        runs = segmentation["counts"]
        return (compressed(runs, size) if isinstance(runs, list) else rle_of(segmentation, size))["counts"]
    return rle_of(tuple(np.array(one, dtype=np.float64).reshape(-1, 2) for one in segmentation), size)["counts"]


def _encoded(found: Detections, size: Grid) -> Iterator[str]:
    """The masks of the detections as compressed RLEs, a few at a time."""
    if found.masks is None:
        raise ValueError("DetectionCounts: masks are to be counted, but the model gives none")
    step = max(1, MAX_PASTED // (size[0] * size[1]))
    for few, boxes in zip(found.masks.split(step), found.boxes.split(step), strict=True):
        yield from (rle_from_mask(mask)["counts"] for mask in paste_masks(few, boxes, size).cpu())


def _array(values: Tensor, dtype: Any) -> np.ndarray:
    return values.detach().cpu().numpy().astype(dtype)


def _places(image: ImageResult, kind: Kind) -> list[dict[str, Any]]:
    """Where each detection is, in COCO's results format."""
    if kind == "mask":
        return [{"segmentation": image.rle(one)} for one in image.masks or ()]
    return [{"bbox": box} for box in image.found_boxes.tolist()]


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1f} %"
