"""Opens the data given by `--data`, in any format."""

import os
from pathlib import Path

from polaformer.data.sources import archives, arrays, digits, folders, hugging_face
from polaformer.data.sources.source import DataSplits, Source, Subset, held_out
from polaformer.errors import DataError

DIGITS = "digits"
HUGGING_FACE = "hfds:"


def open_data(spec: str, *, val_share: float = 0.1) -> DataSplits:
    """The data that `spec` names; raises DataError.

    spec: "digits"; a folder of class folders, or of `train` and `val` with class folders in each; a .tar of class folders; a
    folder of .tar files (one per class, or WebDataset shards); an .npz file of arrays; "hfds:FOLDER", a Hugging Face dataset.
    Only an image folder with `test` besides `val` has a test split.
    val_share: the share of images to hold out if there is no validation split. The same images are held out for every seed.
    """
    if spec == DIGITS:
        return digits.open_digits()
    train, val = _open_splits(spec)
    data = _hold_out(train, val_share) if val is None else DataSplits(train, val, _open_test(spec))
    _check(data, spec)
    return data


def _open_splits(spec: str) -> tuple[Source, Source | None]:
    if spec.startswith(HUGGING_FACE):
        return hugging_face.open_splits(spec.removeprefix(HUGGING_FACE))
    path = Path(spec)
    is_folder, is_file = _kind(path)
    if is_folder and spec:
        return archives.open_splits(path) if archives.holds_archives(path) else folders.open_splits(path)
    if is_file and path.suffix == ".tar":
        return archives.open_splits(path)
    if is_file and path.suffix == ".npz":
        return arrays.open_splits(path)
    what = f"{spec} is a file" if is_file else f"there is no data {spec or 'without a name'}"
    raise DataError(f"{what}; give a folder of class folders, a .tar, an .npz, {HUGGING_FACE}FOLDER, or {DIGITS!r}")


def _open_test(spec: str) -> Source | None:
    """The split to test on at the end of training; only image folders have one."""
    path = Path(spec)
    return folders.open_test(path) if path.is_dir() and not archives.holds_archives(path) else None


def _kind(path: Path) -> tuple[bool, bool]:
    """Whether it is a folder, and whether it is a file; raises DataError if the operating system refuses to answer."""
    try:
        return path.is_dir(), path.exists() and not path.is_dir()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the path and its permissions") from error


def absolute(spec: str) -> str:
    """The spec of the same data from any working directory: existing paths are made absolute, other names are kept."""
    if spec == DIGITS:
        return spec
    if spec.startswith(HUGGING_FACE):
        return HUGGING_FACE + os.path.abspath(spec.removeprefix(HUGGING_FACE))
    return os.path.abspath(spec) if os.path.lexists(spec) else spec


def _hold_out(source: Source, share: float) -> DataSplits:
    train, val = (Subset(source, indices) for indices in held_out(source, share))
    return DataSplits(train, val)


def _check(data: DataSplits, spec: str) -> None:
    if len(data.classes) < 2:
        raise DataError(f"{spec} has {len(data.classes)} class ({', '.join(data.classes)}); at least two are needed")
    for name, split in (("validation", data.val), ("test", data.test)):
        if split is not None and data.train.classes != split.classes:
            differ = sorted(set(data.train.classes) ^ set(split.classes))
            raise DataError(
                f"{spec}: training and {name} have different classes ({', '.join(differ[:5])}{', …' * (len(differ) > 5)}); "
                "give both the same class folders"
            )
    for purpose, split in (("train", data.train), ("validate", data.val), ("test", data.test)):
        if split is not None and not len(split):
            raise DataError(f"{spec}: there are no images to {purpose} with; add some, or hold out another share (--val-share)")
    missing = [data.classes[label] for label in sorted(set(range(len(data.classes))) - set(data.train.labels))]
    if missing:
        raise DataError(
            f"{spec}: no training images of {', '.join(missing[:5])}{', …' * (len(missing) > 5)}; add some or remove the class"
        )
