"""Documents as token ids, and batches of them.

# B samples, K documents per sample, N tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from polaformer.data.batch import Batch
from polaformer.data.sources.lra.listops import CLOSER
from polaformer.data.sources.lra.sequences import SequenceSplit


@dataclass(frozen=True, kw_only=True)
class SequenceBatch(Batch):
    """Token ids (B, K, N), 0 where there is none, and labels (B,)."""

    ids: Tensor
    labels: Tensor

    def logits(self, model: nn.Module) -> Tensor:
        """The outputs of a model for the sequences, (B, classes)."""
        return model(self.ids)


class LabelledDocuments(NamedTuple):
    """The ids of the documents of a sample, and its label."""

    ids: list[np.ndarray]
    label: int


@dataclass(frozen=True)
class Encoding:
    """How documents become ids: symbols that are dropped, tokens that are kept, what is added to a symbol."""

    kept: int
    shift: int
    drops_closers: bool = False

    def ids(self, symbols: np.ndarray) -> np.ndarray:
        """The ids of a document, (N,) int32."""
        if self.drops_closers:
            symbols = symbols[symbols != CLOSER]
        return symbols[: self.kept].astype(np.int32) + self.shift

    def applied(self, split: SequenceSplit) -> SequenceSplit:
        """The split without the symbols that are dropped."""
        if not self.drops_closers:
            return split
        dropped = np.flatnonzero(split.symbols == CLOSER)
        offsets = split.offsets - np.searchsorted(dropped, split.offsets)
        return replace(split, symbols=np.delete(split.symbols, dropped), offsets=offsets)

    def lengths(self, split: SequenceSplit) -> np.ndarray:
        """The number of tokens up to the last that exists in the longest document of each sample, (S,)."""
        ends = np.minimum(np.diff(split.offsets), self.kept)
        if not self.shift:  # symbol 0 is masked
            places = zip(split.offsets[:-1], ends, strict=True)
            ends = np.array([_end_of(split.symbols[start : start + size]) for start, size in places], dtype=np.int64)
        return ends[split.documents].max(axis=1, initial=0)


def _end_of(symbols: np.ndarray) -> int:
    """The number of symbols up to the last that is not 0."""
    found = np.flatnonzero(symbols)
    return int(found[-1]) + 1 if len(found) else 0


class SequenceReader:
    """The samples of a split as ids; batches are cut to their longest sample, or padded to `length`."""

    def __init__(self, split: SequenceSplit, encoding: Encoding, *, length: int, trims: bool) -> None:
        self.split, self.encoding, self.length, self.trims = split, encoding, length, trims

    def __len__(self) -> int:
        return len(self.split)

    def read(self, index: int) -> LabelledDocuments:
        """The documents of a sample."""
        documents = [self.encoding.ids(self.split.read(index, which)) for which in range(self.split.num_documents)]
        return LabelledDocuments(documents, int(self.split.labels[index]))

    def collate(self, samples: Sequence[LabelledDocuments], indices: list[int], bad: list[str]) -> SequenceBatch:
        """The samples, possibly none, padded with id 0."""
        return SequenceBatch(
            ids=pad([one.ids for one in samples], self.split.num_documents, None if self.trims else self.length),
            labels=torch.tensor([one.label for one in samples], dtype=torch.int64),
            indices=torch.tensor(indices, dtype=torch.int64),
            bad=bad,
        )


def pad(samples: Sequence[Sequence[np.ndarray]], num_documents: int, length: int | None = None) -> Tensor:
    """The documents of samples as (B, K, N), N being `length`, or what the last id that is not 0 needs, at least 1."""
    if length is None:
        length = max([1, *(_end_of(ids) for documents in samples for ids in documents)])
    found = torch.zeros(len(samples), num_documents, length, dtype=torch.int32)
    for row, documents in zip(found, samples, strict=True):
        for place, ids in zip(row, documents, strict=True):
            end = min(len(ids), length)
            place[:end] = torch.from_numpy(ids[:end])
    return found
