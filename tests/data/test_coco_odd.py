"""Row D4: odd annotations are repaired or skipped and counted, or refused; a bad image is one error when it is read."""

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from coco_files import HEIGHT, WIDTH, annotated, categories, crowd, document, entry, runs, write_image, write_json
from pictures import refused
from polaformer.data import masks
from polaformer.data.sources import coco_file
from polaformer.data.sources.coco import Annotation, CocoSource
from polaformer.data.sources.coco_file import NO_MASK
from polaformer.errors import DataError, ImageError

NAN, INFINITE = float("nan"), float("inf")
BOX = (10.0, 5.0, 30.0, 20.0)  # of `annotated`
TRIANGLE = [10, 5, 30, 5, 30, 20]
FULL = {"size": [HEIGHT, WIDTH], "counts": [0, HEIGHT * WIDTH]}
LOST = [NO_MASK]


def source_of(root: Path, annotations: list[Any], **changes: Any) -> CocoSource:
    content = document([entry(1), entry(2)], annotations, **changes)
    return CocoSource(write_json(root / "file.json", content), root / "images")


def square(left: int, top: int, side: int) -> np.ndarray:
    mask = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
    mask[top : top + side, left : left + side] = 1
    return mask


# What is odd → the changes to an annotation, how what is read differs from a sound one (None: skipped), and what is counted.
Odd = tuple[dict[str, Any], dict[str, Any] | None, list[str]]
OBJECTS: dict[str, Odd] = {
    "a sound one": ({}, {}, []),
    "numbers that are whole, or not": ({"bbox": [10.0, 5, 20.0, 15], "area": 300}, {}, []),
    "a box over the edge by rounding": ({"bbox": [40.01, 5, 20, 15]}, {"box": (40.01, 5.0, 60.01, 20.0)}, []),
    "a box partly outside": (
        {"bbox": [-10, 5, 100, 15]},
        {"box": (0.0, 5.0, 60.0, 20.0)},
        ["box partly outside the image; clipped"],
    ),
    "a box outside": ({"bbox": [70, 5, 20, 15]}, {}, ["box outside the image; taken from the segmentation"]),
    "a box outside, nothing else": (
        {"bbox": [70, 5, 20, 15], "segmentation": None},
        None,
        ["box outside the image; skipped"],
    ),
    "a box that touches the edge from outside": (
        {"bbox": [60, 5, 0.5, 15], "segmentation": None},
        None,
        ["box outside the image; skipped"],
    ),
    "a negative width": ({"bbox": [30, 5, -20, 15]}, {}, ["box with negative size; taken from the segmentation"]),
    "a negative height, nothing else": (
        {"bbox": [30, 5, 20, -15], "segmentation": []},
        None,
        ["box with negative size; skipped"],
    ),
    "width zero": ({"bbox": [10, 5, 0, 15]}, {}, ["box of size zero; taken from the segmentation"]),
    "height zero, nothing else": (
        {"bbox": [10, 5, 20, 0.0], "segmentation": None},
        None,
        ["box of size zero; skipped"],
    ),
    "NaN": ({"bbox": [10, NAN, 20, 15]}, {}, ["box not finite; taken from the segmentation"]),
    "infinity, nothing else": ({"bbox": [10, 5, INFINITE, 15], "segmentation": None}, None, ["box not finite; skipped"]),
    "more than a float": ({"bbox": [10**400, 5, 20, 15], "segmentation": None}, None, ["box not finite; skipped"]),
    "three numbers": ({"bbox": [10, 5, 20]}, {}, ["box without four entries; taken from the segmentation"]),
    "five numbers, nothing else": (
        {"bbox": [10, 5, 20, 15, 1], "segmentation": None},
        None,
        ["box without four entries; skipped"],
    ),
    "no list": ({"bbox": "10 5 20 15"}, {}, ["box without four entries; taken from the segmentation"]),
    "numbers as strings": ({"bbox": ["10", "5.0", "2e1", 15]}, {}, ["box with numbers as strings; converted"]),
    "text": ({"bbox": ["10", "5", "wide", 15]}, {}, ["box with entries that are not numbers; taken from the segmentation"]),
    "true, nothing else": (
        {"bbox": [10, 5, True, 15], "segmentation": None},
        None,
        ["box with entries that are not numbers; skipped"],
    ),
    "no box": ({"bbox": None}, {}, ["box missing; taken from the segmentation"]),
    "no box but run lengths": (
        {"bbox": None, "segmentation": {"size": [HEIGHT, WIDTH], "counts": runs(square(7, 9, 4))}},
        {"box": (7.0, 9.0, 11.0, 13.0), "segmentation": dict},
        ["box missing; taken from the segmentation"],
    ),
    "no box, empty run lengths": (
        {"bbox": None, "segmentation": {"size": [HEIGHT, WIDTH], "counts": [HEIGHT * WIDTH]}},
        None,
        ["box missing; skipped"],
    ),
    "neither box nor segmentation": ({"bbox": None, "segmentation": None}, None, ["box missing; skipped"]),
    "no area": ({"area": None}, {}, ["area missing or not positive; computed"]),
    "no area, triangle": (
        {"area": None, "segmentation": [TRIANGLE]},
        {"area": 150.0, "segmentation": 1},
        ["area missing or not positive; computed"],
    ),
    "no area, two polygons": (
        {"area": None, "segmentation": [TRIANGLE, [10, 5, 20, 5, 10, 10]]},
        {"area": 175.0, "segmentation": 2},
        ["area missing or not positive; computed"],
    ),
    "no area, run lengths": (
        {"area": None, "segmentation": {"size": [HEIGHT, WIDTH], "counts": runs(square(7, 9, 4))}},
        {"area": 16.0, "segmentation": dict},
        ["area missing or not positive; computed"],
    ),
    "no area, no segmentation": (
        {"area": None, "segmentation": None},
        {"segmentation": None},
        ["area missing or not positive; computed", *LOST],
    ),
    "area zero": ({"area": 0}, {}, ["area missing or not positive; computed"]),
    "a negative area": ({"area": -1}, {}, ["area missing or not positive; computed"]),
    "NaN as area": ({"area": NAN}, {}, ["area missing or not positive; computed"]),
    "text as area": ({"area": "300"}, {}, ["area missing or not positive; computed"]),
    "no iscrowd": ({"iscrowd": None}, {}, ["iscrowd missing; taken as 0"]),
    "iscrowd false": ({"iscrowd": False}, {}, ["iscrowd true or false; taken as 1 or 0"]),
    "iscrowd true": ({"iscrowd": True}, {"crowd": True}, ["iscrowd true or false; taken as 1 or 0"]),
    "iscrowd 1": ({"iscrowd": 1}, {"crowd": True}, []),
    "iscrowd 2": ({"iscrowd": 2}, None, ["iscrowd neither 0 nor 1; skipped"]),
    "iscrowd as a string": ({"iscrowd": "0"}, None, ["iscrowd neither 0 nor 1; skipped"]),
    "no segmentation": ({"segmentation": None}, {"segmentation": None}, LOST),
    "no polygons": ({"segmentation": []}, {"segmentation": None}, LOST),
    "an empty polygon": (
        {"segmentation": [[]]},
        {"segmentation": None},
        ["polygon with fewer than 3 points; dropped", *LOST],
    ),
    "two points": (
        {"segmentation": [[10, 5, 30, 20]]},  # pycocotools would take them for a box
        {"segmentation": None},
        ["polygon with fewer than 3 points; dropped", *LOST],
    ),
    "two points and a triangle": (
        {"segmentation": [[10, 5, 30, 20], TRIANGLE]},
        {"segmentation": 1},
        ["polygon with fewer than 3 points; dropped"],
    ),
    "an odd number of coordinates": (
        {"segmentation": [[*TRIANGLE, 7]]},
        {"segmentation": None},
        ["polygon with an odd number of coordinates; dropped", *LOST],
    ),
    "a polygon outside": (
        {"segmentation": [[70, 5, 90, 5, 90, 20], TRIANGLE]},
        {"segmentation": 1},
        ["polygon outside the image; dropped"],
    ),
    "a polygon partly outside": ({"segmentation": [[10, -5, 70, 5, 30, 20]]}, {"segmentation": 1}, []),
    "a polygon far outside": (
        {"segmentation": [[10, 5, 1e9, 5, 30, 20], TRIANGLE]},
        {"segmentation": 1},
        ["polygon far outside the image; dropped"],
    ),
    "NaN in a polygon": (
        {"segmentation": [[10, 5, NAN, 5, 30, 20], TRIANGLE]},
        {"segmentation": 1},
        ["polygon not finite; dropped"],
    ),
    "text in a polygon": (
        {"segmentation": [["10", 5, 30, 5, 30, 20], TRIANGLE]},
        {"segmentation": 1},
        ["polygon not a list of numbers; dropped"],
    ),
    "a number among polygons": (
        {"segmentation": [TRIANGLE, 5]},
        {"segmentation": 1},
        ["polygon not a list of numbers; dropped"],
    ),
    "a bare polygon": (
        {"segmentation": TRIANGLE},
        {"segmentation": 1},
        ["polygon without a list around it; taken as the only one"],
    ),
    "several polygons": ({"segmentation": [TRIANGLE, [1, 1, 5, 1, 5, 9, 1, 9]]}, {"segmentation": 2}, []),
    "text as segmentation": (
        {"segmentation": "polygon"},
        {"segmentation": None},
        ["segmentation neither polygons nor run lengths; dropped", *LOST],
    ),
    "uncompressed run lengths": ({"segmentation": FULL}, {"segmentation": dict}, []),
    "compressed run lengths": ({"segmentation": {"size": [HEIGHT, WIDTH], "counts": "0P[2"}}, {"segmentation": dict}, []),
    "run lengths of a crowd": ({"segmentation": FULL, "iscrowd": 1}, {"segmentation": dict, "crowd": True}, []),
    "run lengths of another size": (
        {"segmentation": {"size": [WIDTH, HEIGHT], "counts": [0, HEIGHT * WIDTH]}},
        {"segmentation": None},
        ["run lengths of another size than the image; dropped", *LOST],
    ),
    "run lengths without a size": (
        {"segmentation": {"counts": [0, HEIGHT * WIDTH]}},
        {"segmentation": None},
        ["run lengths of another size than the image; dropped", *LOST],
    ),
}
for _name, _counts in {
    "too few pixels": [0, HEIGHT * WIDTH - 1],
    "too many pixels": [0, HEIGHT * WIDTH + 1],
    "a negative run": [-1, HEIGHT * WIDTH + 1],
    "a fraction": [0.5, HEIGHT * WIDTH - 0.5],
    "no runs": [],
    "null": None,
    "text that ends in a number": "0P[",
    "characters that are no digits": "0 P[2",
    "letters beyond ASCII": "0é2",
    "an empty text": "",
    "text for too many pixels": "0P[2P[2",
    "a number without end": "0" + "o" * 100 + "0",
}.items():
    OBJECTS[f"run lengths: {_name}"] = (
        {"segmentation": {"size": [HEIGHT, WIDTH], "counts": _counts}},
        {"segmentation": None},
        ["run lengths that do not fill the image; dropped", *LOST],
    )


