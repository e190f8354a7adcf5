"""Images with annotated objects in the format of COCO: a JSON file and a folder of images per split.

Crowd regions stay among the annotations, since evaluation ignores detections in them; training leaves them out.
"""

import hashlib
import os
import re
from collections import Counter
from copy import copy
from pathlib import Path

from PIL.Image import Image

from polaformer.data.images import read_file, read_image
from polaformer.data.sources.coco_annotations import Annotation as Annotation
from polaformer.data.sources.coco_file import read_coco
from polaformer.data.sources.path_pairs import absolute_name, named_pairs
from polaformer.data.sources.source import NamedSplits, SomeSplits, Splits, held_out
from polaformer.errors import DataError, ImageError, printable

NUM_TRIED = 20  # images of a file, to see whether they are in the folder
ANNOTATIONS = "annotations"  # the folder of the JSON files
_FILE = re.compile(r"instances_((train|val|test)(?:\d{4})?)\.json")
_PAIR = re.compile(r"(.+?\.json):(.+)", re.DOTALL)
_GIVE = (
    f"give a folder with {ANNOTATIONS}/instances_train2017.json and train2017, and the same for val2017 (or without the year), "
    "or FILE.json:IMAGES, or two of these with a comma between them"
)


class CocoSource:
    """The images that an annotation file lists, and the objects on them; raises DataError.

    classes: the names of the classes in the order of their labels; the file must have the same. By default the categories of
    the file, in the order of their ids. category_ids: the ids of the classes in the file. sizes: (height, width) as the file
    states them. repairs: what was repaired or skipped, one by one; `repaired` counts them. digest: SHA-256 of the file.
    """

    def __init__(self, file: Path, folder: Path, classes: tuple[str, ...] | None = None) -> None:
        def labels(categories: dict[int, str]) -> dict[int, int]:
            names = tuple(categories.values()) if classes is None else classes
            _check_classes(file, set(categories.values()), set(names))
            return {number: names.index(name) for number, name in categories.items()}

        found = read_coco(file, folder, labels)
        self.file, self.folder = file, folder
        self.classes = tuple(found.categories.values()) if classes is None else classes
        by_name = {name: number for number, name in found.categories.items()}
        self.category_ids = tuple(by_name[name] for name in self.classes)
        self.sizes, self.repairs, self.digest = found.sizes, found.repairs, found.digest
        self._annotations = found.annotations
        self._image_ids, self._names = found.image_ids, found.names  # file names, as strings: there may be millions
        self._ranges = list(zip(found.ends[:-1], found.ends[1:], strict=True))
        self.has_masks = bool(found.annotations.with_masks.any())

    def __len__(self) -> int:
        return len(self._names)

    @property
    def has_objects(self) -> bool:
        """Whether there is an object on any image, crowd regions aside."""
        return any(not one.crowd for index in range(len(self)) for one in self.annotations(index))

    @property
    def repaired(self) -> Counter[str]:
        """How often something was repaired or skipped, by a short description."""
        return Counter(repair.what for repair in self.repairs)

    def name(self, index: int) -> str:
        """The file name of the image, as in the annotation file."""
        return printable(self._names[index])

    def image_id(self, index: int) -> int:
        """The id of the image in the annotation file."""
        return self._image_ids[index]

    def read(self, index: int, channels: int) -> Image:
        """The image; raises ImageError, also if it has another size than the annotation file states."""
        path = self.folder / self._names[index]
        image = read_image(path, channels=channels)
        height, width = self.sizes[index]
        if image.size != (width, height):
            rotated = image.size == (height, width)
            hint = "annotate it as it is shown, or remove the rotation from its EXIF data" if rotated else "correct either"
            shown = f"{path} has {image.width}×{image.height} pixels{' when it is upright' * rotated}"
            raise ImageError(f"{shown}, but {width}×{height} in {self.file}; {hint}")
        return image

    def content(self, index: int) -> bytes:
        """The bytes of the file."""
        return read_file(self.folder / self._names[index])

    def annotations(self, index: int) -> list[Annotation]:
        """The objects on an image, crowds among them, possibly none."""
        return [self._annotations[one] for one in range(*self._ranges[index])]

    def subset(self, indices: list[int]) -> "CocoSource":
        """The images at `indices`, in that order, with what was repaired on them; annotations are shared."""
        part = copy(self)
        part.sizes = [self.sizes[index] for index in indices]
        part._names = [self._names[index] for index in indices]
        part._image_ids = [self._image_ids[index] for index in indices]
        part._ranges = [self._ranges[index] for index in indices]
        kept = set(part._image_ids)
        part.repairs = [repair for repair in self.repairs if repair.image in kept]
        return part


class DetectionSplits(Splits[CocoSource]):
    """The splits of images with annotated objects."""


def open_coco(data: str, *, classes: tuple[str, ...] | None = None, val_share: float = 0.1) -> DetectionSplits:
    """The data that `data` names; raises DataError.

    data: a folder with annotations/instances_train2017.json and train2017 (or images/train2017), and the same for val2017 and
    possibly test2017; the year may be another or missing. Or "FILE.json:IMAGES", a pair of an annotation file and the folder
    of its images; two or three pairs with commas between them are the splits.
    classes: the class names in the order of their labels, such as those of a trained model; by default the training split's.
    val_share: the share of images to hold out if there is no validation split, always the same; with 0 all images are both.
    """
    files = _files_of(data)
    train = _opened(*files["train"], classes)
    others = {split: _opened(*files[split], train.classes) for split in ("val", "test") if split in files}
    if "val" in others:
        return DetectionSplits(train, **others)
    found = _hold_out(train, val_share) if val_share else DetectionSplits(train, train, **others)
    return DetectionSplits(found.train, found.val, **others)


