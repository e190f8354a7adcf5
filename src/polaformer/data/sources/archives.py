""".tar files, read in place and in any order, so that training from them is as repeatable as from folders.

One .tar of class folders; a folder of .tar files, one per class; or WebDataset shards, where files that share a name up to its
first dot are one sample: the `.cls` file holds the label (a number or a class name), a file with an image extension the image.
Folders that enclose everything are ignored; symbolic links are skipped. Opening reads the headers only and never unpacks
anything, so no path inside an archive can do harm.
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
from polaformer.errors import DataError, ImageError, printable
from polaformer.regular_files import MAX_BYTES, open_regular, reason, too_large_reason

MAX_LABEL_BYTES = 1000
MAX_HEADER_BYTES = 2**20  # of a name, or of the extended headers before one
MAX_CLASSES = 10**6


class Member(NamedTuple):
    """A file inside an archive."""

    archive: Path
    name: str
    offset: int
    size: int


class ArchivedImage(NamedTuple):
    """An image, the folders it is in (without those common to all images), and the label in the .cls beside it, if any.

    A label is an index into the list of classes, or a class name.
    """

    member: Member
    folders: tuple[str, ...]
    cls_label: int | str | None

    @property
    def label(self) -> int | str:
        """The label in the .cls; else the outermost folder; else (one .tar per class) the archive's name."""
        if self.cls_label is not None:
            return self.cls_label
        return self.folders[0] if self.folders else self.member.archive.stem


class Archives:
    """The images inside .tar files."""

    def __init__(self, images: list[ArchivedImage], classes: tuple[str, ...]) -> None:
        self.classes = classes
        self.members = [image.member for image in images]
        numbers = {name: number for number, name in enumerate(classes)}
        self.labels = [label if isinstance(label, int) else numbers[label] for label in (image.label for image in images)]

    def __len__(self) -> int:
        return len(self.members)

    def name(self, index: int) -> str:
        """The archive and the path inside it."""
        return _name(self.members[index])

    def read(self, index: int, channels: int) -> Image:
        """The image."""
        return decode(self.content(index), self.name(index), channels=channels)

    def content(self, index: int) -> bytes:
        """The bytes of the file."""
        return _content(self.members[index])


def holds_archives(root: Path) -> bool:
    """Whether a folder, or its training split, holds .tar files; raises DataError if it holds class folders as well."""
    train = split_folders(root)[0]
    found = bool(_archives(train))
    if found and any(images_below(train / name) for name in class_folders(train)):
        raise DataError(f"{train} holds both .tar files and image folders, which is ambiguous; move one of them")
    return found


def open_splits(path: Path) -> tuple[Archives, Archives | None]:
    """The training split and, if there is one, the validation split; raises DataError.

    The splits are folders `train` and `val`, inside the .tar or around the .tar files, or shards named after them.
    """
    if not path.is_dir():
        train, val = _split_by_folder([one for one in _images([path]) if one.folders or one.cls_label is not None])
    else:
        train_folder, val_folder = split_folders(path)
        train, val = _split_by(_shard_split, _images(_archives(train_folder)))
        val = val if val_folder is None else _images(_archives(val_folder))
    if not train:
        raise DataError(f"{path} holds no images in class folders, and no samples of an image and a .cls; check its contents")
    classes = _classes(path, [*train, *val])
    return Archives(_ordered(train), classes), Archives(_ordered(val), classes) if val else None


def _archives(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".tar" and not path.is_dir())
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error.strerror}; check the path and its permissions") from error


def _images(archives: list[Path]) -> list[ArchivedImage]:
    found: list[tuple[Member, Member | None]] = []
    for archive in archives:
        members = {member.name: member for member in _members(archive)}.values()  # the last of each name, as when unpacking
        labels = {_stem(member.name): member for member in members if member.name.endswith(".cls")}
        images = [member for member in members if os.path.splitext(member.name)[1].lower() in EXTENSIONS]
        found += [(image, labels.get(_stem(image.name))) for image in images]
    folders = _without_common([_folders(image) for image, _ in found])
    all_images = [ArchivedImage(image, inside, _read_label(cls)) for (image, cls), inside in zip(found, folders, strict=True)]
    return [one for one in all_images if not (one.folders and one.folders[0].startswith("."))]


def _ordered(images: list[ArchivedImage]) -> list[ArchivedImage]:
    """In the order that the same files would have in folders; images with a .cls by shard and name."""
    first = {one: one.member.archive.name if one.cls_label is not None else str(one.label) for one in images}
    return sorted(images, key=lambda one: (first[one], os.fsencode(one.member.name)))


