"""What every kind of data looks like from outside, and how the user's word for it is understood."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from PIL.Image import Image

from polaformer.data.randomness import derive
from polaformer.errors import DataError, SettingsError

DIGITS = "digits"
HUGGING_FACE = "hfds:"


class Source(Protocol):
    """Labelled images that can be read in any order."""

    classes: tuple[str, ...]
    labels: list[int]

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What to call the image in messages: its path, mostly."""
        ...

    def read(self, index: int, channels: int) -> Image:
        """The image, with three channels or one; raises ImageError."""
        ...

    def content(self, index: int) -> bytes:
        """The bytes of the image, as they are stored."""
        ...


@dataclass(frozen=True)
class Data:
    """What is trained on, what is evaluated on and never trained on, and perhaps what is tested on; of the same classes."""

    train: Source
    val: Source
    test: Source | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.train.classes

    @property
    def parts(self) -> dict[str, Source]:
        """The parts that there are, by name."""
        return {"train": self.train, "val": self.val} | ({} if self.test is None else {"test": self.test})

    def part(self, split: str) -> Source:
        """The part of that name; raises SettingsError."""
        if split not in self.parts:
            raise SettingsError(f"there is no split {split!r} (--split); the data have {', '.join(self.parts)}")
        return self.parts[split]


class Part:
    """Some of the images of a source, in the given order."""

    def __init__(self, source: Source, indices: list[int]) -> None:
        self.source, self.indices = source, indices
        self.classes = source.classes
        self.labels = [source.labels[index] for index in indices]

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, index: int) -> str:
        """What to call the image in messages."""
        return self.source.name(self.indices[index])

    def read(self, index: int, channels: int) -> Image:
        """The image."""
        return self.source.read(self.indices[index], channels)

    def content(self, index: int) -> bytes:
        """The stored bytes."""
        return self.source.content(self.indices[index])


def open_data(spec: str, *, val_share: float = 0.1) -> Data:
    """The data that `spec` names; raises DataError.

    spec: "digits"; a folder of class folders, or one with `train` and `val` below it; a .tar of class folders, a folder of
    .tar files (one a class, or WebDataset shards); an .npz file of arrays; "hfds:FOLDER", a data set in the form of Hugging
    Face. A folder with both `val` and `test` below it is tested on the latter. val_share: what is held out where there is no
    validation part; which images does not depend on any seed.
    """
    from polaformer.data.sources import digits

    if spec == DIGITS:
        return digits.open_digits()
    train, val = _splits(spec)
    found = _held_out(train, val_share) if val is None else Data(train, val, _test_part(spec))
    _check(found, spec)
    return found


def _splits(spec: str) -> tuple[Source, Source | None]:
    from polaformer.data.sources import archives, arrays, folders, hugging_face

    if spec.startswith(HUGGING_FACE):
        return hugging_face.open_splits(spec.removeprefix(HUGGING_FACE))
    path = Path(spec)
    is_folder, is_file = _kind(path)
    if is_folder and spec:
        return archives.open_splits(path) if archives.are_in(path) else folders.open_splits(path)
    if is_file and path.suffix == ".tar":
        return archives.open_splits(path)
    if is_file and path.suffix == ".npz":
        return arrays.open_splits(path)
    what = f"{spec} is a file" if is_file else f"there is no data {spec or 'without a name'}"
    raise DataError(f"{what}; give a folder of class folders, a .tar, an .npz, {HUGGING_FACE}FOLDER, or {DIGITS!r}")


def _test_part(spec: str) -> Source | None:
    """What is tested on at the end of a training; folders alone have it."""
    from polaformer.data.sources import archives, folders

    path = Path(spec)
    return folders.open_test(path) if path.is_dir() and not archives.are_in(path) else None


def _kind(path: Path) -> tuple[bool, bool]:
    """Whether it is a folder, whether it is a file; raises DataError where the operating system does not say."""
    try:
        return path.is_dir(), path.exists() and not path.is_dir()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the path and its permissions") from error


def absolute(spec: str) -> str:
    """The same data, named so that it holds from any folder: a path that exists is made absolute, other names are kept."""
    if spec == DIGITS:
        return spec
    if spec.startswith(HUGGING_FACE):
        return HUGGING_FACE + os.path.abspath(spec.removeprefix(HUGGING_FACE))
    return os.path.abspath(spec) if os.path.lexists(spec) else spec


def digest_of_names(source: Source) -> str:
    """A digest of the names and labels of all images, in their order, and of the classes."""
    digest = hashlib.sha256("\n".join(source.classes).encode("utf-8", "backslashreplace"))
    for index, label in enumerate(source.labels):
        digest.update(f"{source.name(index)}\0{label}\n".encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


def _held_out(source: Source, share: float) -> Data:
    """Splits by the names alone, so that images which come later do not move the others from one part to the other."""
    is_val = [derive("held out", source.name(index)) % 10**6 < share * 10**6 for index in range(len(source))]
    parts = [Part(source, [index for index, val in enumerate(is_val) if val is wanted]) for wanted in (False, True)]
    return Data(*parts)


def _check(data: Data, spec: str) -> None:
    if len(data.classes) < 2:
        raise DataError(f"{spec} has {len(data.classes)} class ({', '.join(data.classes)}); at least two are needed")
    for name, part in (("validation", data.val), ("test", data.test)):
        if part is not None and data.train.classes != part.classes:
            differ = sorted(set(data.train.classes) ^ set(part.classes))
            raise DataError(
                f"{spec}: training and {name} have different classes ({', '.join(differ[:5])}{', …' * (len(differ) > 5)}); "
                "give both the same class folders"
            )
    for purpose, part in (("train", data.train), ("validate", data.val), ("test", data.test)):
        if part is not None and not len(part):
            raise DataError(f"{spec}: there are no images to {purpose} with; add some, or hold out another share (--val-share)")
    missing = [data.classes[label] for label in sorted(set(range(len(data.classes))) - set(data.train.labels))]
    if missing:
        raise DataError(
            f"{spec}: no training images of {', '.join(missing[:5])}{', …' * (len(missing) > 5)}; add some or remove the class"
        )