def facts(one: Annotation) -> dict[str, Any]:
    """Of a segmentation the number of polygons, or the type."""
    found = {key: getattr(one, key) for key in ("box", "label", "area", "crowd", "segmentation", "id")}
    segmentation = one.segmentation
    return found | {
        "segmentation": len(segmentation) if isinstance(segmentation, tuple) else segmentation and type(segmentation)
    }


def test_at_least_thirty_odd_objects_are_tried() -> None:
    assert len(OBJECTS) >= 60


@pytest.mark.parametrize("name", OBJECTS)
def test_an_odd_object_is_repaired_or_skipped_and_counted(name: str, tmp_path: Path) -> None:
    changes, wanted, counted = OBJECTS[name]
    sound = {"box": BOX, "label": 0, "area": 300.0, "crowd": False, "segmentation": 1, "id": 2}
    source = source_of(tmp_path, [annotated(1, 1), annotated(2, 1, **changes), annotated(3, 2)])
    found = source.annotations(0)
    assert facts(found[0]) == sound | {"id": 1}
    assert [facts(one) for one in found[1:]] == ([] if wanted is None else [sound | wanted])
    assert len(source.annotations(1)) == 1
    assert source.repaired == Counter(counted)
    assert {(repair.where, repair.image) for repair in source.repairs} <= {("annotation 2", 1)}
    for one in found:
        if one.segmentation is not None:
            assert masks.mask_of(one.segmentation, (HEIGHT, WIDTH)).any()


