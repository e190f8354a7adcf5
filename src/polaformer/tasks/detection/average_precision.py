"""COCO's average precision and recall of detections, through faster-coco-eval.

The thresholds, area ranges and limits are COCO's own, in float64: torchmetrics has the thresholds in float32, which moves AP.

# n detections, m objects; T IoU thresholds, R = 101 recall thresholds, K classes, A area ranges, M limits on detections
"""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from polaformer.data.masks import Rle, rle_of
from polaformer.extras import require

Kind = Literal["box", "mask"]

AREAS = ("", "small", "medium", "large")  # A, COCO's: up to 32² pixels, up to 96², and above
LIMITS = (1, 10, 100)  # M, highest-scoring detections per image and class
THRESHOLDS = tuple(np.linspace(0.5, 0.95, 10).tolist())  # T


@dataclass(frozen=True, eq=False)
class ImageResult:
    """The objects of an image and what a detector found in it, in original pixels; compact, since processes send it."""

    height: int
    width: int
    boxes: np.ndarray  # (n, 4) float32, corners
    scores: np.ndarray  # (n,) float32
    labels: np.ndarray  # (n,) int32
    masks: tuple[str, ...] | None  # the counts of n compressed RLEs; None if masks are not counted
    true_boxes: np.ndarray  # (m, 4) float64, left, top, width, height
    true_areas: np.ndarray  # (m,) float64
    true_labels: np.ndarray  # (m,) int32
    crowd: np.ndarray  # (m,) bool
    true_masks: tuple[str | None, ...] | None  # None for an object whose mask is unknown

    @property
    def found_boxes(self) -> np.ndarray:
        """The detected boxes (n, 4) as COCO has them: left, top, width, height, in float64."""
        corners = self.boxes.astype(np.float64)
        return np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)

    def rle(self, counts: str) -> Rle:
        """A mask of this image in COCO's form."""
        return {"size": [self.height, self.width], "counts": counts}


class ClassPrecision(NamedTuple):
    """The average precision of one class, in %; NaN for a class without objects."""

    ap: float
    ap50: float


@dataclass(frozen=True, eq=False)
class AveragePrecision:
    """COCO's arrays; -1 stands for classes without objects."""

    precision: np.ndarray  # (T, R, K, A), with the highest limit
    recall: np.ndarray  # (T, K, A, M)

    def numbers(self) -> dict[str, float]:
        """COCO's twelve numbers in %, in its order; NaN where there are no objects to find."""
        precision, recall, last = self.precision, self.recall, len(LIMITS) - 1
        found = {"AP": precision[..., 0], "AP50": precision[_at(0.5), ..., 0], "AP75": precision[_at(0.75), ..., 0]}
        found |= {f"AP_{area}": precision[..., index] for index, area in enumerate(AREAS) if area}
        found |= {f"AR{limit}": recall[..., 0, index] for index, limit in enumerate(LIMITS)}
        found |= {f"AR_{area}": recall[..., index, last] for index, area in enumerate(AREAS) if area}
        return {name: _mean(values) for name, values in found.items()}

    def per_class(self) -> list[ClassPrecision]:
        """AP and AP50 of each class."""
        by_class = self.precision[..., 0].transpose(2, 0, 1)  # (K, T, R)
        return [ClassPrecision(_mean(values), _mean(values[_at(0.5)])) for values in by_class]

    def curve(self, threshold: float) -> list[tuple[float, float]]:
        """Points (recall, precision) at an IoU threshold, means over the classes with objects; [] without objects."""
        values = self.precision[_at(threshold), :, :, 0]  # (R, K)
        values = values[:, values[0] > -1]
        recalls = np.linspace(0, 1, len(values)).tolist()
        return list(zip(recalls, values.mean(axis=1).tolist(), strict=True)) if values.size else []


def average_precision(images: Mapping[int, ImageResult], num_classes: int, kind: Kind) -> AveragePrecision:
    """COCO's evaluation of the images, by id, at the IoU of boxes or of masks; it orders images by id."""
    require("train", "faster_coco_eval")
    from faster_coco_eval.core.coco import COCO
    from faster_coco_eval.core.faster_eval_api import COCOeval_faster

    about = {
        "images": [{"id": number, "height": image.height, "width": image.width} for number, image in images.items()],
        "categories": [{"id": label, "name": str(label)} for label in range(num_classes)],
    }
    sides = []
    for listed in (_objects, _detections):
        annotations = [one for number, image in images.items() for one in listed(image, number, kind)]
        for index, one in enumerate(annotations, start=1):  # an object with id 0 would never count as found
            one["id"] = index
        sides.append(COCO(about | {"annotations": annotations}))
    evaluation = COCOeval_faster(*sides, iouType={"box": "bbox", "mask": "segm"}[kind], print_function=_log)
    evaluation.params.catIds = list(range(num_classes))
    evaluation.evaluate()
    evaluation.accumulate()
    precision, recall = (np.asarray(evaluation.eval[name]) for name in ("precision", "recall"))
    return AveragePrecision(precision[..., -1].copy(), recall)


def _objects(image: ImageResult, number: int, kind: Kind) -> Iterator[dict[str, Any]]:
    fields = (image.true_boxes, image.true_areas, image.true_labels, image.crowd)
    for index, (box, area, label, crowd) in enumerate(zip(*(field.tolist() for field in fields), strict=True)):
        about = {"image_id": number, "category_id": label, "bbox": box, "area": area, "iscrowd": int(crowd)}
        yield about if kind == "box" else about | _mask_fields(image, index)


def _mask_fields(image: ImageResult, index: int) -> dict[str, Any]:
    """The mask of an object. An object without one is as a crowd that fills its box: detections in it are not wrong."""
    if (counts := _masks(image.true_masks)[index]) is not None:
        return {"segmentation": image.rle(counts)}
    left, top, width, height = image.true_boxes[index].tolist()
    outline = np.array([[left, top], [left + width, top], [left + width, top + height], [left, top + height]])
    return {"segmentation": rle_of((outline,), (image.height, image.width)), "iscrowd": 1}


def _detections(image: ImageResult, number: int, kind: Kind) -> Iterator[dict[str, Any]]:
    fields = (image.found_boxes, image.scores, image.labels)
    masks = [image.rle(counts) for counts in _masks(image.masks)] if kind == "mask" else []
    areas = _mask_areas(masks) if kind == "mask" else image.found_boxes[:, 2:].prod(axis=1).tolist()
    for index, (box, score, label) in enumerate(zip(*(field.tolist() for field in fields), strict=True)):
        mask = {"segmentation": masks[index]} if kind == "mask" else {}
        about = {"image_id": number, "category_id": label, "score": score, "iscrowd": 0}
        yield about | {"bbox": box, "area": areas[index], **mask}


def _masks(masks: tuple[Any, ...] | None) -> tuple[Any, ...]:
    if masks is None:
        raise ValueError("average_precision: masks are asked for but were not counted")
    return masks


def _mask_areas(masks: list[dict[str, Any]]) -> list[float]:
    from faster_coco_eval.core import mask

    return [float(area) for area in mask.area(masks)] if masks else []


def _at(threshold: float) -> int:
    """The index of an IoU threshold."""
    return next(index for index, one in enumerate(THRESHOLDS) if math.isclose(one, threshold))


def _mean(values: np.ndarray) -> float:
    """The mean in %, over what COCO does not leave out."""
    counted = values[values > -1]
    return 100 * float(counted.mean()) if counted.size else math.nan


def _log(text: object) -> None:
    logging.getLogger(__name__).debug("%s", text)
