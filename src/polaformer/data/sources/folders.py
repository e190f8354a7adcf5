"""Image folders with one folder per class, in an order that depends on names alone."""

import os
from pathlib import Path

from PIL.Image import Image

from polaformer.data.images import EXTENSIONS, read_file, read_image
from polaformer.errors import DataError, printable

TRAIN = ("train", "training")
TEST = "test"
VAL = ("val", "valid", "validation", TEST)


class Folder:
    """The images below the class folders of `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.classes = class_folders(root)
        files = [(f"{name}/{path}", label) for label, name in enumerate(self.classes) for path in images_below(root / name)]
        self.paths = [path for path, _ in files]  # relative to the root, as strings: there may be millions
        self.labels = [label for _, label in files]

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        """The path relative to the root."""
        return printable(self.paths[index])

    def read(self, index: int, channels: int) -> Image:
        """The image."""
        return read_image(self.root / self.paths[index], channels=channels)

    def content(self, index: int) -> bytes:
        """The bytes of the file."""
        return read_file(self.root / self.paths[index])


def split_folders(root: Path) -> tuple[Path, Path | None]:
    """The folders of the training and validation splits: `train` and `val` in the root, or the root itself and None."""
    train = next((root / name for name in TRAIN if (root / name).is_dir()), None)
    if train is None:
        return root, None
    return train, next((root / name for name in VAL if (root / name).is_dir()), None)


def open_splits(root: Path) -> tuple[Folder, Folder | None]:
    """The training split and, if there is one, the validation split; raises DataError."""
    train, val = split_folders(root)
    return _open(train), None if val is None else _open(val)


def open_test(root: Path) -> Folder | None:
    """The test split: `test` in the root, if there is another folder (`val` or the like) to validate on; raises DataError.

    A `test` without class folders, such as ImageNet's, has no labels and is ignored.
    """
    val = split_folders(root)[1]
    has_both = val is not None and val.name != TEST and (root / TEST).is_dir()
    return _open(root / TEST) if has_both and class_folders(root / TEST) else None


def class_folders(root: Path) -> tuple[str, ...]:
    """The sorted names of the class folders: all folders except hidden ones."""
    return tuple(entry.name for entry in _entries(root) if _is_folder(entry) and not entry.name.startswith("."))


def images_below(folder: Path) -> list[str]:
    """The sorted paths of images in a folder, at any depth; links are followed, except cycles."""
    found: list[str] = []
    # Following a link to a parent folder would merge all classes into one.
    pending, seen = [""], {os.path.realpath(above) for above in folder.absolute().parents}
    while pending:
        below = pending.pop()
        where = os.path.realpath(folder / below)
        if where in seen:
            continue
        seen.add(where)
        for entry in _entries(folder / below):
            if _is_folder(entry):
                pending.append(f"{below}{entry.name}/")
            elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS:
                found.append(f"{below}{entry.name}")
    return sorted(found, key=os.fsencode)


def _open(root: Path) -> Folder:
    folder = Folder(root)
    if not folder.classes:
        loose = " (the images in it have no class)" if images_below(root) else ""
        raise DataError(f"{root} has no class folders{loose}; put the images of each class into a separate folder")
    if not len(folder):
        raise DataError(f"{root} has class folders but no images in them; {', '.join(EXTENSIONS)} are read")
    return folder


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder sorted by name: file systems list them in arbitrary order."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error.strerror}; check the path and its permissions") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # A link to itself; if it has an image extension, reading it reports the error.
        return False
