"""The interface between training and a task: a job with a model, batches, a loss and counts. The loop uses nothing else."""

from collections.abc import Generator, Sequence
from typing import Any, Protocol, Self

from torch import Tensor, nn

from polaformer.data.batch import Batch


class Counts(Protocol):
    """What an evaluation counts. Processes pickle it for each other: define the class in a module, and store no GPU tensors."""

    bad: list[str]  # one line per sample that could not be used

    def add(self, model: nn.Module, batch: Any) -> None:
        """Counts one batch, which may be empty."""
        ...

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """The counts of all processes as one, independent of their number; the parts are in rank order."""
        ...

    def record(self) -> dict[str, Any]:
        """Numbers for journals and tables, by name: the number of "samples", the task's metric, and others.

        Must work before anything is counted, and must not use the journal's own keys (`polaformer.training.loop.RESERVED`).
        """
        ...

    def summary(self) -> dict[str, str]:
        """The result for people: name → value, the most important first."""
        ...


class Objective(Protocol):
    """What is learned: a loss, and how to evaluate."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss of a batch. Its floating-point tensors have the dtype of the weights. Called under autocast."""
        ...

    def new_counts(self) -> Counts:
        """Empty counts."""
        ...


class Job(Protocol):
    """A model, an objective and data, built from a recipe."""

    @property
    def model(self) -> nn.Module:
        """The model to train."""
        ...

    @property
    def objective(self) -> Objective:
        """What the model learns."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """Updates per epoch."""
        ...

    @property
    def batch_class(self) -> type[Batch]:
        """The class of the batches."""
        ...

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits to evaluate: "val" comes first and is used during training; the others once, with the shipped weights."""
        ...

    def training_batches(self, first_step: int, rank: int, world: int) -> Generator[Any, None, None]:
        """The parts of every update from `first_step` on, endlessly."""
        ...

    def evaluation_batches(self, split: str, rank: int, world: int) -> Generator[Any, None, None]:
        """The batches of a split that this process evaluates."""
        ...

    def name(self, index: int) -> str:
        """The name of a training sample, for messages."""
        ...

    def metadata(self) -> dict[str, str]:
        """The metadata of weights files; must contain "task", the name of the task."""
        ...

    def max_bad_samples(self) -> int | None:
        """How many samples per epoch may be unusable; None: the first one ends the run."""
        ...