def test_what_lacks_masks_is_not_mentioned_where_nothing_has_any(tmp_path: Path) -> None:
    boxes = [annotated(1, 1, segmentation=None), annotated(2, 2, segmentation=[])]
    source = source_of(tmp_path, boxes)
    assert (source.repaired, source.has_masks) == (Counter(), False)
    assert source_of(tmp_path, [*boxes, annotated(3, 1)]).repaired == Counter({NO_MASK: 2})


# What is odd about the list of annotations → the annotations, the ids then found on both images, and what is counted.
LISTS: dict[str, tuple[list[Any], list[list[int]], list[str]]] = {
    "one id for two": (
        [annotated(5, 1), annotated(5, 1, (1, 1, 9, 9)), annotated(5, 2)],
        [[5, 6], [7]],
        ["annotation without a unique positive integer id; given a new id"] * 2,
    ),
    "one object twice": (
        [annotated(5, 1), annotated(5, 1), annotated(6, 2)],
        [[5], [6]],
        ["annotation listed twice; second entry skipped"],
    ),
    "no id": (
        [annotated(8, 1), annotated(1, 1, id=None), annotated("a", 2), annotated([1], 2)],  # type: ignore[arg-type]
        [[8, 9], [10, 11]],
        ["annotation without a unique positive integer id; given a new id"] * 3,
    ),
    "id zero, which evaluation takes for none": (
        [annotated(0, 1), annotated(-4, 1), annotated(2**60, 2), annotated(1, 2)],
        [[2, 3], [4, 1]],
        ["annotation without a unique positive integer id; given a new id"] * 3,
    ),
    "an unknown image": (
        [annotated(1, 1), annotated(2, 99), annotated(3, "1"), annotated(4, None), annotated(5, [1])],  # type: ignore[arg-type]
        [[1], []],
        ["annotation of an image that is not listed; skipped"] * 4,
    ),
    "none": ([], [[], []], []),
}


