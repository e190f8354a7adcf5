"""Which samples are in which batch: a function of (seed, epoch, step), independent of the number of processes and workers."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch

from polaformer.data.randomness import derive
from polaformer.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Key:
    """A sample in an epoch: what its random draws depend on, besides the seed."""

    epoch: int
    index: int


@dataclass(frozen=True)
class Order:
    """The training order: a new permutation per epoch, cut into batches; an incomplete last batch is dropped.

    batch_size: samples per update, over all processes and micro-batches.
    groups: one number per sample, such as its aspect ratio or length bucket. The samples of each group, in the order of the
        permutation, are cut into chunks of `group_size` (None: batch_size); the chunks, in the order in which they become full,
        are joined into batches. Incomplete chunks are dropped too.
    lengths: one number per sample. The samples of an update are sorted by it before they are cut into micro-batches, so that
        each of these needs little padding.
    """

    num_samples: int
    batch_size: int
    seed: int
    groups: Sequence[int] | None = field(default=None, hash=False)  # equal orders still have equal hashes, computed faster
    group_size: int | None = None
    lengths: Sequence[int] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.lengths is not None:
            object.__setattr__(self, "lengths", tuple(map(int, self.lengths)))
            if len(self.lengths) != self.num_samples:
                numbers = f"{len(self.lengths)} lengths for {self.num_samples} samples"
                raise ValueError(f"Order: there are {numbers}; give one per sample")
        if self.groups is None:
            if self.group_size is not None:
                raise ValueError(f"Order: group_size is {self.group_size}, but there are no groups; give groups, or None")
            return
        object.__setattr__(self, "groups", tuple(map(int, self.groups)))
        if len(self.groups) != self.num_samples:
            raise ValueError(f"Order: there are {len(self.groups)} groups for {self.num_samples} samples; give one per sample")
        if self._chunk_size < 1 or self.batch_size % self._chunk_size:
            raise SettingsError(
                f"batch_size is {self.batch_size}, not a multiple of the group size {self._chunk_size}; give a multiple"
            )

    @property
    def _chunk_size(self) -> int:
        return self.batch_size if self.group_size is None else self.group_size

    @cached_property
    def steps_per_epoch(self) -> int:
        """Updates per epoch; the same in each, since the sizes of the groups alone determine the number of chunks."""
        if self.groups is None:
            return self.num_samples // self.batch_size
        full = sum(size // self._chunk_size for size in Counter(self.groups).values())
        return full * self._chunk_size // self.batch_size

    def batch(self, step: int) -> list[Key]:
        """The samples of update `step`, counted from the start of training."""
        epoch, index = divmod(step, self.steps_per_epoch)
        indices = _indices(self, epoch)
        chosen = indices[index * self.batch_size : (index + 1) * self.batch_size]
        if self.lengths is not None:
            chosen = sorted(chosen, key=self.lengths.__getitem__)
        return [Key(epoch, one) for one in chosen]

    def micro_batches(self, first_step: int, *, rank: int = 0, world: int = 1, accumulation: int = 1) -> Iterator[list[Key]]:
        """The micro-batches of process `rank` of `world`, update after update from `first_step` on, without end."""
        size = self.batch_size // (world * accumulation)
        step = first_step
        while True:
            batch = self.batch(step)
            for number in range(accumulation):
                start = (number * world + rank) * size
                yield batch[start : start + size]
            step += 1


@dataclass(frozen=True)
class EvaluationOrder:
    """The samples that process `rank` of `world` evaluates, in batches: each sample in exactly one process, once."""

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
    """The samples of an epoch in training order."""
    generator = torch.Generator().manual_seed(derive("order", order.seed, epoch))
    permutation = torch.randperm(order.num_samples, generator=generator).tolist()
    return permutation if order.groups is None else _in_chunks(permutation, order.groups, order._chunk_size)


def _in_chunks(permutation: list[int], groups: Sequence[int], size: int) -> list[int]:
    """The permutation as chunks of one group each, in the order in which they become full; incomplete chunks are dropped."""
    chunks: dict[int, list[int]] = {}
    indices: list[int] = []
    for index in permutation:
        chunk = chunks.setdefault(groups[index], [])
        chunk.append(index)
        if len(chunk) == size:
            indices += chunk
            chunk.clear()
    return indices
