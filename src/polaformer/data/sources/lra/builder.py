"""Collects the samples of a split as they are read, with a single copy of the symbols in memory."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np

from polaformer.data.sources.lra.lines import at_line
from polaformer.data.sources.lra.sequences import SequenceSplit


class SampleLocations(Sequence[str]):
    """Where each sample was read: the file, and the number of the line (or row) in it. Strings are built on demand."""

    def __init__(self, noun: str = "line") -> None:
        self.noun = noun
        self.paths: list[Path] = []
        self.numbers, self.files = array("q"), array("q")

    def add(self, path: Path, number: int) -> None:
        """The place of the next sample."""
        if not self.paths or self.paths[-1] != path:
            self.paths.append(path)
        self.files.append(len(self.paths) - 1)
        self.numbers.append(number)

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        return at_line(self.paths[self.files[index]], self.numbers[index], self.noun)


class SplitBuilder:
    """A split to which documents, and samples that consist of them, are added one by one."""

    def __init__(self, classes: tuple[str, ...], origin: str) -> None:
        self.classes, self.origin = classes, origin
        self._symbols = bytearray()
        self._offsets, self._documents, self._labels = array("q", [0]), array("q"), array("q")

    def __len__(self) -> int:
        return len(self._labels)

    def add_document(self, symbols: bytes) -> int:
        """Stores a document and returns its number."""
        self._symbols += symbols
        self._offsets.append(len(self._symbols))
        return len(self._offsets) - 2

    def add_sample(self, label: int, *documents: int) -> None:
        """Adds a sample; all samples of a split have the same number of documents."""
        self._documents.extend(documents)
        self._labels.append(label)

    def finish(self, names: Sequence[str] | None = None) -> SequenceSplit:
        """The split, which takes over the memory: nothing can be added afterwards."""
        documents = np.frombuffer(self._documents, dtype=np.int64).reshape(len(self), -1)
        labels, offsets = np.frombuffer(self._labels, dtype=np.int64), np.frombuffer(self._offsets, dtype=np.int64)
        symbols = np.frombuffer(self._symbols, dtype=np.uint8)
        return SequenceSplit(self.classes, symbols, offsets, documents, labels, self.origin, names)
