"""Image classification as a registered task, with the options of its commands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polaformer.tasks.classification.recipe import ClassificationRecipe
from polaformer.tasks.image_task import ImageCheck, ImageEvaluation, ImageTask
from polaformer.tasks.task import ListedModels, PredictionOptions

if TYPE_CHECKING:
    from polaformer.tasks.classification.predictor import Classifier


@dataclass(frozen=True, kw_only=True)
class ClassificationEvaluation(ImageEvaluation):
    """How to evaluate; by default with the preprocessing stored in the weights file."""

    resize: Literal["square", "shorter"] | None = None
    """How to make images square: squash (square), or resize the shorter side and crop (shorter); as in training by default."""
    img_size: int | None = None
    """Height and width of the model's input, in pixels; as in training by default."""
    crop_pct: float | None = None
    """Share of the resized image that the centre crop keeps; as in training by default."""

    def problems(self) -> list[str]:
        """All problems with the values, one line each."""
        found = super().problems()
        if self.img_size is not None and self.img_size < 1:
            found.append(f"--img-size is {self.img_size}; give an integer ≥ 1")
        if self.crop_pct is not None and not 0 < self.crop_pct <= 1:
            found.append(f"--crop-pct is {self.crop_pct}; give a number in (0, 1]")
        return found


@dataclass(frozen=True, kw_only=True)
class ClassificationPrediction(PredictionOptions):
    """What to predict for an image."""

    top: int = 5
    """Number of classes to list per image."""

    def problems(self) -> list[str]:
        """All problems with the values, one line each."""
        return [f"--top is {self.top}; give an integer ≥ 1"] * (self.top < 1)


class Classification(ImageTask):
    """Which class an image belongs to."""

    name = "classification"
    recipe = ClassificationRecipe
    evaluation = ClassificationEvaluation
    prediction = ClassificationPrediction

    def predictor(self, weights: Path) -> "Classifier":
        """The classifier in a weights file, ours or a published one."""
        from polaformer.tasks.classification.predictor import load_classifier

        return load_classifier(weights)

    def reads(self, data: str) -> bool:
        """Data that no other task reads are treated as labelled images."""
        return True

    def audited(self, data: str, options: ImageCheck) -> tuple[Any, Callable[..., Any]]:
        """The labelled images of all splits."""
        from polaformer.data.audit import audit
        from polaformer.data.sources.opening import open_data

        return open_data(data, val_share=options.val_share), audit

    def models(self, pattern: str, attention: Sequence[str]) -> ListedModels:
        """The backbones as classifiers, compared with the paper's tables."""
        from polaformer.tasks.classification.models import list_backbones, list_backbones_with_mechanisms

        return list_backbones_with_mechanisms(pattern, attention) if attention else list_backbones(pattern)


CLASSIFICATION = Classification()
