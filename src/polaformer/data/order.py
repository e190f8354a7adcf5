"""Which samples make up which batch: a function of (seed, epoch, step), whatever the number of processes and workers."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from polaformer.data.randomness import derive


@dataclass(frozen=True, slots=True)
class Key:
    """A sample of an epoch: what its random draws depend on, besides the seed."""

    epoch: int
    index: int


@dataclass(frozen=True)
class Order:
    """The order of training: every epoch a new permutation, cut into batches; what does not fill a batch is left out.

    batch_size: of one update, over all processes and parts of it.
    """

    num_samples: int
    batch_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Updates of an epoch."""
        return self.num_samples // self.batch_size

    def batch(self, step: int) -> list[Key]:
        """The samples of update `step`, counted from the start of training."""
        epoch, place = divmod(step, self.steps_per_epoch)
        permutation = _permutation(self.num_samples, self.seed, epoch)
        start = place * self.batch_size
        return [Key(epoch, index) for index in permutation[start : start + self.batch_size]]

    def parts(self, first_step: int, *, rank: int = 0, world: int = 1, accumulation: int = 1) -> Iterator[list[Key]]:
        """From `first_step` on, without end: the parts of each update that process `rank` of `world` works on, in turn."""
        size = self.batch_size // (world * accumulation)
        step = first_step
        while True:
            batch = self.batch(step)
            for part in range(accumulation):
                start = (part * world + rank) * size
                yield batch[start : start + size]
            step += 1


@dataclass(frozen=True)
class Share:
    """The samples that one of several processes evaluates, in batches: each sample in exactly one process, none twice."""

    num_samples: int
    batch_size: int
    rank: int = 0
    world: int = 1

    def __iter__(self) -> Iterator[list[Key]]:
        mine = range(self.rank, self.num_samples, self.world)
        for start in range(0, len(mine), self.batch_size):
            yield [Key(0, index) for index in mine[start : start + self.batch_size]]

    def __len__(self) -> int:
        return -(-len(range(self.rank, self.num_samples, self.world)) // self.batch_size)


@lru_cache(maxsize=2)
def _permutation(num_samples: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(derive("order", seed, epoch))
    return torch.randperm(num_samples, generator=generator).tolist()
