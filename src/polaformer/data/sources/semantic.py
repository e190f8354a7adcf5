"""Images with a class per pixel: a folder of images and one of masks per split.

# H, W height and width of an image
"""

import hashlib
import os
from collections.abc import Iterable
from copy import copy
from pathlib import Path

import numpy as np
from PIL.Image import Image

from polaformer.data.images import decode_values, read_file, read_image
from polaformer.data.sources.label_sets import CLASSES_FILE, LabelSet, find_label_set, pack_colours
from polaformer.data.sources.path_pairs import absolute_name
from polaformer.data.sources.semantic_folders import GIVE, Folders, folder_pairs, folders_below, holds_images, matched
from polaformer.data.sources.source import NamedSplits, SomeSplits, Splits, held_out
from polaformer.errors import DataError, ImageError, printable

MAX_VALUES = 10  # that a message names
NUM_NAMES = 10  # of masks, to tell what their values mean


class SemanticSource:
    """The images of a folder, and their masks, which have the same names up to the ending; raises DataError.

    classes: the names of the classes in the order of their labels; colours: one per class.
    """

    def __init__(self, folders: Folders, label_set: LabelSet) -> None:
        self.folders, self.label_set = folders, label_set
        self.classes, self.colours = label_set.classes, label_set.colours
        self._pairs = matched(folders)  # paths in their folders, as strings: there may be millions

    def __len__(self) -> int:
        return len(self._pairs)

    def name(self, index: int) -> str:
        """The path of the image in its folder."""
        return printable(self._pairs[index][0])

    def mask_name(self, index: int) -> str:
        """The path of the mask in its folder."""
        return printable(self._pairs[index][1])

    def read(self, index: int, channels: int) -> Image:
        """The image; raises ImageError."""
        return read_image(self._image(index), channels=channels)

    def label_map(self, index: int) -> np.ndarray:
        """The label of every pixel, (H, W) uint8; IGNORED where it does not count. Raises ImageError."""
        path = self._mask(index)
        stored = decode_values(read_file(path), printable(path))
        labels = self.label_set.labels(stored)
        if labels.min(initial=0) < 0:
            raise ImageError(_unknown(path, stored, labels < 0, self.label_set))
        return labels.astype(np.uint8)

    def pair(self, index: int, channels: int = 3) -> tuple[Image, np.ndarray]:
        """The image and its label map, of the same size; raises ImageError."""
        image, labels = self.read(index, channels), self.label_map(index)
        height, width = labels.shape
        if image.size != (width, height):
            upright = " when it is upright" * (image.size == (height, width))
            raise ImageError(
                f"{self._mask(index)} has {width}×{height} pixels, but its image {self._image(index)} has "
                f"{image.width}×{image.height}{upright}; give both the same size, and the image no rotation in its EXIF data"
            )
        return image, labels

    def content(self, index: int) -> bytes:
        """The bytes of the image as stored."""
        return read_file(self._image(index))

    def mask_content(self, index: int) -> bytes:
        """The bytes of the mask as stored."""
        return read_file(self._mask(index))

    def mask_bytes(self, index: int) -> int:
        """The size of the file of the mask; 0 if it is gone."""
        try:
            return os.stat(self._mask(index)).st_size
        except OSError:
            return 0

    def subset(self, indices: list[int]) -> "SemanticSource":
        """The images at `indices`, in that order."""
        part = copy(self)
        part._pairs = [self._pairs[index] for index in indices]
        return part

    def _image(self, index: int) -> Path:
        return self.folders.images / self._pairs[index][0]

    def _mask(self, index: int) -> Path:
        return self.folders.masks / self._pairs[index][1]


class SemanticSplits(Splits[SemanticSource]):
    """The splits of images with a class per pixel."""


def open_semantic(
    data: str, *, label_set: str | None = None, classes: tuple[str, ...] | None = None, val_share: float = 0.1
) -> SemanticSplits:
    """The data that `data` names; raises DataError.

    data: a folder with images/training and annotations/training, and the same for validation and possibly test (ADE20K), or
    with images and annotations alone; masks or labels may stand for annotations. Or a folder with train and trainannot, val
    and valannot, possibly test and testannot (CamVid of SegNet). Or "IMAGES:MASKS", a pair of folders; two or three pairs with
    commas between them are the splits. Training images without masks, and masks without image, are refused.
    label_set: what the values of masks mean, as for `find_label_set`. classes: those of a trained model, in the order of their
    labels; the data must have the same. val_share: the share of images to hold out if there is no validation split, always
    the same; with 0 all images are both.
    """
    folders = folder_pairs(data) or _folders_of(Path(data))
    if "train" not in folders:
        raise DataError(f"{data} has {', '.join(folders)}, and nothing to train on; {GIVE}")
    meaning = _label_set(data, folders, label_set, classes)
    train, *rest = (SemanticSource(one, meaning) for one in folders.values())
    others = dict(zip(list(folders)[1:], rest, strict=True))
    if "val" in others:
        return SemanticSplits(train, **others)
    found = _hold_out(train, val_share) if val_share else SemanticSplits(train, train)
    return SemanticSplits(found.train, found.val, **others)


