"""What a task makes with PyTorch: a job to train, a predictor that answers and is evaluated."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Protocol

from torch import nn

from polaformer.tasks.figures import Figure
from polaformer.tasks.recipe import Recipe
from polaformer.tasks.task import Advance, Answers
from polaformer.training.job import Job, Objective


@dataclass(frozen=True)
class Evaluation:
    """What a predictor is evaluated on, and how."""

    objective: Objective
    num_batches: Callable[[int, int], int]  # of a process: from (rank, number of processes)
    batches: Callable[[int, int], Generator[Any, None, None]]  # likewise
    about: dict[str, Any]  # how samples are prepared, and the like, for tables and JSON


class Predictor(Protocol):
    """A trained model with all that it needs to answer; a weights file holds one."""

    @property
    def model(self) -> nn.Module:
        """The model."""
        ...

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the weights file; it appears whole or not at all."""
        ...

    def evaluation(self, options: Any, recipe: Any) -> Evaluation:
        """The evaluation that options of `eval` ask for.

        recipe: that of the run which the weights come from, where `--data` is not given; None where it is.
        """
        ...

    def answer(self, inputs: Sequence[str], options: Any, advance: Advance) -> Answers:
        """What the model says of the inputs of `predict`: mostly paths of files; `advance` is told of each."""
        ...


class TaskJob(Job, Protocol):
    """A job as commands and reports see it."""

    @property
    def recipe(self) -> Recipe:
        """What it was made from."""
        ...

    def check_processes(self, world: int) -> None:
        """Raises SettingsError unless so many processes can share the work."""
        ...

    def seen(self) -> dict[str, Any]:
        """What a run remembers of its data, to know them again; for JSON."""
        ...

    def predictor(self, model: nn.Module) -> Predictor:
        """The trained model with all that it needs to answer."""
        ...

    def needs(self, part: int) -> dict[str, Any]:
        """What a training would need, for `--dry-run`: samples of each split, and bytes for `part` samples at once."""
        ...

    def figures(self, predictor: Any, counts: Mapping[str, Any]) -> dict[str, Figure]:
        """What the report shows of the result besides numbers, by heading."""
        ...
