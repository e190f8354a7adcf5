"""Image classification, as the registry knows it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from polaformer.tasks.classification.recipe import ClassificationRecipe
from polaformer.tasks.task import (
    Advance,
    Audit,
    CheckOptions,
    EvaluationOptions,
    ListedModels,
    PredictionOptions,
    ResumeOptions,
    Task,
)

if TYPE_CHECKING:
    from polaformer.tasks.classification.predictor import Classifier


@dataclass(frozen=True, kw_only=True)
class ClassificationResume(ResumeOptions):
    """What may change when a run is resumed."""

    on_bad_image: Literal["error", "skip"] | None = None
    """What an image that cannot be read does from now on; as before unless given."""
    max_bad_share: float | None = None
    """Share of an epoch's images that may be skipped; as before unless given."""


@dataclass(frozen=True, kw_only=True)
class ClassificationEvaluation(EvaluationOptions):
    """How images are evaluated; what is not given is as the weights file says."""

    resize: Literal["square", "shorter"] | None = None
    """How images become squares: squeezed (the authors'), or cut after the shorter side was resized (the usual); as trained
    unless given."""
    img_size: int | None = None
    """Height and width in pixels of what the model sees; as trained unless given."""
    crop_pct: float | None = None
    """Share of the resized image that is cut out of its middle; as trained unless given."""
    on_bad_image: Literal["error", "skip"] = "error"
    """What an image that cannot be read does: error ends the evaluation, skip leaves it out, counts and lists it."""
    val_share: float = 0.1
    """Share that is held out where the data have no validation part; as in training."""

    def problems(self) -> list[str]:
        """Everything that makes no sense, a line each."""
        found = super().problems()
        if self.img_size is not None and self.img_size < 1:
            found.append(f"--img-size is {self.img_size}; give a whole number of at least 1")
        if self.crop_pct is not None and not 0 < self.crop_pct <= 1:
            found.append(f"--crop-pct is {self.crop_pct}; give a share above 0, up to 1")
        return found + wrong_val_share(self.val_share)


@dataclass(frozen=True, kw_only=True)
class ClassificationPrediction(PredictionOptions):
    """What is said of an image."""

    top: int = 5
    """How many classes to name."""

    def problems(self) -> list[str]:
        """Everything that makes no sense, a line each."""
        return [f"--top is {self.top}; give a whole number of at least 1"] * (self.top < 1)


@dataclass(frozen=True, kw_only=True)
class ClassificationCheck(CheckOptions):
    """How a data set of images is read."""

    val_share: float = 0.1
    """Share that is held out where the data have no validation part; as in training."""

    def problems(self) -> list[str]:
        """Everything that makes no sense, a line each."""
        return super().problems() + wrong_val_share(self.val_share)


def wrong_val_share(share: float) -> list[str]:
    """What is wrong with it, for `problems`."""
    return [f"--val-share is {share}; give at least 0 and below 1"] * (not 0 <= share < 1)


class Classification(Task):
    """Which of several classes an image belongs to."""

    name = "classification"
    recipe = ClassificationRecipe
    resumption = ClassificationResume
    evaluation = ClassificationEvaluation
    prediction = ClassificationPrediction
    checking = ClassificationCheck

    def predictor(self, weights: Path) -> "Classifier":
        """The classifier in a weights file, ours or a published one."""
        from polaformer.tasks.classification.predictor import load_classifier

        return load_classifier(weights)

    def reads(self, data: str) -> bool:
        """What no other task reads is taken for labelled images."""
        return True

    def check(
        self, data: str, options: ClassificationCheck, known: Mapping[str, str] | None, begin: Callable[[int], Advance]
    ) -> Audit:
        """Reads every image of all parts."""
        from polaformer.data.audit import audit
        from polaformer.data.sources.opening import open_data

        found = open_data(data, val_share=options.val_share)
        advance = begin(sum(len(source) for source in found.splits.values()))
        report = audit(found, known, num_workers=options.num_workers, advance=advance)
        return Audit(report.parts, [problem._asdict() for problem in report.problems], report.digests)

    def models(self, pattern: str, attention: Sequence[str]) -> ListedModels:
        """The backbones with classifiers, beside the paper's tables."""
        from polaformer.tasks.classification.models import listed, listed_with

        return listed_with(pattern, attention) if attention else listed(pattern)


CLASSIFICATION = Classification()