def _folders(member: Member) -> tuple[str, ...]:
    return tuple(part for part in member.name.split("/")[:-1] if part not in ("", ".", ".."))


def _without_common(folders: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Drops the outermost folders that all entries have in common, but keeps at least one folder of each entry that has any."""
    first, last = min(folders, default=()), max(folders, default=())  # a prefix common to these two is common to all
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))))
    most = min((len(inside) for inside in folders), default=0) - 1
    return [inside[max(min(common, most), 0) :] for inside in folders]


def _read_label(cls: Member | None) -> int | str | None:
    if cls is None:
        return None
    text = _content(cls, MAX_LABEL_BYTES).decode("utf-8", "replace").strip()
    if not text:
        raise DataError(f"{_name(cls)} is empty; write the number or the name of the class into it")
    return int(text) if text.isdecimal() and int(text) < MAX_CLASSES else text


def _members(archive: Path) -> Iterator[Member]:
    try:
        with _HeaderFile(open_regular(archive).detach()) as opened, tarfile.open(fileobj=opened, mode="r:") as file:
            files: dict[str, Member] = {}
            for info in _headers(file):
                if info.isfile() and not info.issparse():
                    files[info.name] = Member(archive, info.name, info.offset_data, info.size)
                    yield files[info.name]
                elif info.islnk() and info.linkname in files:  # a file stored once under two names
                    yield files[info.linkname]._replace(name=info.name)
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        what = reason(error) or "a header is invalid"
        raise DataError(f"{archive} is not a complete, uncompressed .tar: {what}; write or fetch it again") from error


class _HeaderFile(io.BufferedReader):
    """An archive limited to short reads: tarfile itself would read a name of any length that a header claims."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header claims {size:,} bytes; at most {MAX_HEADER_BYTES:,} are allowed")
        return super().read(size)


def _headers(file: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The headers in order. tarfile itself moves backwards at a negative size, and stops silently at a damaged header."""
    last = -1
    for info in file:
        if info.size < 0 or info.offset <= last:
            raise tarfile.ReadError(f"the header at byte {info.offset} is invalid")
        last = info.offset
        yield info
    assert file.fileobj is not None
    file.fileobj.seek(file.offset)
    if file.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"it is damaged or truncated at byte {file.offset}")


def _content(member: Member, most: int = MAX_BYTES) -> bytes:
    try:
        if member.size > most:
            raise OSError(too_large_reason(member.size, most))
        with open_regular(member.archive) as file:
            file.seek(member.offset)
            content = file.read(member.size)
    except OSError as error:
        raise ImageError(f"{_name(member)} cannot be read: {reason(error)}; check {member.archive}") from error
    if len(content) < member.size:
        raise ImageError(f"{_name(member)} is truncated: {member.archive} ends inside it; fetch the archive again")
    return content


def _split_by(split_of: Callable[[ArchivedImage], str], images: list[ArchivedImage]) -> tuple[list[ArchivedImage], ...]:
    """The images for training and those for validation; all images and none if no image is marked for training."""
    train = [image for image in images if split_of(image) in TRAIN]
    val = [image for image in images if split_of(image) in VAL]
    return (train, val) if train else (images, [])


def _split_by_folder(images: list[ArchivedImage]) -> tuple[list[ArchivedImage], ...]:
    """By the outermost folder, which then is not a class."""
    train, val = _split_by(lambda image: "".join(image.folders[:1]), images)
    if train is images:
        return images, []
    return tuple([one._replace(folders=one.folders[1:]) for one in split] for split in (train, val))


def _shard_split(image: ArchivedImage) -> str:
    words = re.split(r"[^a-z]+", image.member.archive.stem.lower())
    return next((word for word in words if word in (*TRAIN, *VAL)), "")


def _classes(path: Path, images: list[ArchivedImage]) -> tuple[str, ...]:
    labels = {image.label for image in images}
    numbers = {label for label in labels if isinstance(label, int)}
    if numbers and len(numbers) < len(labels):
        raise DataError(f"{path}: some labels are numbers and some are names; give all images a .cls of one kind")
    # Numbers are indices into a list of classes.
    return tuple(str(index) for index in range(max(numbers) + 1)) if numbers else tuple(sorted(str(label) for label in labels))


def _name(member: Member) -> str:
    return printable(f"{member.archive.name}/{member.name}")


def _stem(name: str) -> str:
    folder, base = os.path.split(name)
    return os.path.join(folder, base.split(".")[0])
