"""Object detection as a registered task, with the options of its commands."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from polaformer.tasks.classification.task import ClassificationCheck, val_share_problems
from polaformer.tasks.detection.recipe import DetectionRecipe
from polaformer.tasks.image_recipe import ImageResume
from polaformer.tasks.task import (
    Advance,
    Audit,
    EvaluationOptions,
    ListedModels,
    PredictionOptions,
    Task,
)

if TYPE_CHECKING:
    from polaformer.tasks.detection.predictor import DetectionPredictor


@dataclass(frozen=True, kw_only=True)
class DetectionEvaluation(EvaluationOptions):
    """How to evaluate; by default at the size that the weights file specifies."""

    batch_size: int = 1
    """Images per batch, in each process; with 1 results cannot depend on padding."""
    size: int | None = None
    """Length of the shorter side of the images, in pixels; as in training by default."""
    on_bad_image: Literal["error", "skip"] = "error"
    """What to do with an unreadable image: error ends the evaluation, skip leaves it out, counts and lists it."""
    val_share: float = 0.1
    """Share of the images to hold out if the data have no validation split; give the value used in training."""
    results: Path | None = None
    """Directory for the detections in COCO's results format: boxes.json and, for detectors with masks, masks.json."""

    def problems(self) -> list[str]:
        """All problems with the values, one line each."""
        found = super().problems() + val_share_problems(self.val_share)
        if self.size is not None and self.size < 1:
            found.append(f"--size is {self.size}; give an integer ≥ 1")
        if self.results is not None and self.results.exists() and not self.results.is_dir():
            found.append(f"--results is {self.results}, which is not a directory; give another name")
        return found


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
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            found.append(f"--out is {self.out}, which is not a directory; give another name")
        return found


@dataclass(frozen=True, kw_only=True)
class DetectionCheck(ClassificationCheck):
    """How to read a dataset in COCO's format."""

    val_share: float = 0.0
    """Share of the images to hold out if the data have no validation split; 0: none."""


class Detection(Task):
    """Which objects an image shows, and where."""

    name = "detection"
    recipe = DetectionRecipe
    resumption = ImageResume
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

    def check(
        self, data: str, options: DetectionCheck, known: Mapping[str, str] | None, begin: Callable[[int], Advance]
    ) -> Audit:
        """Reads the annotations and every image of all splits."""
        from polaformer.data.sources.coco import open_coco
        from polaformer.data.sources.coco_audit import audit

        found = open_coco(data, val_share=options.val_share)
        advance = begin(sum(len(source) for source in found.splits.values()))
        report = audit(found, known, num_workers=options.num_workers, advance=advance)
        return Audit(report.parts, [problem._asdict() for problem in report.problems], report.digests)

    def models(self, pattern: str, attention: Sequence[str]) -> ListedModels:
        """The models of all recipes, and their softmax twins."""
        from polaformer.tasks.detection.models import list_detectors

        return list_detectors(pattern, attention)


DETECTION = Detection()
