"""What training asks of a task, and nothing else: a job with a model, batches, a loss and counts."""

from collections.abc import Generator, Sequence
from typing import Any, Protocol, Self

from torch import Tensor, nn

from polaformer.data.batch import Batch


class Counts(Protocol):
    """What an evaluation counts. Processes send it to each other, so its class stands in a module; it holds no GPU tensors."""

    bad: list[str]  # a line for every sample that could not be used

    def add(self, model: nn.Module, batch: Any) -> None:
        """Counts one batch, perhaps an empty one."""
        ...

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """What all processes counted as one, whatever their number; the parts are in the order of ranks."""
        ...

    def record(self) -> dict[str, Any]:
        """Numbers for journals and tables, by name: "samples", how many were counted, the task's metric, and others.

        Works where nothing was counted yet. The journal has names of its own (`polaformer.training.loop.RESERVED`).
        """
        ...

    def summary(self) -> dict[str, str]:
        """The result for people: what → how much, the most important first."""
        ...


class Objective(Protocol):
    """What is learnt."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss of a batch, whose floating-point tensors have the dtype of the weights; called under autocast."""
        ...

    def new_counts(self) -> Counts:
        """Nothing counted yet."""
        ...


class Job(Protocol):
    """What is trained, on what: made by a recipe."""

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        ...

    @property
    def objective(self) -> Objective:
        """What it learns."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """Updates per epoch."""
        ...

    @property
    def batch(self) -> type[Batch]:
        """The class of the batches."""
        ...

    @property
    def splits(self) -> tuple[str, ...]:
        """What is evaluated on: "val" first, while training; the others once, at the end, with the weights that are shipped."""
        ...

    def training_batches(self, first_step: int, rank: int, world: int) -> Generator[Any, None, None]:
        """The parts of every update from `first_step` on, without end."""
        ...

    def evaluation_batches(self, split: str, rank: int, world: int) -> Generator[Any, None, None]:
        """What a process evaluates of a split."""
        ...

    def name(self, index: int) -> str:
        """What to call a training sample."""
        ...

    def metadata(self) -> dict[str, str]:
        """What weights files say besides the weights; among it "task", the name of the task."""
        ...

    def most_bad(self) -> int | None:
        """How many samples of an epoch may turn out to be unusable; None where the first one ends the run."""
        ...
