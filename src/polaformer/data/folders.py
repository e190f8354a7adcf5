"""Folders of class folders of images, in an order that depends on names alone."""

import os
from pathlib import Path

from PIL.Image import Image

from polaformer.data.images import EXTENSIONS, read_image, shown
from polaformer.errors import DataError, ImageError

TRAIN = ("train", "training")
VAL = ("val", "valid", "validation", "test")


class Folder:
    """The images below the class folders of `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.classes = tuple(
            sorted(entry.name for entry in _entries(root) if entry.is_dir() and not entry.name.startswith("."))
        )
        files = [(path, label) for label, name in enumerate(self.classes) for path in images_below(root / name)]
        self.paths = [path for path, _ in files]
        self.labels = [label for _, label in files]

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        """The path below the root."""
        return shown(self.paths[index].relative_to(self.root).as_posix())

    def read(self, index: int, channels: int) -> Image:
        """The image."""
        return read_image(self.paths[index], channels=channels)

    def content(self, index: int) -> bytes:
        """The bytes of the file."""
        try:
            return self.paths[index].read_bytes()
        except OSError as error:
            raise ImageError(f"{shown(self.paths[index])} cannot be read: {error.strerror}; check the path") from error


def split_folders(root: Path) -> tuple[Path, Path | None]:
    """The folders of the training and the validation part: `train` and `val` below the root, or the root and nothing."""
    train = next((root / name for name in TRAIN if (root / name).is_dir()), None)
    if train is None:
        return root, None
    return train, next((root / name for name in VAL if (root / name).is_dir()), None)


def open_splits(root: Path) -> tuple[Folder, Folder | None]:
    """The training part, and the validation part where there is one; raises DataError."""
    train, val = split_folders(root)
    return _open(train), None if val is None else _open(val)


def images_below(folder: Path) -> list[Path]:
    """The files with the extension of an image, at any depth, sorted; links are followed, but not round in circles."""
    found: list[Path] = []
    waiting, seen = [folder], set()
    while waiting:
        current = waiting.pop()
        where = os.path.realpath(current)
        if where in seen:
            continue
        seen.add(where)
        for entry in _entries(current):
            if entry.is_dir():
                waiting.append(Path(entry.path))
            elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS:
                found.append(Path(entry.path))
    return sorted(found, key=lambda path: os.fsencode(path.relative_to(folder).as_posix()))


def _open(root: Path) -> Folder:
    folder = Folder(root)
    if not folder.classes:
        loose = " (the images in it have no class)" if images_below(root) else ""
        raise DataError(f"{root} has no class folders{loose}; put the images of each class into a folder of its own")
    if not len(folder):
        raise DataError(f"{root} has class folders but no images in them; {', '.join(EXTENSIONS)} are read")
    return folder


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise DataError(f"{shown(folder)} cannot be listed: {error.strerror}; check the path and its permissions") from error
