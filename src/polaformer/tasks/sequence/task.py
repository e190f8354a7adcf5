"""Sequence classification as a registered task, with the options of its commands."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polaformer.tasks.sequence.recipe import SequenceRecipe
from polaformer.tasks.task import Advance, Audit, CheckOptions, EvaluationOptions, ListedModels, PredictionOptions, Task

if TYPE_CHECKING:
    from polaformer.tasks.sequence.predictor import SequencePredictor


@dataclass(frozen=True, kw_only=True)
class SequenceEvaluation(EvaluationOptions):
    """How to evaluate on sequences."""

    batch_size: int = 16
    """Sequences per batch, in each process."""


@dataclass(frozen=True, kw_only=True)
class SequencePrediction(PredictionOptions):
    """What to predict for a document, or a pair of them."""

    top: int = 1
    """Number of classes to list per input."""

    def problems(self) -> list[str]:
        """All problems with the values, one line each."""
        return [f"--top is {self.top}; give an integer ≥ 1"] * (self.top < 1)


class SequenceTask(Task):
    """Which class a long sequence belongs to."""

    name = "sequence"
    recipe = SequenceRecipe
    evaluation = SequenceEvaluation
    prediction = SequencePrediction

    def predictor(self, weights: Path) -> "SequencePredictor":
        """The trained model in a weights file."""
        from polaformer.tasks.sequence.predictor import load_predictor

        return load_predictor(weights)

    def reads(self, data: str) -> bool:
        """Whether it is one of the five datasets, released or prepared."""
        from polaformer.data.sources.lra.opening import recognise

        return recognise(Path(data)) is not None

    def check(
        self, data: str, options: CheckOptions, known: Mapping[str, str] | None, begin: Callable[[int], Advance]
    ) -> Audit:
        """Reads every sequence of all splits. Unlike `reads`, takes array files, as training does: for Image."""
        from polaformer.data.sources.lra import generated, image
        from polaformer.data.sources.lra.audit import audit
        from polaformer.data.sources.lra.opening import open_sequences, recognise
        from polaformer.errors import DataError

        dataset = recognise(data) or ("image" if image.holds(Path(data)) else None)
        if dataset is None:
            raise DataError(f"{data} is none of the datasets of the Long Range Arena; give one, released or prepared")
        splits = open_sequences(data, dataset)
        report = audit(splits, known, advance=begin(sum(len(split) for split in splits.values())))
        problems = report.problems + generated.changes(Path(data), splits)
        return Audit(report.parts, [problem._asdict() for problem in problems], report.digests)

    def models(self, pattern: str, attention: Sequence[str]) -> ListedModels:
        """The models of all recipes: five tasks times every mechanism."""
        from polaformer.tasks.sequence.models import list_models

        return list_models(pattern, attention)


SEQUENCE = SequenceTask()
