"""Where the images and masks of each split are, and which mask belongs to which image."""

import os
import re
from pathlib import Path
from typing import NamedTuple

from polaformer.data.images import EXTENSIONS
from polaformer.data.sources.folders import images_below
from polaformer.data.sources.path_pairs import named_pairs
from polaformer.errors import DataError

SPLITS = {"train": ("training", "train"), "val": ("validation", "val", "valid"), "test": ("test", "testing")}
IMAGES, MASKS, ANNOTATED = "images", ("annotations", "masks", "labels"), "annot"
MAX_NAMED = 10
GIVE = (
    f"give a folder with {IMAGES}/training and annotations/training, and the same for validation (or masks or labels, or all "
    f"in {IMAGES} and annotations), or one with train and train{ANNOTATED}, and the same for val; or IMAGES:MASKS, or two of "
    "these with a comma between them"
)
_PAIR = re.compile(r"([^:]+):([^:]+)")


class Folders(NamedTuple):
    """The folders of the images and of their masks."""

    images: Path
    masks: Path


def folder_pairs(data: str) -> dict[str, Folders]:
    """The folders by split, if the data are named by pairs of them; else none."""
    return {split: Folders(*pair) for split, pair in named_pairs(data, _PAIR).items()}


def folders_below(root: Path) -> dict[str, Folders]:
    """The folders by split in ADE20K's layout or in SegNet's, found by their names; none in any other; raises DataError."""
    beside = {
        split: Folders(root / name, root / f"{name}{ANNOTATED}") for split, name in _split_folders(root, ANNOTATED).items()
    }
    if beside:
        return {split: found for split, found in beside.items() if _required(split, found)}
    masks = next((root / name for name in MASKS if holds_images(root / name)), None)
    if masks is None or not (root / IMAGES).is_dir():
        return {}
    images, masked = _split_folders(root / IMAGES), _split_folders(masks)
    by_split = {
        split: Folders(root / IMAGES / images.get(split, names[0]), masks / masked.get(split, names[0]))
        for split, names in SPLITS.items()
        if split in images or split in masked
    }
    found = {split: one for split, one in by_split.items() if _required(split, one)}
    return found or {"train": Folders(root / IMAGES, masks)}


def holds_images(folder: Path) -> bool:
    """Whether there is a file with the ending of an image in a folder, at any depth."""
    return folder.is_dir() and bool(images_below(folder))


def matched(folders: Folders) -> list[tuple[str, str]]:
    """The image and the mask of each pair, as sorted paths in their folders; raises DataError for those without the other."""
    if folders.images.resolve() == folders.masks.resolve():
        raise DataError(f"{folders.images} is both the folder of images and that of masks; put the masks into their own")
    images, masks = (_by_stem(folder) for folder in folders)
    problems = [
        _alone("image", "no mask", folders.images, [images[stem] for stem in images.keys() - masks.keys()], folders.masks),
        _alone("mask", "no image", folders.masks, [masks[stem] for stem in masks.keys() - images.keys()], folders.images),
    ]
    if any(problems):
        raise DataError(*filter(None, problems))
    if not images:
        raise DataError(f"{folders.images} has no images; {', '.join(EXTENSIONS)} are read")
    return [(images[stem], masks[stem]) for stem in sorted(images, key=lambda stem: os.fsencode(images[stem]))]


def _split_folders(root: Path, ending: str = "") -> dict[str, str]:
    """The name of the folder of each split, without the ending that it has."""
    found = {split: [name for name in names if (root / f"{name}{ending}").is_dir()] for split, names in SPLITS.items()}
    return {split: names[0] for split, names in found.items() if names}


def _required(split: str, found: Folders) -> bool:
    """Whether a split is there; a test split may lack its masks, and is none then. Raises DataError if half of one is."""
    missing = [folder for folder in found if not folder.is_dir()]
    if missing and not (split == "test" and missing == [found.masks]):
        there = found.masks if missing == [found.images] else found.images
        raise DataError(f"there is {there}, but no folder {missing[0]} for its {split} split; add it, or remove the other")
    return not missing


def _by_stem(folder: Path) -> dict[str, str]:
    """The files of a folder by their paths without endings; raises DataError if two differ in their ending alone."""
    found: dict[str, str] = {}
    for name in images_below(folder):
        other = found.setdefault(os.path.splitext(name)[0], name)
        if other != name:
            raise DataError(f"{folder} has both {other} and {name}, which would be one pair; rename or remove one")
    return found


def _alone(what: str, lacks: str, folder: Path, names: list[str], others: Path) -> str:
    """The message about files without counterpart, or "" if there are none."""
    shown = ", ".join(sorted(names)[:MAX_NAMED]) + f" and {len(names) - MAX_NAMED} more" * (len(names) > MAX_NAMED)
    hint = "an image and its mask have the same name up to the ending; add what is missing, or remove the others"
    number = f"1 {what} has" if len(names) == 1 else f"{len(names)} {what}s have"
    return f"{folder}: {number} {lacks} in {others}: {shown}; {hint}" if names else ""
