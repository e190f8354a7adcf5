"""Reads an annotation file in COCO's JSON format. What is wrong in it is repaired or skipped, and listed, or refused.

A mistake in an object costs that object at most (`coco_objects.py`). Mistakes that put the whole file in doubt, such as an
unknown category or two images with one id, are refused.
"""

import gc
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from reprlib import repr as short
from typing import Any, NamedTuple

from polaformer.data.images import MAX_PIXELS, read_image
from polaformer.data.sources.coco_annotations import Annotation, PackedAnnotations
from polaformer.data.sources.coco_objects import ObjectRules
from polaformer.errors import DataError, ImageError, printable
from polaformer.ops.grid import Grid
from polaformer.regular_files import read_regular, reason

MAX_BYTES = 2**31
MAX_REFUSALS = 10  # in one message
NO_IMAGE = "annotation of an image that is not listed; skipped"
NO_MASK = "no segmentation; not used where masks are learned"


class Repair(NamedTuple):
    """What was repaired or skipped, where in the file, and the id of the image if it is known."""

    what: str
    where: str
    image: int | None


class CocoFile(NamedTuple):
    """The checked contents of an annotation file. The annotations of image i are those from ends[i] to ends[i + 1].

    categories: names by id, in the order of ids. digest: SHA-256 of the file.
    """

    categories: dict[int, str]
    image_ids: list[int]
    names: list[str]
    sizes: list[Grid]
    annotations: PackedAnnotations
    ends: list[int]
    repairs: list[Repair]
    digest: str


def read_coco(path: Path, folder: Path, labels: Callable[[dict[int, str]], dict[int, int]]) -> CocoFile:
    """The contents of an annotation file whose images are in `folder`; raises DataError, which lists what is refused.

    labels: called with the categories, gives the class index of each id.
    """
    with _without_garbage_collection():
        return _read(path, folder, labels)


