"""What an evaluation of a segmenter counts: how many pixels of each class got which class.

# K classes, h height, w width
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polaformer.data.segmentation_images import SegmentationBatch
from polaformer.data.sources.label_sets import IGNORED
from polaformer.tasks.segmentation.inference import classify
from polaformer.tasks.segmentation.inference_settings import Inference
from polaformer.tasks.segmentation.segmenter import Segmenter


class ClassIoU(NamedTuple):
    """What a segmenter achieves on one class, in %; NaN where nothing can be said."""

    label: int
    num_pixels: int  # of the class in the truth
    num_predicted: int  # pixels that got the class
    iou: float  # NaN if no pixel has or got the class
    accuracy: float  # share of the pixels of the class that got it; NaN without any


class ImageAccuracy(NamedTuple):
    """How many of the labelled pixels of an image got the right class."""

    num_right: int
    num_pixels: int

    @property
    def accuracy(self) -> float:
        """The share of the labelled pixels that got the right class; 1 in an image without any."""
        return self.num_right / self.num_pixels if self.num_pixels else 1.0


class MissedPixels(NamedTuple):
    """How many pixels of a class an image has that got another class."""

    number: int
    image: int  # its index in its split


@dataclass
class SegmentationCounts:
    """The confusion matrix over all labelled pixels, in whole numbers: exactly equal for any number of processes.

    inference: how images are segmented. confusion (K, K), int64: true classes in rows, predicted ones in columns, without
    ignored pixels. images: by the index of the image in its split. most_missed: of each class that some image misses, by its
    label, the image that misses most of it.
    """

    num_classes: int
    inference: Inference
    confusion: Tensor = field(default_factory=lambda: torch.empty(0))
    images: dict[int, ImageAccuracy] = field(default_factory=dict)
    most_missed: dict[int, MissedPixels] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)  # one line for every image that could not be read

    def __post_init__(self) -> None:
        if not self.confusion.numel():
            self.confusion = torch.zeros(self.num_classes, self.num_classes, dtype=torch.int64)

    def add(self, model: nn.Module, batch: SegmentationBatch) -> None:
        """Adds what the model predicts for the images of a batch, each of them alone and in its original pixels."""
        assert isinstance(model, Segmenter)
        self.bad += batch.bad
        for index, views, truth in zip(batch.indices.tolist(), batch.views, batch.truths, strict=True):
            self.add_image(index, classify(model, views, (truth.shape[0], truth.shape[1]), self.inference), truth)

    def add_image(self, index: int, predicted: Tensor, truth: Tensor) -> None:
        """Adds the predicted classes (h, w) of an image with the true classes (h, w), which may be IGNORED."""
        if predicted.shape != truth.shape:
            raise ValueError(f"add_image: {tuple(predicted.shape)} predicted classes for {tuple(truth.shape)} pixels")
        if index in self.images:
            raise ValueError(f"SegmentationCounts: image {index} was counted twice; each image has one index")
        own = confusion_matrix(predicted, truth, self.num_classes)
        self.confusion += own
        self.images[index] = ImageAccuracy(int(own.trace()), int(own.sum()))
        missed = own.sum(dim=1) - own.diagonal()
        for label in missed.nonzero()[:, 0].tolist():
            self._note_missed(label, MissedPixels(int(missed[label]), index))

    def _note_missed(self, label: int, one: MissedPixels) -> None:
        known = self.most_missed.setdefault(label, one)
        self.most_missed[label] = min(known, one, key=lambda missed: (-missed.number, missed.image))

    @classmethod
    def merge(cls, parts: "Sequence[SegmentationCounts]") -> "SegmentationCounts":
        """The images of all processes."""
        images = {index: image for part in parts for index, image in part.images.items()}
        if len(images) < (total := sum(len(part.images) for part in parts)):
            twice = total - len(images)
            raise ValueError(f"SegmentationCounts: images counted twice: {twice}; each image has one index")
        confusion = torch.stack([part.confusion for part in parts]).sum(dim=0)
        bad = sorted(line for part in parts for line in part.bad)
        merged = cls(parts[0].num_classes, parts[0].inference, confusion, images, bad=bad)
        for part in parts:
            for label, missed in part.most_missed.items():
                merged._note_missed(label, missed)
        return merged

    def per_class(self) -> list[ClassIoU]:
        """The result of each class, in the order of the classes."""
        right, true, predicted = (one.tolist() for one in _sums(self.confusion))
        return [
            ClassIoU(
                label,
                true[label],
                predicted[label],
                _percent(hit, true[label] + predicted[label] - hit),
                _percent(hit, true[label]),
            )
            for label, hit in enumerate(right)
        ]

    def record(self) -> dict[str, Any]:
        """Numbers of images and labelled pixels, and in %: mIoU, the share of pixels that are right, its mean over classes.

        mIoU is the mean over the classes that at least one labelled pixel has or got. constant_mIoU: of answering the most
        frequent class everywhere, the least that a segmenter must beat.
        """
        classes, num_pixels = self.per_class(), int(self.confusion.sum())
        most = max((one.num_pixels for one in classes), default=0)
        num_present = sum(one.num_pixels > 0 for one in classes)
        return {
            "samples": len(self.images),
            "pixels": num_pixels,
            "mIoU": _mean([one.iou for one in classes]),
            "pixel_accuracy": _percent(int(self.confusion.trace()), num_pixels),
            "mean_accuracy": _mean([one.accuracy for one in classes]),
            "constant_mIoU": _percent(most, num_pixels * num_present),
        }

    def summary(self) -> dict[str, str]:
        """The result for people."""
        record = self.record()
        names = {"mIoU": "mIoU", "pixel_accuracy": "pixel accuracy", "mean_accuracy": "mean class accuracy"}
        names |= {"constant_mIoU": "mIoU of the most frequent class alone"}
        return {text: "–" if math.isnan(record[name]) else f"{record[name]:.2f} %" for name, text in names.items()}


def confusion_matrix(predicted: Tensor, truth: Tensor, num_classes: int) -> Tensor:
    """The number of pixels by true and predicted class, (K, K) int64 on the CPU; those whose truth is IGNORED are left out."""
    counted = truth != IGNORED
    pairs = truth[counted].long() * num_classes + predicted[counted].long()
    return torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes).cpu()


def _sums(confusion: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each class: the pixels that are right, those of the truth, those predicted."""
    return confusion.diagonal(), confusion.sum(dim=1), confusion.sum(dim=0)


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else float("nan")


def _mean(values: list[float]) -> float:
    """The mean of those that are not NaN, rounded once; NaN if there is none."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else float("nan")
