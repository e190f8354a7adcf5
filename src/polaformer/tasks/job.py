"""What a task builds with PyTorch: a job to train, and a predictor that answers and can be evaluated."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Protocol

from torch import nn

from polaformer.tasks.figures import Figure, Rows
from polaformer.tasks.recipe import Recipe
from polaformer.tasks.task import Advance, Answers
from polaformer.training.job import Job, Objective


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate a predictor on, and how."""

    objective: Objective
    num_batches: Callable[[int, int], int]  # for one process, from (rank, world size)
    batches: Callable[[int, int], Generator[Any, None, None]]  # likewise
    about: dict[str, Any]  # preprocessing and other settings, for tables and JSON
    save: Callable[[Any], None] | None = None  # writes files from the merged counts, in one process; None: there are none
    details: Callable[[Any], dict[str, Any]] | None = None  # of the merged counts, more for JSON
    table: Callable[[Any], Rows] | None = None  # of the merged counts, instead of their summary
    per_class: Callable[[Any], Rows] | None = None  # of the merged counts, the worst class first


class Predictor(Protocol):
    """A trained model with everything it needs to answer; a weights file holds one."""

    @property
    def model(self) -> nn.Module:
        """The model."""
        ...

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the weights file atomically."""
        ...

    def evaluation(self, options: Any, recipe: Any) -> Evaluation:
        """The evaluation that the options of `eval` ask for.

        recipe: the recipe of the run that the weights come from; None if `--data` is given.
        """
        ...

    def answer(self, inputs: Sequence[str], options: Any, advance: Advance) -> Answers:
        """Answers for the inputs of `predict`, usually file paths; calls `advance` once per input."""
        ...


class TaskJob(Job, Protocol):
    """A job as commands and reports see it."""

    @property
    def notices(self) -> Sequence[str]:
        """What the user should know before training, such as what was repaired in the data, a line each."""
        ...

    @property
    def same_as_train(self) -> Sequence[str]:
        """The splits whose samples are those that are trained on."""
        ...

    @property
    def recipe(self) -> Recipe:
        """The recipe that it was built from."""
        ...

    def check_processes(self, world: int) -> None:
        """Raises SettingsError unless `world` processes can share the work."""
        ...

    def data_fingerprint(self) -> dict[str, Any]:
        """What a run stores about its data, to detect on resuming that they have changed; for JSON."""
        ...

    def predictor(self, model: nn.Module) -> Predictor:
        """The trained model with everything it needs to answer."""
        ...

    def needs(self, part: int) -> dict[str, Any]:
        """What a training run would need, for `--dry-run`: samples per split, and memory for `part` samples at once."""
        ...

    def figures(self, predictor: Any, counts: Mapping[str, Any]) -> dict[str, Figure]:
        """What the report shows besides the metrics, by heading."""
        ...
