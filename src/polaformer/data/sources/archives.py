""".tar files, read in place and in any order, so that training from them is as repeatable as from folders.

One .tar of class folders; a folder of .tar files, one a class; or WebDataset shards: files that share a name up to its first
dot are one sample, `.cls` its label (a number, or the name of a class), one with the extension of an image its image. Folders
around all of these do not matter; symbolic links are left out. Only the headers are read at the start; nothing is unpacked, so
no path inside an archive can do harm.
"""

import io
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from PIL.Image import Image

from polaformer.data.images import EXTENSIONS, decode
from polaformer.data.sources.folders import TRAIN, VAL, class_folders, images_below, split_folders
from polaformer.errors import DataError, ImageError, shown
from polaformer.regular_files import MOST_BYTES, open_regular, reason, too_large

LONGEST_LABEL = 1000  # bytes
LONGEST_HEADER = 2**20  # bytes: of a name, or of extended headers before one
MOST_CLASSES = 10**6


class Member(NamedTuple):
    """A file inside an archive."""

    archive: Path
    name: str
    offset: int
    size: int


class Sample(NamedTuple):
    """An image, the folders that it lies in (below those that all images lie in), and what the .cls beside it says, if any.

    A label is a place in the list of classes, or a name.
    """

    image: Member
    folders: tuple[str, ...]
    told: int | str | None

    @property
    def label(self) -> int | str:
        """What the .cls says; else the outermost folder; else, of one .tar a class, the archive's name."""
        if self.told is not None:
            return self.told
        return self.folders[0] if self.folders else self.image.archive.stem


class Archives:
    """The images inside .tar files."""

    def __init__(self, samples: list[Sample], classes: tuple[str, ...]) -> None:
        self.classes = classes
        self.members = [sample.image for sample in samples]
        place = {name: label for label, name in enumerate(classes)}
        self.labels = [label if isinstance(label, int) else place[label] for label in (sample.label for sample in samples)]

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
    """Whether a folder holds .tar files, itself or in its training part; raises DataError if it holds class folders too."""
    train = split_folders(root)[0]
    found = bool(_archives(train))
    if found and any(images_below(train / name) for name in class_folders(train)):
        raise DataError(f"{train} holds .tar files and folders of images; it is not clear which to use: move one of them")
    return found


def open_splits(path: Path) -> tuple[Archives, Archives | None]:
    """The training part, and the validation part where there is one; raises DataError.

    Parts are folders `train` and `val`, inside the .tar or around the .tar files, or shards named after them.
    """
    if not path.is_dir():
        train, val = _split_inside([one for one in _samples([path]) if one.folders or one.told is not None])
    else:
        train_folder, val_folder = split_folders(path)
        train, val = _split(_samples(_archives(train_folder)), _word_of_shard)
        val = val if val_folder is None else _samples(_archives(val_folder))
    if not train:
        raise DataError(f"{path} holds no images in class folders, and no samples of an image and a .cls; check what it holds")
    classes = _classes(path, [*train, *val])
    return Archives(_ordered(train), classes), Archives(_ordered(val), classes) if val else None


def _archives(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".tar" and not path.is_dir())
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error.strerror}; check the path and its permissions") from error


def _samples(archives: list[Path]) -> list[Sample]:
    found: list[tuple[Member, Member | None]] = []
    for archive in archives:
        members = {member.name: member for member in _members(archive)}.values()  # of one name the last, as when unpacked
        labels = {_stem(member.name): member for member in members if member.name.endswith(".cls")}
        images = [member for member in members if os.path.splitext(member.name)[1].lower() in EXTENSIONS]
        found += [(image, labels.get(_stem(image.name))) for image in images]
    folders = _below_shared([_folders(image) for image, _ in found])
    samples = [Sample(image, inside, _told(label)) for (image, label), inside in zip(found, folders, strict=True)]
    return [one for one in samples if not (one.folders and one.folders[0].startswith("."))]