def open_coco_split(data: str, split: str, *, classes: tuple[str, ...], val_share: float = 0.1) -> CocoSource:
    """One split of the data, to evaluate on, which need not have a training split; raises DataError and SettingsError.

    A single pair of file and folder is taken whole, whatever the split. The other arguments are those of `open_coco`.
    """
    files = _files_of(data, for_training=False)
    if len(_pairs(data)) == 1:
        return _opened(*files["train"], classes)
    if split in files:
        return _opened(*files[split], classes)
    return open_coco(data, classes=classes, val_share=val_share).split(split)


def open_coco_to_check(data: str, *, val_share: float = 0.0) -> NamedSplits[CocoSource]:
    """All splits that there are, of which none need be for training; raises DataError.

    The arguments are those of `open_coco`.
    """
    files = _files_of(data, for_training=False)
    if "train" in files or not files:
        return open_coco(data, val_share=val_share)
    found: dict[str, CocoSource] = {}
    for split, one in files.items():
        found[split] = _opened(*one, next(iter(found.values())).classes if found else None)
    return SomeSplits(found)


def looks_like_coco(data: str) -> bool:
    """Whether it names data in the format of COCO, by names alone, as FILE.json:IMAGES does; quick, and never raises."""
    try:
        return bool(_pairs(data)) or data.endswith(".json") or bool(_annotation_files(Path(data)))
    except (OSError, ValueError):
        return False


def absolute(data: str) -> str:
    """The name of the same data from any working directory."""
    return absolute_name(data, _pairs(data).values())


def digest_of_annotations(source: CocoSource) -> str:
    """A digest of the annotation file, and of the class and image names, in order."""
    names = (source.name(index) for index in range(len(source)))
    return hashlib.sha256("\n".join([source.digest, *source.classes, *names]).encode("utf-8", "backslashreplace")).hexdigest()


def _pairs(data: str) -> dict[str, tuple[Path, Path]]:
    """Annotation file and image folder by split, if the data are named by pairs of them; else none."""
    return named_pairs(data, _PAIR)


def _files_of(data: str, *, for_training: bool = True) -> dict[str, tuple[Path, Path]]:
    """Annotation file and image folder by split; raises DataError."""
    pairs = _pairs(data)
    if missing := [file for file, _ in pairs.values() if not os.path.lexists(file)]:
        raise DataError(f"there is no annotation file {missing[0]}; {_GIVE}")
    return pairs or _files_of_folder(Path(data), for_training=for_training)


def _files_of_folder(root: Path, *, for_training: bool = True) -> dict[str, tuple[Path, Path]]:
    """Annotation file and image folder by split, in COCO's layout."""
    try:
        names = _annotation_files(root)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{root} is not a folder in the layout of COCO: {getattr(error, 'strerror', error)}; {_GIVE}"
        ) from error
    if "train" not in names and for_training:
        there = ", ".join(f"instances_{name}.json" for some in names.values() for name in some) or "no instances_….json"
        raise DataError(f"{root / ANNOTATIONS} has {there}, and nothing to train on; {_GIVE}")
    found = {}
    for split, (name, *others) in names.items():
        if others:
            raise DataError(f"{root / ANNOTATIONS} has {name} and {others[0]} for {split}; name one as FILE.json:IMAGES")
        folders = [root / name, root / "images" / name, root / split, root / "images" / split, root / "images"]
        folder = next((one for one in folders if one.is_dir()), None)
        if folder is None:
            raise DataError(f"there are no images for instances_{name}.json: no folder {folders[0]} or {folders[1]}; add one")
        found[split] = (root / ANNOTATIONS / f"instances_{name}.json", folder)
    return found


def _annotation_files(root: Path) -> dict[str, list[str]]:
    """The names of what is annotated, such as val2017, by split; raises OSError or ValueError."""
    found: dict[str, list[str]] = {}
    for name in sorted(os.listdir(root / ANNOTATIONS)):
        match = _FILE.fullmatch(name)
        if match is not None:
            found.setdefault(match[2], []).append(match[1])
    return found


def _opened(file: Path, folder: Path, classes: tuple[str, ...] | None) -> CocoSource:
    """The images of a file; raises DataError if the folder has none of the first ones: it is another one then."""
    source = CocoSource(file, folder, classes)
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder} with the images of {file}; {_GIVE}")
    first = source._names[:NUM_TRIED]
    if first and not any((folder / name).exists() for name in first):
        raise DataError(f"{folder} has none of the first {len(first)} images of {file}, such as {first[0]}; give their folder")
    return source


def _hold_out(source: CocoSource, share: float) -> DetectionSplits:
    train, val = (source.subset(indices) for indices in held_out(source, share))
    train.repairs += [repair for repair in source.repairs if repair.image is None]
    for purpose, split in (("train", train), ("validate", val)):
        if not len(split):
            raise DataError(
                f"{source.file}: there are no images to {purpose} with; add some, or name a second pair for validation"
            )
    return DetectionSplits(train, val)


def _check_classes(file: Path, found: set[str], wanted: set[str]) -> None:
    if found == wanted:
        return
    differ = [f"{verb} {_listed(names)}" for verb, names in (("lacks", wanted - found), ("adds", found - wanted)) if names]
    raise DataError(f"{file} has other categories: it {' and '.join(differ)}; all splits, and the model, need the same")


def _listed(names: set[str]) -> str:
    return ", ".join(map(repr, sorted(names)[:5])) + ", …" * (len(names) > 5)
