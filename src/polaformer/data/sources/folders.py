"""Folders of class folders of images, in an order that depends on names alone."""

import os
from pathlib import Path

from PIL.Image import Image

from polaformer.data.images import EXTENSIONS, read_file, read_image
from polaformer.errors import DataError, shown

TRAIN = ("train", "training")
TEST = "test"
VAL = ("val", "valid", "validation", TEST)


class Folder:
    """The images below the class folders of `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.classes = class_folders(root)
        files = [(f"{name}/{path}", label) for label, name in enumerate(self.classes) for path in images_below(root / name)]
        self.paths = [path for path, _ in files]  # below the root, as texts: there may be millions
        self.labels = [label for _, label in files]

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        """The path below the root."""
        return shown(self.paths[index])

    def read(self, index: int, channels: int) -> Image:
        """The image."""
        return read_image(self.root / self.paths[index], channels=channels)

    def content(self, index: int) -> bytes:
        """The bytes of the file."""
        return read_file(self.root / self.paths[index])


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


def open_test(root: Path) -> Folder | None:
    """The part to test on: `test` below the root, where `val` or the like is there to validate on; raises DataError.

    One without class folders, such as ImageNet's, has no labels and is left alone.
    """
    val = split_folders(root)[1]
    has_both = val is not None and val.name != TEST and (root / TEST).is_dir()
    return _open(root / TEST) if has_both and class_folders(root / TEST) else None


def class_folders(root: Path) -> tuple[str, ...]:
    """The names of the folders that are classes, sorted: all but hidden ones."""
    return tuple(entry.name for entry in _entries(root) if _is_folder(entry) and not entry.name.startswith("."))


def images_below(folder: Path) -> list[str]:
    """The paths of images below a folder, at any depth, sorted; links are followed, but not round in circles."""
    found: list[str] = []
    # A link to a folder that this one lies in would make all classes one.
    waiting, seen = [""], {os.path.realpath(above) for above in folder.absolute().parents}
    while waiting:
        below = waiting.pop()
        where = os.path.realpath(folder / below)
        if where in seen:
            continue
        seen.add(where)
        for entry in _entries(folder / below):
            if _is_folder(entry):
                waiting.append(f"{below}{entry.name}/")
            elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS:
                found.append(f"{below}{entry.name}")
    return sorted(found, key=os.fsencode)


def _open(root: Path) -> Folder:
    folder = Folder(root)
    if not folder.classes:
        loose = " (the images in it have no class)" if images_below(root) else ""
        raise DataError(f"{root} has no class folders{loose}; put the images of each class into a folder of its own")
    if not len(folder):
        raise DataError(f"{root} has class folders but no images in them; {', '.join(EXTENSIONS)} are read")
    return folder


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, by name: the order in which a file system lists it is arbitrary."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error.strerror}; check the path and its permissions") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # A link to itself; if it has the name of an image, reading it says so.
        return False
