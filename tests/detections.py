"""Random objects and detections, and what pycocotools says of them."""

import contextlib
import copy
import io
from typing import Any

import numpy as np
import torch

from polaformer.tasks.detection.counts import DetectionCounts
from polaformer.tasks.detection.detections import Detections

NAMES = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")
NAMES += ("AR1", "AR10", "AR100", "AR_small", "AR_medium", "AR_large")  # in COCO's order
Scene = tuple[Detections, dict[str, Any]]  # of one image


def polygon(box: list[float]) -> list[float]:
    """An ellipse in a box (left, top, width, height)."""
    angles = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    xs, ys = box[0] + box[2] * (0.5 + 0.5 * np.cos(angles)), box[1] + box[3] * (0.5 + 0.5 * np.sin(angles))
    return np.stack([xs, ys], axis=1).flatten().round(2).tolist()


def run_lengths(box: list[float], size: tuple[int, int]) -> dict[str, Any]:
    """A box as the uncompressed RLE that COCO has for crowds."""
    mask = np.zeros(size, dtype=np.uint8)
    left, top, width, height = (round(number) for number in box)
    mask[top : top + height, left : left + width] = 1
    flat = np.concatenate([[0], mask.flatten(order="F"), [2]])
    changes = np.flatnonzero(np.diff(flat))
    return {"size": list(size), "counts": np.diff(np.concatenate([[0], changes])).tolist()}


def annotation(number: int, box: list[float], label: int, size: tuple[int, int], *, crowd: bool = False) -> dict[str, Any]:
    shape: Any = run_lengths(box, size) if crowd else [polygon(box)]
    about = {"id": number, "bbox": box, "category_id": label, "iscrowd": int(crowd)}
    return about | {"area": round(box[2] * box[3] * (1.0 if crowd else 0.75), 1), "segmentation": shape}


def scene(number: int, seed: int, *, num_classes: int = 5, many: bool = False) -> Scene:
    """An image with objects of all sizes and crowds (sometimes with none), and detections with equal scores, right and wrong.

    The last class has no objects. many: more than 100 detections of one class.
    """
    random = np.random.default_rng((seed, number))
    size = (int(random.integers(150, 200)), int(random.integers(150, 240)))
    num_objects = int(random.choice([0, 1, 4, 9]))
    sides = random.choice([8.0, 20.0, 45.0, 100.0, 145.0], (num_objects, 2)) * random.uniform(0.8, 1.0, (num_objects, 2))
    corners = random.uniform(0, 1, (num_objects, 2)) * (np.array([size[1], size[0]]) - sides)
    boxes = np.concatenate([corners, sides], axis=1).round(2)
    labels = random.integers(0, num_classes - 1, num_objects)
    objects = [
        annotation(100 * number + index + 1, box, label, size, crowd=bool(random.random() < 0.2))
        for index, (box, label) in enumerate(zip(boxes.tolist(), labels.tolist(), strict=True))
    ]
    num_noise = 130 if many else int(random.integers(0, 6))
    repeated = random.integers(0, max(num_objects, 1), 2 * num_objects)
    near = boxes[repeated] + random.normal(0, 2, (len(repeated), 4))
    noise = random.uniform(0, 60, (num_noise, 4))
    found = np.concatenate([near, noise])
    found[:, 2:] = found[:, :2] + found[:, 2:].clip(1)
    wrong = random.random(len(repeated)) < 0.2
    classes = np.where(wrong, random.integers(0, num_classes, len(repeated)), labels[repeated] if num_objects else 0)
    classes = np.concatenate([classes, np.zeros(num_noise) if many else random.integers(0, num_classes, num_noise)])
    detections = Detections(
        torch.tensor(found, dtype=torch.float32),
        torch.tensor(random.integers(1, 8, len(found)) / 8, dtype=torch.float32),
        torch.tensor(classes, dtype=torch.int64),
        torch.tensor(random.random((len(found), 1, 28, 28)) ** 0.3, dtype=torch.float32),
    )
    return detections, {"image_id": number, "height": size[0], "width": size[1], "annotations": objects}


def counted(scenes: list[Scene], *, num_classes: int = 5, with_masks: bool = True) -> DetectionCounts:
    counts = DetectionCounts(num_classes, with_masks)
    for detections, truth in scenes:
        counts.add_image(detections, truth)
    return counts


def by_pycocotools(
    counts: DetectionCounts, truths: list[dict[str, Any]], kind: Any
) -> tuple[dict[str, float], list[tuple[float, float]]]:
    """The twelve numbers, and AP and AP50 of each class, in %, of the results JSON and the truths; NaN where it says -1."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        true = COCO()
        true.dataset = {
            "images": [{"id": one["image_id"], "height": one["height"], "width": one["width"]} for one in truths],
            "categories": [{"id": label, "name": str(label)} for label in range(counts.num_classes)],
            "annotations": [
                copy.deepcopy(shown) | {"image_id": one["image_id"]} for one in truths for shown in one["annotations"]
            ],
        }
        true.createIndex()
        evaluation = COCOeval(
            true, true.loadRes(counts.results(range(counts.num_classes), kind)), {"box": "bbox", "mask": "segm"}[kind]
        )
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    precision = evaluation.eval["precision"][..., 0, -1]  # (T, R, K)
    per_class = [(mean(precision[:, :, label]), mean(precision[0, :, label])) for label in range(counts.num_classes)]
    numbers = [100 * float(number) if number > -1 else float("nan") for number in evaluation.stats]
    return dict(zip(NAMES, numbers, strict=True)), per_class


def mean(values: np.ndarray) -> float:
    return 100 * float(values[values > -1].mean()) if (values > -1).any() else float("nan")
