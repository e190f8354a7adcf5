"""The base of jobs on data that can be read in any order: order, batches, splits and fingerprint of the data."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

import torch

from polaformer.data.order import EvaluationOrder, Order
from polaformer.data.samples import Reader, Samples, batches
from polaformer.errors import SettingsError
from polaformer.tasks.recipe import Recipe


class NamedSamples(Protocol):
    """Samples that have names."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """The name of a sample in messages."""
        ...


class MapStyleJob:
    """A job whose batches are functions of the seed and the step.

    A subclass sets `recipe`, `parts` (the splits by name, "train" and "val" first) and `order` with `use_order`, and implements
    `reader`. on_bad, max_bad_share: what to do with unusable samples; by default the first one ends the run.
    """

    recipe: Recipe
    order: Order
    parts: Mapping[str, NamedSamples]
    on_bad: str = "error"
    max_bad_share: float = 0.0
    notices: Sequence[str] = ()

    def reader(self, split: str, *, training: bool) -> Reader:
        """Reads the samples of a split, for training or for evaluation."""
        raise NotImplementedError

    def use_order(self, order: Order) -> None:
        """Sets the training order; raises SettingsError if there are not enough samples for one update."""
        self.order, self.steps_per_epoch = order, order.steps_per_epoch
        if not self.steps_per_epoch:
            there = f"{order.num_samples} training {self.recipe.terms.sample_noun}"
            if order.num_samples >= self.recipe.batch_size:  # they are grouped, and the groups are small
                raise SettingsError(
                    f"the {there} do not fill a batch with groups of {order.group_size}; make group_size smaller"
                )
            raise SettingsError(f"batch_size is {self.recipe.batch_size}, but there are only {there}; make it smaller")

    @property
    def splits(self) -> tuple[str, ...]:
        """The validation split, evaluated while training, and the others, evaluated at the end."""
        return tuple(name for name in self.parts if name != "train")

    @property
    def same_as_train(self) -> tuple[str, ...]:
        """The splits whose samples are those that are trained on."""
        return tuple(name for name in self.splits if self.parts[name] is self.parts["train"])

    def check_processes(self, world: int) -> None:
        """Raises SettingsError unless `world` processes can share the work."""
        recipe, pieces = self.recipe, world * self.recipe.accumulation
        if recipe.batch_size % pieces:
            raise SettingsError(
                f"batch_size is {recipe.batch_size}, which is not divisible by {world} processes times accumulation "
                f"{recipe.accumulation}; give a multiple of {pieces}"
            )

    def training_batches(self, first_step: int, rank: int, world: int) -> Generator[Any, None, None]:
        """The parts of every update from `first_step` on, endlessly."""
        samples = Samples(self.reader("train", training=True), seed=self.recipe.seed, on_bad=self.on_bad)
        keys = self.order.micro_batches(first_step, rank=rank, world=world, accumulation=self.recipe.accumulation)
        return batches(samples, keys, num_workers=self.recipe.num_workers, pin_memory=torch.cuda.is_available())

    def evaluation_batches(self, split: str, rank: int, world: int) -> Generator[Any, None, None]:
        """The samples of a split that this process evaluates: its share, each once."""
        reader = self.reader(split, training=False)
        samples = Samples(reader, seed=self.recipe.seed, on_bad=self.on_bad, replace=False)
        share = EvaluationOrder(len(reader), self.evaluation_batch_size(world), rank, world)
        return batches(samples, share, num_workers=self.recipe.num_workers, pin_memory=torch.cuda.is_available())

    def evaluation_batch_size(self, world: int) -> int:
        """Samples per batch of an evaluation, in each of `world` processes."""
        return max(1, self.recipe.batch_size // (world * self.recipe.accumulation))

    def name(self, index: int) -> str:
        """The name of a training sample."""
        return self.parts["train"].name(index)

    def max_bad_samples(self) -> int | None:
        """How many samples per epoch may be skipped; None if the first bad one ends the run."""
        if self.on_bad == "error":
            return None
        return max(1, int(self.max_bad_share * self.steps_per_epoch * self.recipe.batch_size))
