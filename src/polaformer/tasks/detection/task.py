"""Object detection as a registered task, with the options of its commands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polaformer.tasks.detection.recipe import DetectionRecipe
from polaformer.tasks.image_task import ImageCheck, ImageEvaluation, ImageTask, directory_problems, size_problems
from polaformer.tasks.task import ListedModels, PredictionOptions

if TYPE_CHECKING:
    from polaformer.tasks.detection.predictor import DetectionPredictor


@dataclass(frozen=True, kw_only=True)
class DetectionEvaluation(ImageEvaluation):
    """How to evaluate; by default at the size that the weights file specifies."""

    batch_size: int = 1
    """Images per batch, in each process; with 1 results cannot depend on padding."""
    size: int | None = None
    """Length of the shorter side of the images, in pixels; as in training by default."""
    results: Path | None = None
    """Directory for the detections in COCO's results format: boxes.json and, for detectors with masks, masks.json."""

    def problems(self) -> list[str]:
        """All problems with the values, one line each."""
        return super().problems() + size_problems(self.size) + directory_problems("--results", self.results)


@dataclass(frozen=True, kw_only=True)
class DetectionPrediction(PredictionOptions):
    """What to predict for an image."""

    out: Path | None = None
    """Directory for the images with the detections drawn on them, and detections.json."""
    min_score: float = 0.3
    """Smallest score of a detection that is listed and drawn."""

    def problems(self) -> list[str]:
        """All problems with the values, one line each."""
        found = [f"--min-score is {self.min_score}; give a number in [0, 1]"] * (not 0 <= self.min_score <= 1)
        return found + directory_problems("--out", self.out)


@dataclass(frozen=True, kw_only=True)
class DetectionCheck(ImageCheck):
    """How to read a dataset in COCO's format."""

    val_share: float = 0.0
    """Share of the images to hold out if the data have no validation split; 0: none."""


class Detection(ImageTask):
    """Which objects an image shows, and where."""

    name = "detection"
    recipe = DetectionRecipe
    evaluation = DetectionEvaluation
    prediction = DetectionPrediction
    checking = DetectionCheck

    def predictor(self, weights: Path) -> "DetectionPredictor":
        """The trained detector in a weights file."""
        from polaformer.tasks.detection.predictor import load_predictor

        return load_predictor(weights)

    def reads(self, data: str) -> bool:
        """Whether it is a folder in COCO's layout, or names annotation files."""
        from polaformer.data.sources.coco import looks_like_coco

        return looks_like_coco(data)

    def audited(self, data: str, options: ImageCheck) -> tuple[Any, Callable[..., Any]]:
        """The images and annotations of all splits that there are."""
        from polaformer.data.sources.coco import open_coco_to_check
        from polaformer.data.sources.coco_audit import audit

        return open_coco_to_check(data, val_share=options.val_share), audit

    def models(self, pattern: str, attention: Sequence[str]) -> ListedModels:
        """The models of all recipes, and their softmax twins."""
        from polaformer.tasks.detection.models import list_detectors

        return list_detectors(pattern, attention)


DETECTION = Detection()