def _read(path: Path, folder: Path, labels: Callable[[dict[int, str]], dict[int, int]]) -> CocoFile:
    try:
        content = read_regular(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {reason(error)}; check the path, or give a smaller file") from error
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not complete, valid JSON: {error}; fetch or export it again") from error
    return _Parser(path, folder).contents(document, labels, hashlib.sha256(content).hexdigest())


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """While millions of objects are created and none is garbage, the collector would take a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Parser:
    """Collects repairs and refusals while it reads."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.folder = path, folder
        self.repairs: list[Repair] = []
        self.refusals: list[str] = []

    def contents(self, document: Any, labels: Callable[[dict[int, str]], dict[int, int]], digest: str) -> CocoFile:
        lists = self._lists(document)
        categories = self._categories(lists["categories"])
        sizes, names = self._images(lists["images"])
        self._raise_refusals()
        by_image = self._annotations(lists["annotations"], labels(categories), sizes)
        self._raise_refusals()
        ends = [0]
        for some in by_image.values():
            ends.append(ends[-1] + len(some))
        packed = PackedAnnotations([one for some in by_image.values() for one in some])
        if not packed.with_masks.any():  # a file of boxes
            self.repairs = [one for one in self.repairs if one.what != NO_MASK]
        return CocoFile(categories, list(sizes), names, list(sizes.values()), packed, ends, self.repairs, digest)

    def _lists(self, document: Any) -> dict[str, list[Any]]:
        """The three lists of the file."""
        if not isinstance(document, dict):
            raise DataError(f"{self.path} holds a {type(document).__name__}; COCO annotations are an object with lists")
        for key in ("images", "annotations", "categories"):
            if key not in document:
                raise DataError(f"{self.path} has no {key!r}; COCO annotations have images, annotations and categories")
            if not isinstance(document[key], list):
                self.refusals.append(f"{key!r} is a {type(document[key]).__name__}; make it a list")
            elif not document[key] and key != "annotations":
                self.refusals.append(f"{key!r} is empty; add some")
        self._raise_refusals()
        return document

    def _categories(self, records: list[Any]) -> dict[int, str]:
        """Names by id, in the order of ids."""
        found: dict[int, str] = {}
        for index, record in enumerate(records):
            where, number, name = f"categories[{index}]", _get(record, "id"), _get(record, "name")
            if type(number) is not int:
                self.refusals.append(f"{where} has id {short(number)}; give an integer")
            elif not isinstance(name, str) or not name.strip():
                self.refusals.append(f"{where} has name {short(name)}; give a string")
            elif number in found:
                self.refusals.append(f"{where}: id {number} is already used by {found[number]!r}; ids must be unique")
            elif printable(name) in found.values():
                self.refusals.append(f"{where}: duplicate category name {name!r}; names must be unique")
            else:
                found[number] = printable(name)
        return dict(sorted(found.items()))

    def _images(self, records: list[Any]) -> tuple[dict[int, Grid], list[str]]:
        """Sizes by image id, and file names."""
        sizes: dict[int, Grid] = {}
        owners: dict[str, int] = {}  # file name → position in the file
        positions: dict[int, int] = {}
        for index, record in enumerate(records):
            number, name = _get(record, "id"), _get(record, "file_name")
            problem = f"has id {short(number)}; give an integer" if type(number) is not int else _name_problem(name)
            if problem is not None:
                self.refusals.append(f"images[{index}] {problem}")
                continue
            name = str(PurePosixPath(name))  # one name per file
            if number in positions and record == records[positions[number]]:
                self._repair(f"image {number}", number, "image listed twice; second entry skipped")
            elif number in positions:
                other = f"images[{positions[number]}] and images[{index}]"
                self.refusals.append(f"{other} both have id {number}; ids must be unique")
            elif name in owners:
                other = f"images[{owners[name]}] and images[{index}]"
                self.refusals.append(f"{other} are both {short(name)}; remove one, and move its annotations to the other")
            else:
                positions[number] = owners[name] = index
                sizes[number] = self._size(record, number, name)
        return sizes, list(owners)

    def _size(self, record: dict[str, Any], number: int, name: str) -> Grid:
        """The stated size, or that of the file."""
        height, width = record.get("height"), record.get("width")
        if type(height) is int and type(width) is int and min(height, width) > 0 and height * width <= MAX_PIXELS:
            return height, width
        try:
            image = read_image(self.folder / name)
        except ImageError as error:
            self.refusals.append(f"image {number} has height {short(height)} and width {short(width)}, and {error}")
            return 1, 1
        self._repair(f"image {number}", number, "image without valid height and width; taken from its file")
        return image.height, image.width

    def _annotations(self, records: list[Any], labels: dict[int, int], sizes: dict[int, Grid]) -> dict[int, list[Annotation]]:
        """The annotations of every image, in the order of the file, with ids of their own."""
        by_image: dict[int, list[Annotation]] = {number: [] for number in sizes}
        positions: dict[int, int] = {}  # id → position in the file
        newest = max((one for one in (_get(record, "id") for record in records) if _is_id(one)), default=0)
        for index, record in enumerate(records):
            number = _get(record, "id")
            where = f"annotation {number}" if _is_id(number) else f"annotations[{index}]"
            if not self._belongs(record, where, labels, sizes):
                continue
            note = partial(self._repair, where, record["image_id"])
            if _is_id(number) and number in positions and record == records[positions[number]]:
                note("annotation listed twice; second entry skipped")
                continue
            if not _is_id(number) or number in positions:
                note("annotation without a unique positive integer id; given a new id")
                newest = number = newest + 1
            positions[number] = index
            found = ObjectRules(sizes[record["image_id"]], note).annotation(record, labels[record["category_id"]], number)
            if found is not None:
                by_image[record["image_id"]].append(found)
                if found.segmentation is None:
                    note(NO_MASK)
        if records and sum(repair.what == NO_IMAGE for repair in self.repairs) == len(records):
            self.refusals.append(
                f"none of its {len(records)} annotations refers to one of its images; do they belong to another file?"
            )
        return by_image

    def _belongs(self, record: Any, where: str, labels: dict[int, int], sizes: dict[int, Grid]) -> bool:
        """Whether it is an annotation of one of the images, with one of the categories."""
        image, category = _get(record, "image_id"), _get(record, "category_id")
        if not isinstance(record, dict):
            self.refusals.append(f"{where} is a {type(record).__name__}; give an object")
        elif type(image) is not int or image not in sizes:
            self._repair(where, None, NO_IMAGE)
        elif type(category) is not int or category not in labels:
            known = f"the categories have ids {short(list(labels))}"
            self.refusals.append(f"{where} has category_id {short(category)}, but {known}; add the category or remove it")
        else:
            return True
        return False

    def _repair(self, where: str, image: int | None, what: str) -> None:
        self.repairs.append(Repair(what, where, image))

    def _raise_refusals(self) -> None:
        if not self.refusals:
            return
        more = len(self.refusals) - MAX_REFUSALS
        shown = [f"{self.path}: {one}" for one in self.refusals[:MAX_REFUSALS]]
        raise DataError(*shown, *([f"… and {more} more problems like these"] if more > 0 else []))


def _get(record: Any, key: str) -> Any:
    return record.get(key) if isinstance(record, dict) else None


def _is_id(value: Any) -> bool:
    """Whether it can identify an annotation: evaluation takes 0 for none, and its numbers have 53 bits."""
    return type(value) is int and 0 < value < 2**53


def _name_problem(name: Any) -> str | None:
    """What is wrong with a file name, which must stay inside its folder."""
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        return f"has file_name {short(name)}; give the path of its file below the image folder"
    parts: Sequence[str] = (*PurePosixPath(name).parts, *PureWindowsPath(name).parts)
    if ".." in parts or PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor:
        return f"has file_name {short(name)}, which leaves the image folder; give a path below it, without .."
    return None
