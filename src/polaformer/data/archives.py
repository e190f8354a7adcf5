""".tar files, read in place and in any order, so that training from them is as repeatable as from folders.

One .tar of class folders; a folder of .tar files, one a class; or WebDataset shards: files that share a name up to its first
dot are one sample, `.cls` its label (a number, or the name of a class), one with the extension of an image its image. Only the
headers are read at the start; nothing is unpacked, so no path inside an archive matters.
"""

import os
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from PIL.Image import Image

from polaformer.data.folders import TRAIN, VAL, split_folders
from polaformer.data.images import EXTENSIONS, decode, shown
from polaformer.errors import DataError, ImageError

LONGEST_LABEL = 1000  # bytes
MOST_CLASSES = 10**6


class Member(NamedTuple):
    """A file inside an archive."""

    archive: Path
    name: str
    offset: int
    size: int


class Sample(NamedTuple):
    """An image and its class: a place in the list of classes, or a name."""

    image: Member
    label: int | str


class Archives:
    """The images inside .tar files."""

    def __init__(self, samples: list[Sample], classes: tuple[str, ...]) -> None:
        self.classes = classes
        self.members = [sample.image for sample in samples]
        place = {name: label for label, name in enumerate(classes)}
        self.labels = [sample.label if isinstance(sample.label, int) else place[sample.label] for sample in samples]

    def __len__(self) -> int:
        return len(self.members)

    def name(self, index: int) -> str:
        """The archive and the name inside it."""
        return _name(self.members[index])

    def read(self, index: int, channels: int) -> Image:
        """The image."""
        return decode(self.content(index), self.name(index), channels=channels)

    def content(self, index: int) -> bytes:
        """The bytes of the file."""
        return _content(self.members[index])


def are_in(root: Path) -> bool:
    """Whether a folder holds .tar files, itself or in its training part."""
    return bool(_archives(split_folders(root)[0]))


def open_splits(path: Path) -> tuple[Archives, Archives | None]:
    """The training part, and the validation part where there is one; raises DataError.

    Parts are folders `train` and `val`, inside the .tar or around the .tar files, or shards named after them.
    """
    if path.is_file():
        train, val = _split(_samples([path]), _first_folder)
    else:
        train_folder, val_folder = split_folders(path)
        train, val = _split(_samples(_archives(train_folder)), _word_of_shard)
        val = val if val_folder is None else _samples(_archives(val_folder))
    if not train:
        raise DataError(f"{path} holds no images in class folders, and no samples of an image and a .cls; check what it holds")
    classes = _classes(path, [*train, *val])
    return Archives(train, classes), Archives(val, classes) if val else None


def _archives(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".tar")
    except OSError as error:
        raise DataError(f"{shown(folder)} cannot be listed: {error.strerror}; check the path and its permissions") from error


def _samples(archives: list[Path]) -> list[Sample]:
    found: list[Sample] = []
    for archive in archives:
        members = list(_members(archive))
        labels = {_stem(member.name): member for member in members if member.name.endswith(".cls")}
        images = [member for member in members if os.path.splitext(member.name)[1].lower() in EXTENSIONS]
        found += [Sample(image, _label_of(image, labels.get(_stem(image.name)))) for image in images]
    return found


def _label_of(image: Member, label: Member | None) -> int | str:
    """What the .cls beside the image says; else the folder it lies in; else, of one .tar a class, the archive's name."""
    if label is None:
        return os.path.basename(os.path.dirname(image.name)) or image.archive.stem
    text = _content(label, LONGEST_LABEL).decode("utf-8", "replace").strip()
    if not text:
        raise DataError(f"{_name(label)} is empty; write the number or the name of the class into it")
    return int(text) if text.isdecimal() and int(text) < MOST_CLASSES else text


def _members(archive: Path) -> Iterator[Member]:
    try:
        with tarfile.open(archive, mode="r:") as file:
            for info in file:
                if info.isfile() and not info.issparse():
                    yield Member(archive, info.name, info.offset_data, info.size)
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise DataError(f"{archive} is no whole, uncompressed .tar: {error}; write or fetch it again") from error


def _content(member: Member, most: int | None = None) -> bytes:
    wanted = member.size if most is None else min(member.size, most)
    try:
        with open(member.archive, "rb") as file:
            file.seek(member.offset)
            content = file.read(wanted)
    except OSError as error:
        raise ImageError(f"{_name(member)} cannot be read: {error.strerror}; check {member.archive}") from error
    if len(content) < wanted:
        raise ImageError(f"{_name(member)} is cut short: {member.archive} ends inside it; fetch the archive again")
    return content


def _split(samples: list[Sample], word_of: Callable[[Member], str]) -> tuple[list[Sample], list[Sample]]:
    """The samples whose word says that they are for training, and those for validation; all and none, where none says so."""
    train = [sample for sample in samples if word_of(sample.image) in TRAIN]
    val = [sample for sample in samples if word_of(sample.image) in VAL]
    return (train, val) if train else (samples, [])


def _first_folder(member: Member) -> str:
    return member.name.removeprefix("./").split("/")[0]


def _word_of_shard(member: Member) -> str:
    words = re.split(r"[^a-z]+", member.archive.stem.lower())
    return next((word for word in words if word in (*TRAIN, *VAL)), "")


def _classes(path: Path, samples: list[Sample]) -> tuple[str, ...]:
    labels = {sample.label for sample in samples}
    numbers = {label for label in labels if isinstance(label, int)}
    if numbers and len(numbers) < len(labels):
        raise DataError(f"{path}: some classes are numbers and some are names; give all images a .cls of one kind")
    # Numbers are places in a list of classes.
    return tuple(str(place) for place in range(max(numbers) + 1)) if numbers else tuple(sorted(str(label) for label in labels))


def _name(member: Member) -> str:
    return shown(f"{member.archive.name}/{member.name}")


def _stem(name: str) -> str:
    folder, base = os.path.split(name)
    return os.path.join(folder, base.split(".")[0])
