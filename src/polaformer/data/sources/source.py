"""The interface that every kind of labelled images implements, its splits, and subsets of it."""

import hashlib
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from PIL.Image import Image

from polaformer.data.randomness import derive
from polaformer.errors import SettingsError


class Images(Protocol):
    """Images that can be read in any order, whatever is known about them. classes: what may be seen on them."""

    classes: tuple[str, ...]

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """The name of the image in messages, usually its path."""
        ...

    def read(self, index: int, channels: int) -> Image:
        """The image, with three channels or one; raises ImageError."""
        ...

    def content(self, index: int) -> bytes:
        """The bytes of the image as stored."""
        ...


class Source(Images, Protocol):
    """Images with one label each."""

    labels: list[int]


AnyImages = TypeVar("AnyImages", bound=Images)


class NamedSplits(Generic[AnyImages]):
    """Splits by name, at least one, which all have the same classes."""

    @property
    def splits(self) -> dict[str, AnyImages]:
        """The existing splits by name."""
        raise NotImplementedError

    @property
    def different(self) -> dict[str, AnyImages]:
        """The splits by name, each source once: all images may be those to train on and those to validate on."""
        first = {id(source): name for name, source in reversed(self.splits.items())}
        return {name: source for name, source in self.splits.items() if first[id(source)] == name}

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names."""
        return next(iter(self.splits.values())).classes


@dataclass(frozen=True)
class SomeSplits(NamedSplits[AnyImages]):
    """Whatever splits data have, to be checked."""

    found: dict[str, AnyImages]

    @property
    def splits(self) -> dict[str, AnyImages]:
        """The existing splits by name."""
        return self.found


@dataclass(frozen=True)
class Splits(NamedSplits[AnyImages]):
    """Images to train on, to validate on and, optionally, to test on; all splits have the same classes."""

    train: AnyImages
    val: AnyImages
    test: AnyImages | None = None

    @property
    def splits(self) -> dict[str, AnyImages]:
        """The existing splits by name."""
        return {"train": self.train, "val": self.val} | ({} if self.test is None else {"test": self.test})

    def split(self, name: str) -> AnyImages:
        """The split of that name; raises SettingsError."""
        if name not in self.splits:
            raise SettingsError(f"there is no split {name!r} (--split); the data have {', '.join(self.splits)}")
        return self.splits[name]


class DataSplits(Splits[Source]):
    """The splits of images with one label each."""


class Subset:
    """The images of a source at `indices`, in that order."""

    def __init__(self, source: Source, indices: list[int]) -> None:
        self.source, self.indices = source, indices
        self.classes = source.classes
        self.labels = [source.labels[index] for index in indices]

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, index: int) -> str:
        """The name of the image in messages."""
        return self.source.name(self.indices[index])

    def read(self, index: int, channels: int) -> Image:
        """The image."""
        return self.source.read(self.indices[index], channels)

    def content(self, index: int) -> bytes:
        """The bytes of the image as stored."""
        return self.source.content(self.indices[index])


def held_out(source: Images, share: float) -> tuple[list[int], list[int]]:
    """The indices to train on, and those of the share to validate on.

    They depend on the names alone, so that images added later do not move others from one split to the other.
    """
    is_held = [derive("held out", source.name(index)) % 10**6 < share * 10**6 for index in range(len(source))]
    train, val = ([index for index, held in enumerate(is_held) if held is wanted] for wanted in (False, True))
    return train, val


def digest_of_names(source: Source) -> str:
    """A digest of the class names and of the names and labels of all images, in order."""
    digest = hashlib.sha256("\n".join(source.classes).encode("utf-8", "backslashreplace"))
    for index, label in enumerate(source.labels):
        digest.update(f"{source.name(index)}\0{label}\n".encode("utf-8", "backslashreplace"))
    return digest.hexdigest()
