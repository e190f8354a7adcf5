"""Which samples make up which batch: a function of (seed, epoch, step), whatever the number of processes and workers."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch

from polaformer.data.randomness import derive
from polaformer.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Key:
    """A sample of an epoch: what its random draws depend on, besides the seed."""

    epoch: int
    index: int


@dataclass(frozen=True)
class Order:
    """The order of training: every epoch a new permutation, cut into batches; what does not fill a batch is left out.

    batch_size: of one update, over all processes and parts of it.
    groups: a number for each sample, such as its aspect ratio or bucket of lengths. Then the samples of each group, in the
        order of the permutation, are cut into chunks of `group_size` (None: batch_size), and the chunks, in the order in which
        they become full, into batches; what fills no chunk is left out too.
    """

    num_samples: int
    batch_size: int
    seed: int
    groups: Sequence[int] | None = field(default=None, hash=False)  # equal orders have equal hashes without it, and faster
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.groups is None:
            if self.group_size is not None:
                raise ValueError(f"Order: group_size is {self.group_size}, but there are no groups; give groups, or None")
            return
        object.__setattr__(self, "groups", tuple(map(int, self.groups)))
        if len(self.groups) != self.num_samples:
            raise ValueError(f"Order: there are {len(self.groups)} groups for {self.num_samples} samples; give one for each")
        if self._chunk < 1 or self.batch_size % self._chunk:
            raise SettingsError(
                f"batch_size is {self.batch_size}, which groups of {self._chunk} samples do not divide; give a multiple of it"
            )

    @property
    def _chunk(self) -> int:
        return self.batch_size if self.group_size is None else self.group_size

    @cached_property
    def steps_per_epoch(self) -> int:
        """Updates of an epoch; the same in each, since the size of a group alone says how many chunks it fills."""
        if self.groups is None:
            return self.num_samples // self.batch_size
        full = sum(size // self._chunk for size in Counter(self.groups).values())
        return full * self._chunk // self.batch_size

    def batch(self, step: int) -> list[Key]:
        """The samples of update `step`, counted from the start of training."""
        epoch, place = divmod(step, self.steps_per_epoch)
        indices = _indices(self, epoch)
        start = place * self.batch_size
        return [Key(epoch, index) for index in indices[start : start + self.batch_size]]

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
def _indices(order: Order, epoch: int) -> list[int]:
    """The samples of an epoch in the order in which they are trained on."""
    generator = torch.Generator().manual_seed(derive("order", order.seed, epoch))
    permutation = torch.randperm(order.num_samples, generator=generator).tolist()
    return permutation if order.groups is None else _in_chunks(permutation, order.groups, order._chunk)


def _in_chunks(permutation: list[int], groups: Sequence[int], size: int) -> list[int]:
    """The permutation sorted into chunks of one group each, in the order in which they become full; the rest is left out."""
    filling: dict[int, list[int]] = {}
    found: list[int] = []
    for index in permutation:
        chunk = filling.setdefault(groups[index], [])
        chunk.append(index)
        if len(chunk) == size:
            found += chunk
            chunk.clear()
    return found