@pytest.mark.parametrize("name", LISTS)
def test_odd_lists_of_annotations_are_put_right_and_counted(name: str, tmp_path: Path) -> None:
    annotations, wanted, counted = LISTS[name]
    source = source_of(tmp_path, annotations)
    assert [[one.id for one in source.annotations(index)] for index in range(2)] == wanted
    assert source.repaired == Counter(counted)


def changed_image(**changes: Any) -> dict[str, Any]:
    """A document whose second image is changed."""
    return document([entry(1), entry(2) | changes], [annotated(1, 1)])


GOOD = document([entry(1), entry(2)], [annotated(1, 1), annotated(2, 2)])
REFUSED: dict[str, tuple[Any, list[str]]] = {
    "a list": ([GOOD], ["file.json holds a list; COCO annotations are an object with lists"]),
    "a number": (5, ["file.json holds a int; COCO annotations"]),
    "an empty file": ("", ["file.json is not complete, valid JSON: Expecting value"]),
    "a cut file": (json.dumps(GOOD)[:-40], ["file.json is not complete, valid JSON: ", "fetch or export it again"]),
    "a nested file": ("[" * 100_000, ["file.json is not complete, valid JSON: maximum recursion depth"]),
    "a pickle": ("\x80\x04N.", ["file.json is not complete, valid JSON"]),
    "a number of 5,000 digits": ("1" * 5000, ["file.json is not complete, valid JSON: Exceeds the limit"]),
    "no images": (
        {key: one for key, one in GOOD.items() if key != "images"},
        ["file.json has no 'images'; COCO annotations have images, annotations and categories"],
    ),
    "no annotations": ({key: one for key, one in GOOD.items() if key != "annotations"}, ["file.json has no 'annotations'"]),
    "no categories": ({key: one for key, one in GOOD.items() if key != "categories"}, ["file.json has no 'categories'"]),
    "an object of images": (GOOD | {"images": {"1": entry(1)}}, ["file.json: 'images' is a dict; make it a list"]),
    "no image": (GOOD | {"images": []}, ["file.json: 'images' is empty; add some"]),
    "no category": (GOOD | {"categories": []}, ["file.json: 'categories' is empty; add some"]),
    "one id for two categories": (
        GOOD | {"categories": categories(ids=(7, 3, 7))},
        ["file.json: categories[2]: id 7 is already used by 'cat'; ids must be unique"],
    ),
    "one name for two categories": (
        GOOD | {"categories": categories(names=("cat", "dog", "cat"))},
        ["categories[2]: duplicate category name 'cat'; names must be unique"],
    ),
    "a category without id": (GOOD | {"categories": [{"name": "cat"}]}, ["categories[0] has id None; give an integer"]),
    "a category without name": (GOOD | {"categories": [{"id": 3}]}, ["categories[0] has name None; give a string"]),
    "a category that is a string": (GOOD | {"categories": ["cat"]}, ["categories[0] has id None; give an integer"]),
    "an unknown category": (
        document([entry(1)], [annotated(4, 1, category_id=5)]),
        ["annotation 4 has category_id 5, but the categories have ids [3, 7, 12]; add the category or remove it"],
    ),
    "a category as a string": (document([entry(1)], [annotated(4, 1, category_id="3")]), ["annotation 4 has category_id '3'"]),
    "a category that is a list": (
        document([entry(1)], [annotated(4, 1, category_id=[3])]),
        ["annotation 4 has category_id [3]"],
    ),
    "an annotation that is a list": (document([entry(1)], [[1, 2]]), ["annotations[0] is a list; give an object"]),
    "annotations of other images": (
        document([entry(1)], [annotated(1, 8), annotated(2, 9)]),
        ["none of its 2 annotations refers to one of its images; do they belong to another file?"],
    ),
    "one id for two images": (
        changed_image(id=1),
        ["images[0] and images[1] both have id 1; ids must be unique"],
    ),
    "one file for two images": (
        changed_image(file_name=".//1.png"),
        ["images[0] and images[1] are both '1.png'; remove one, and move its annotations to the other"],
    ),
    "an image without id": (changed_image(id=None), ["images[1] has id None; give an integer"]),
    "an id as a string": (changed_image(id="2"), ["images[1] has id '2'; give an integer"]),
    "an image that is a number": (document([entry(1), 2], []), ["images[1] has id None"]),
    "no file name": (changed_image(file_name=None), ["images[1] has file_name None; give the path of its file below the"]),
    "an empty file name": (changed_image(file_name=" "), ["images[1] has file_name ' '; give the path"]),
    "a null byte": (changed_image(file_name="a\0b"), ["images[1] has file_name 'a\\x00b'; give the path"]),
    "an absolute path": (
        changed_image(file_name="/etc/passwd"),
        ["images[1] has file_name '/etc/passwd', which leaves the image folder; give a path below it, without .."],
    ),
    "a path upwards": (changed_image(file_name="a/../../b.png"), ["'a/../../b.png', which leaves the image folder"]),
    "a path upwards in Windows": (changed_image(file_name="..\\b.png"), [", which leaves the image folder"]),
    "a drive": (changed_image(file_name="C:\\b.png"), [", which leaves the image folder"]),
    "no size and no file": (
        changed_image(width=None),
        ["image 2 has height 40 and width None, and ", "images/2.png cannot be read: No such file"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_in_doubt_is_one_error_that_says_where(name: str, tmp_path: Path) -> None:
    content, told = REFUSED[name]
    write_json(tmp_path / "file.json", content)
    with refused(*told):
        CocoSource(tmp_path / "file.json", tmp_path / "images")


def test_all_that_is_refused_is_listed_up_to_a_limit(tmp_path: Path) -> None:
    strangers = [annotated(number, 1, category_id=99) for number in range(1, 16)]
    with pytest.raises(DataError) as caught:
        source_of(tmp_path, strangers)
    lines = str(caught.value).splitlines()
    assert len(lines) == 11
    assert [f"annotation {number} has" in line for number, line in enumerate(lines[:10], 1)] == [True] * 10
    assert lines[-1] == "… and 5 more problems like these"


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coco_file, "MAX_BYTES", 100)
    with refused("file.json cannot be read: it has ", "more than the 100 allowed; check the path, or give a smaller file"):
        source_of(tmp_path, [])


def test_a_folder_or_nothing_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "it is not a regular file"), (tmp_path / "gone.json", "No such file or directory")):
        with refused(f"{path} cannot be read: {reason}"):
            CocoSource(path, tmp_path)