def _ordered(samples: list[Sample]) -> list[Sample]:
    """As the same files would be ordered in folders; those with a .cls by their shard and name."""
    first = {one: one.image.archive.name if one.told is not None else str(one.label) for one in samples}
    return sorted(samples, key=lambda one: (first[one], os.fsencode(one.image.name)))


def _folders(member: Member) -> tuple[str, ...]:
    return tuple(part for part in member.name.split("/")[:-1] if part not in ("", ".", ".."))


def _below_shared(folders: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Without the outermost folders, where all have the same ones; of those that have any, one is always left."""
    first, last = min(folders, default=()), max(folders, default=())  # what these two share, all share
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))))
    most = min((len(inside) for inside in folders), default=0) - 1
    return [inside[max(min(shared, most), 0) :] for inside in folders]


def _told(label: Member | None) -> int | str | None:
    """What a .cls says."""
    if label is None:
        return None
    text = _content(label, LONGEST_LABEL).decode("utf-8", "replace").strip()
    if not text:
        raise DataError(f"{_name(label)} is empty; write the number or the name of the class into it")
    return int(text) if text.isdecimal() and int(text) < MOST_CLASSES else text


def _members(archive: Path) -> Iterator[Member]:
    try:
        with _HeaderFile(open_regular(archive).detach()) as opened, tarfile.open(fileobj=opened, mode="r:") as file:
            files: dict[str, Member] = {}
            for info in _headers(file):
                if info.isfile() and not info.issparse():
                    files[info.name] = Member(archive, info.name, info.offset_data, info.size)
                    yield files[info.name]
                elif info.islnk() and info.linkname in files:  # a file that is stored once and has two names
                    yield files[info.linkname]._replace(name=info.name)
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        what = reason(error) or "a header makes no sense"
        raise DataError(f"{archive} is no whole, uncompressed .tar: {what}; write or fetch it again") from error


class _HeaderFile(io.BufferedReader):
    """An archive of which headers are read, but no files: tarfile reads a name of any length that a header claims."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= LONGEST_HEADER:
            raise tarfile.ReadError(f"a header claims {size:,} bytes; at most {LONGEST_HEADER:,} are allowed")
        return super().read(size)


def _headers(file: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The headers one after the other. tarfile itself goes back where a size is negative, and stops where one is damaged."""
    last = -1
    for info in file:
        if info.size < 0 or info.offset <= last:
            raise tarfile.ReadError(f"the header at byte {info.offset} makes no sense")
        last = info.offset
        yield info
    assert file.fileobj is not None
    file.fileobj.seek(file.offset)
    if file.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"it is damaged, or cut off, at byte {file.offset}")


def _content(member: Member, most: int = MOST_BYTES) -> bytes:
    try:
        if member.size > most:
            raise OSError(too_large(member.size, most))
        with open_regular(member.archive) as file:
            file.seek(member.offset)
            content = file.read(member.size)
    except OSError as error:
        raise ImageError(f"{_name(member)} cannot be read: {reason(error)}; check {member.archive}") from error
    if len(content) < member.size:
        raise ImageError(f"{_name(member)} is cut short: {member.archive} ends inside it; fetch the archive again")
    return content


def _split(samples: list[Sample], word_of: Callable[[Sample], str]) -> tuple[list[Sample], list[Sample]]:
    """The samples whose word says that they are for training, and those for validation; all and none, where none says so."""
    train = [sample for sample in samples if word_of(sample) in TRAIN]
    val = [sample for sample in samples if word_of(sample) in VAL]
    return (train, val) if train else (samples, [])


def _split_inside(samples: list[Sample]) -> tuple[list[Sample], list[Sample]]:
    """By the outermost folder, which is then no class."""
    train, val = _split(samples, lambda sample: "".join(sample.folders[:1]))
    if train is samples:
        return samples, []
    return [one._replace(folders=one.folders[1:]) for one in train], [one._replace(folders=one.folders[1:]) for one in val]


def _word_of_shard(sample: Sample) -> str:
    words = re.split(r"[^a-z]+", sample.image.archive.stem.lower())
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
