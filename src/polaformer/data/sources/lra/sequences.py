"""Labelled sequences of symbols in memory: what every dataset of the Long Range Arena is loaded as.

A symbol is a number from 0 to 255: a byte of text, a grey level, or the number of a ListOps token.

# S samples, K documents per sample (2 for Retrieval, otherwise 1), D documents, T symbols of all documents together
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class SequenceSplit:
    """One split. Samples may share documents; a document of length 0 is allowed."""

    classes: tuple[str, ...]
    symbols: np.ndarray  # (T,) uint8: the documents, one after the other
    offsets: np.ndarray  # (D + 1,) int64: where each document begins, and T
    documents: np.ndarray  # (S, K) int64: the documents of each sample
    labels: np.ndarray  # (S,) int64
    origin: str  # the file or folder in messages
    names: Sequence[str] | None = None  # one per sample; None: the origin and the number of the sample
    # Names of listed samples that have no content, by the numbers that they would have in the split as it was read.
    skipped: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_documents(self) -> int:
        """K, the number of documents per sample."""
        return self.documents.shape[1]

    def name(self, index: int) -> str:
        """The name of a sample in messages."""
        return f"{self.origin}, sample {index}" if self.names is None else self.names[index]

    def read(self, index: int, which: int = 0) -> np.ndarray:
        """The symbols of document `which` of a sample, a view."""
        document = self.documents[index, which]
        return self.symbols[self.offsets[document] : self.offsets[document + 1]]

    def lengths(self) -> np.ndarray:
        """The number of symbols of each document of each sample, (S, K)."""
        return np.diff(self.offsets)[self.documents]

    def subset(self, indices: Sequence[int] | np.ndarray) -> "SequenceSplit":
        """The samples at `indices`, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        names = None if self.names is None else [self.names[index] for index in chosen]
        if names is None:
            names = [self.name(int(index)) for index in chosen]
        return replace(self, documents=self.documents[chosen], labels=self.labels[chosen], names=names)

    def digest(self) -> str:
        """A digest of the class names and of the symbols and label of every sample, in order."""
        digest = hashlib.sha256("\n".join(self.classes).encode("utf-8", "backslashreplace"))
        for array in (self.documents, self.offsets, self.labels, self.symbols):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def statistics(self) -> dict[str, Any]:
        """Samples, the share of each class, and the lengths of the documents."""
        lengths, counts = self.lengths(), np.bincount(self.labels, minlength=len(self.classes))
        if not len(self):
            return {"samples": 0}
        low, median, high = (int(number) for number in np.quantile(lengths, (0.0, 0.5, 1.0)))
        shares = {name: round(float(count) / len(self), 4) for name, count in zip(self.classes, counts, strict=True)}
        sizes = {"mean": round(float(lengths.mean()), 1), "median": median, "shortest": low, "longest": high}
        return {"samples": len(self), "classes": shares, "length": sizes}