@pytest.mark.parametrize(
    "size", [{"width": None}, {"height": 0}, {"width": -60}, {"height": "40"}, {"width": 10**9}, {"width": 60.0}]
)
def test_a_missing_or_senseless_size_is_read_from_the_file(size: dict[str, Any], tmp_path: Path) -> None:
    write_image(tmp_path / "images" / "2.png", width=33, height=21)
    path = write_json(tmp_path / "file.json", changed_image(**size))
    source = CocoSource(path, tmp_path / "images")
    assert source.sizes == [(HEIGHT, WIDTH), (21, 33)]
    assert source.repaired == Counter(["image without valid height and width; taken from its file"])
    assert source.repairs[0].where == "image 2"


def test_an_image_that_is_listed_twice_is_one_image(tmp_path: Path) -> None:
    path = write_json(tmp_path / "file.json", document([entry(1), entry(1)], [annotated(1, 1)]))
    source = CocoSource(path, tmp_path)
    assert len(source) == 1
    assert source.repaired == Counter(["image listed twice; second entry skipped"])


# What is bad → how the file of an image of 60×40 is made, and what is said when it is read.
Make = Callable[[Path], object]
IMAGES: dict[str, tuple[Make, str]] = {
    "missing": (lambda path: None, "2.png cannot be read: No such file or directory; check the path"),
    "empty": (lambda path: path.write_bytes(b""), "2.png is empty; fetch it again"),
    "text": (lambda path: path.write_text("404 not found"), "2.png is not a readable image; JPEG, PNG"),
    "cut": (lambda path: path.write_bytes(write_image(path).read_bytes()[:-200]), "2.png is damaged: image file is truncated"),
    "damaged": (
        lambda path: path.write_bytes(write_image(path).read_bytes().replace(b"IDAT", b"IDAX")),
        "2.png is not a readable image",
    ),
    "a folder": (lambda path: path.mkdir(), "2.png cannot be read: it is not a regular file"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "2.png cannot be read: Too many levels of symbolic links"),
    "another format": (lambda path: Image.new("RGB", (60, 40)).save(path, "ICO"), "2.png is not a readable image"),
    "larger": (lambda path: write_image(path, width=61), "2.png has 61×40 pixels, but 60×40 in "),
    "smaller": (lambda path: write_image(path, width=30, height=20), "2.png has 30×20 pixels, but 60×40 in "),
    "on its side": (
        lambda path: write_image(path, width=40, height=60),
        "2.png has 40×60 pixels when it is upright, but 60×40 in ",
    ),
    "on its side by EXIF": (
        lambda path: write_image(path, format="JPEG", exif=rotation(6)),
        "annotate it as it is shown, or remove the rotation from its EXIF data",
    ),
    "a bomb": (lambda path: Image.new("1", (10_000, 6_500)).save(path, "PNG"), "10000×6500 pixels, more than the 64,000,000"),
}