def open_semantic_split(
    data: str,
    split: str,
    *,
    label_set: str | None = None,
    classes: tuple[str, ...] | None = None,
    val_share: float = 0.1,
) -> SemanticSource:
    """One split of the data, to evaluate on, which need not have a training split; raises DataError and SettingsError.

    A single pair of folders is taken whole, whatever the split. The other arguments are those of `open_semantic`.
    """
    pairs = folder_pairs(data)
    folders = pairs or _folders_of(Path(data))
    is_whole = split in folders and (split != "train" or "val" in folders)  # nothing is held out from it
    if len(pairs) == 1 or is_whole:
        return SemanticSource(folders["train" if len(pairs) == 1 else split], _label_set(data, folders, label_set, classes))
    return open_semantic(data, label_set=label_set, classes=classes, val_share=val_share).split(split)


def open_semantic_to_check(data: str, *, label_set: str | None = None, val_share: float = 0.0) -> NamedSplits[SemanticSource]:
    """All splits that there are, of which none need be for training; raises DataError.

    The arguments are those of `open_semantic`.
    """
    folders = folder_pairs(data) or _folders_of(Path(data))
    if "train" in folders:
        return open_semantic(data, label_set=label_set, val_share=val_share)
    meaning = _label_set(data, folders, label_set, None)
    return SomeSplits({split: SemanticSource(one, meaning) for split, one in folders.items()})


def looks_like_semantic(data: str) -> bool:
    """Whether it names images with masks, by the names of folders and files alone; quick, and never raises."""
    try:
        pairs = folder_pairs(data)
        if pairs:
            return all(one.images.is_dir() and holds_images(one.masks) for one in pairs.values())
        return any(holds_images(one.masks) for one in folders_below(Path(data)).values())
    except (OSError, ValueError):
        return False


def absolute(data: str) -> str:
    """The name of the same data from any working directory."""
    return absolute_name(data, folder_pairs(data).values())


def digest_of_pairs(source: SemanticSource) -> str:
    """A digest of the classes, of what values mean, and of the names of all images and the names and sizes of their masks.

    It reads no file, so that it is quick: `audit` compares what is in them.
    """
    meaning = (source.classes, *(sorted(labels.items()) for labels in (source.label_set.values, source.label_set.by_colour)))
    digest = hashlib.sha256(repr(meaning).encode())
    for index in range(len(source)):
        line = f"{source.name(index)}\0{source.mask_name(index)}\0{source.mask_bytes(index)}\n"
        digest.update(line.encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


def _folders_of(root: Path) -> dict[str, Folders]:
    try:
        os.listdir(root)
        folders = folders_below(root)
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        told = getattr(error, "strerror", None) or error
        raise DataError(f"{root} is not a folder of images and masks: {told}; {GIVE}") from error
    if not folders:
        raise DataError(f"{root} has no images with masks in a known layout; {GIVE}")
    return folders


def _label_set(data: str, folders: dict[str, Folders], option: str | None, classes: tuple[str, ...] | None) -> LabelSet:
    root = next(iter(folders.values())).masks.parent if folder_pairs(data) else Path(data)
    pairs = [] if option is not None else matched(next(iter(folders.values())))[:NUM_NAMES]
    found = find_label_set(option, root, [os.path.basename(mask) for _, mask in pairs])
    return found if classes is None or classes == found.classes else found.reordered(classes)


def _hold_out(source: SemanticSource, share: float) -> SemanticSplits:
    train, val = (source.subset(indices) for indices in held_out(source, share))
    for purpose, split in (("train", train), ("validate", val)):
        if not len(split):
            raise DataError(
                f"{source.folders.images}: there are no images to {purpose} with; add some, or a validation split, or hold out "
                "another share (--val-share)"
            )
    return SemanticSplits(train, val)


def _unknown(path: Path, stored: np.ndarray, is_unknown: np.ndarray, label_set: LabelSet) -> str:
    """The message about pixels whose values or colours mean nothing; the most frequent are named."""
    hint = f"correct it, or give a label set that has them (--label-set, or {CLASSES_FILE} in the data)"
    is_colour = stored.ndim == 3
    if is_colour and not label_set.by_colour:
        return f"{path} has RGB colours, but the label set has values alone; write colours into it, or save indices of classes"
    values, counts = np.unique((pack_colours(stored) if is_colour else stored)[is_unknown], return_counts=True)
    order = np.argsort(-counts, kind="stable")[:MAX_VALUES]
    named = [f"#{values[one]:06x}" if is_colour else str(values[one]) for one in order]
    numbers = ["1 pixel" if number == 1 else f"{number} pixels" for number in counts[order]]
    shown = [f"{name} ({number})" for name, number in zip(named, numbers, strict=True)]
    known = "" if is_colour else f", which knows {_spans(label_set.values)}"
    more = f" and {len(values) - MAX_VALUES} more" * (len(values) > MAX_VALUES)
    what = "colours" if is_colour else "values"
    return f"{path} has {what} that are not in the label set{known}: {', '.join(shown)}{more}; {hint}"


def _spans(values: Iterable[int]) -> str:
    """Numbers in short: 0 to 5, 7, 9 to 10."""
    ends: list[list[int]] = []
    for value in sorted(values):
        if ends and ends[-1][1] == value - 1:
            ends[-1][1] = value
        else:
            ends.append([value, value])
    spans = [str(first) if first == last else f"{first} to {last}" for first, last in ends]
    return ", ".join(spans[:MAX_VALUES]) + ", …" * (len(spans) > MAX_VALUES)
