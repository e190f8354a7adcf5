"""Semantic segmentation as a registered task, with the options of its commands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polaformer.tasks.image_task import ImageCheck, ImageEvaluation, ImageTask, directory_problems, size_problems
from polaformer.tasks.segmentation.inference_settings import Mode
from polaformer.tasks.segmentation.recipe import SegmentationRecipe
from polaformer.tasks.task import ListedModels, PredictionOptions

if TYPE_CHECKING:
    from polaformer.tasks.segmentation.predictor import SegmentationPredictor


@dataclass(frozen=True, kw_only=True)
class InferenceOptions:
    """How to segment images; by default as the weights file specifies."""

    size: int | None = None
    """Length of the shorter side of the images, in pixels; as in training by default."""
    mode: Mode | None = None
    """Segment whole images, or slide a window over them and average; as in training by default."""
    window: int | None = None
    """Side of the sliding window, in pixels; as in training by default."""
    stride: int | None = None
    """Distance between windows, in pixels; by default as in training, or two thirds of --window."""
    scales: tuple[float, ...] = (1.0,)
    """Factors of the size; with several the probabilities are averaged."""
    flip: bool = False
    """Average with the prediction for the mirrored image."""

    def inference_problems(self) -> list[str]:
        """All problems with the values, one line each."""
        found = size_problems(self.size)
        for name in ("window", "stride"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"--{name} is {value}; give an integer ≥ 1")
            if value is not None and self.mode == "whole":
                found.append(f"--{name} is for sliding windows, but --mode is whole; give --mode slide, or leave it out")
        if not self.scales or not all(one > 0 and isfinite(one) for one in self.scales):
            found.append(f"--scales is {self.scales}; give numbers > 0")
        return found


@dataclass(frozen=True, kw_only=True)
class SegmentationEvaluation(InferenceOptions, ImageEvaluation):
    """How to evaluate; by default as the weights file specifies."""

    batch_size: int = 1
    """Images per batch, in each process; the model sees one at a time, so results do not depend on it."""
    label_set: str | None = None
    """Classes of the masks of --data: ade20k, camvid, or a file; by default classes.txt in the data, else by their names."""

    def problems(self) -> list[str]:
        """All problems with the values, one line each."""
        return super().problems() + self.inference_problems()


@dataclass(frozen=True, kw_only=True)
class SegmentationPrediction(InferenceOptions, PredictionOptions):
    """What to predict for an image; segmented as the weights file specifies by default."""

    out: Path | None = None
    """Directory for the images with the classes drawn on them, the class maps (NAME-classes.png), and segmentation.json."""
    min_share: float = 0.01
    """Smallest share of an image from which a class is listed in the table; JSON has all."""

    def problems(self) -> list[str]:
        """All problems with the values, one line each."""
        found = [f"--min-share is {self.min_share}; give a number in [0, 1]"] * (not 0 <= self.min_share <= 1)
        return found + directory_problems("--out", self.out) + self.inference_problems()


@dataclass(frozen=True, kw_only=True)
class SegmentationCheck(ImageCheck):
    """How to read images with masks."""

    label_set: str | None = None
    """Classes of the masks: ade20k, camvid, or a file; by default classes.txt in the data, else by their names."""
    val_share: float = 0.0
    """Share of the images to hold out if the data have no validation split; 0: none."""


class Segmentation(ImageTask):
    """Which class every pixel of an image belongs to."""

    name = "segmentation"
    recipe = SegmentationRecipe
    evaluation = SegmentationEvaluation
    prediction = SegmentationPrediction
    checking = SegmentationCheck

    def predictor(self, weights: Path) -> "SegmentationPredictor":
        """The trained segmenter in a weights file."""
        from polaformer.tasks.segmentation.predictor import load_predictor

        return load_predictor(weights)

    def reads(self, data: str) -> bool:
        """Whether it is a folder of images beside one of masks, or names such folders."""
        from polaformer.data.sources.semantic import looks_like_semantic

        return looks_like_semantic(data)

    def audited(self, data: str, options: Any) -> tuple[Any, Callable[..., Any]]:
        """The images and masks of all splits that there are."""
        from polaformer.data.sources.semantic import open_semantic_to_check
        from polaformer.data.sources.semantic_audit import audit

        return open_semantic_to_check(data, label_set=options.label_set, val_share=options.val_share), audit

    def models(self, pattern: str, attention: Sequence[str]) -> ListedModels:
        """The models of all recipes, and their softmax twins."""
        from polaformer.tasks.segmentation.models import list_segmenters

        return list_segmenters(pattern, attention)


SEGMENTATION = Segmentation()