def rotation(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("name", IMAGES)
def test_a_bad_image_is_one_error_when_it_is_read(name: str, tmp_path: Path) -> None:
    make, told = IMAGES[name]
    source = source_of(tmp_path, [annotated(1, 1), annotated(2, 2)])
    write_image(tmp_path / "images" / "1.png")
    make(tmp_path / "images" / "2.png")
    assert source.read(0, 3).size == (WIDTH, HEIGHT)
    with pytest.raises(ImageError) as caught:
        source.read(1, 3)
    assert told in str(caught.value)


def test_at_least_ten_bad_images_are_tried() -> None:
    assert len(IMAGES) >= 10


def test_a_rotated_image_is_read_upright_where_the_file_states_that_size(tmp_path: Path) -> None:
    write_image(tmp_path / "1.jpg", width=40, height=60, exif=rotation(6))
    path = write_json(tmp_path / "file.json", document([entry(1, "1.jpg")], []))
    assert CocoSource(path, tmp_path).read(0, 3).size == (60, 40)


# Row S3: whatever stands anywhere in the file, there is a source or one DataError.

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-9, 99), st.floats(), st.text(max_size=2)), max_size=9),
    st.dictionaries(st.sampled_from(["size", "counts", "id"]), st.one_of(st.integers(), st.text(max_size=5)), max_size=2),
    st.just(10**400),
)


def replaced(content: Any, value: Any, choose: random.Random) -> Any:
    """The content with a value in place of one of its parts, at any depth."""
    if not isinstance(content, dict | list) or not content or choose.random() < 0.1:
        return value
    keys = list(content) if isinstance(content, dict) else range(len(content))
    chosen = choose.choice(keys)
    if isinstance(content, dict):
        return content | {chosen: replaced(content[chosen], value, choose)}
    return [replaced(one, value, choose) if index == chosen else one for index, one in enumerate(content)]


@given(values=st.lists(VALUES, min_size=1, max_size=3), seed=st.integers(0, 2**32))
def test_law_a_mutated_file_is_read_or_refused_and_nothing_else(
    values: list[Any], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = document([entry(1), entry(2)], [annotated(1, 1), annotated(2, 2, segmentation=[TRIANGLE]), crowd(3, 1)])
    for number, value in enumerate(values):
        content = replaced(content, value, random.Random(seed + number))
    folder = tmp_path_factory.getbasetemp()
    try:
        source = CocoSource(write_json(folder / "mutated.json", content), folder)
    except DataError:
        return
    for index, size in enumerate(source.sizes):
        for one in source.annotations(index):
            left, top, right, bottom = one.box
            assert -1 <= left < right <= size[1] + 1
            assert -1 <= top < bottom <= size[0] + 1
            assert 0 <= one.area < np.inf
            assert 0 <= one.label < len(source.classes)
            if one.segmentation is not None:
                assert masks.mask_of(one.segmentation, size).shape == size
