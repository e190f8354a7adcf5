"""Data in the format of COCO are found in every usual layout, and read as pycocotools reads them."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arena import shared
from coco_files import (
    HEIGHT,
    IDS,
    NAMES,
    WIDTH,
    annotated,
    categories,
    crowd,
    document,
    entry,
    write_coco,
    write_image,
    write_json,
    write_split,
)
from pictures import names, refused
from polaformer.data.detection_images import DetectionReader
from polaformer.data.detection_transforms import RandomView, Resize
from polaformer.data.masks import mask_of
from polaformer.data.sources.coco import (
    CocoSource,
    absolute,
    digest_of_annotations,
    looks_like_coco,
    open_coco,
    open_coco_split,
)
from polaformer.errors import DataError, SettingsError

SLICE = "coco-slice-480"


def content(first: int, number: int = 2, **changes: Any) -> dict[str, Any]:
    images = [entry(one) for one in range(first, first + number)]
    return document(images, [annotated(10 * first, first), annotated(10 * first + 1, first)], **changes)


# Layouts

LAYOUTS = {
    "COCO's": ("annotations/instances_train2017.json", "train2017", "annotations/instances_val2017.json", "val2017"),
    "of 2014": ("annotations/instances_train2014.json", "train2014", "annotations/instances_val2014.json", "val2014"),
    "without year": ("annotations/instances_train.json", "train", "annotations/instances_val.json", "val"),
    "below images": (
        "annotations/instances_train2017.json",
        "images/train2017",
        "annotations/instances_val.json",
        "images/val",
    ),
    "year in the file alone": (
        "annotations/instances_train2017.json",
        "train",
        "annotations/instances_val2017.json",
        "images/val",
    ),
    "all in one folder": ("annotations/instances_train.json", "images", "annotations/instances_val.json", "images"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_usual_layout_is_found(name: str, tmp_path: Path) -> None:
    train_file, train_folder, val_file, val_folder = LAYOUTS[name]
    write_split(tmp_path, train_file, train_folder, content(1))
    write_split(tmp_path, val_file, val_folder, content(5, 1))
    assert looks_like_coco(str(tmp_path))
    found = open_coco(str(tmp_path))
    assert (names(found.train), names(found.val), found.test) == (["1.png", "2.png"], ["5.png"], None)
    assert list(found.splits) == ["train", "val"]
    for source in found.splits.values():
        for index in range(len(source)):
            assert source.read(index, 3).size == (WIDTH, HEIGHT)
    pairs = f"{tmp_path / train_file}:{tmp_path / train_folder},{tmp_path / val_file}:{tmp_path / val_folder}"
    assert looks_like_coco(pairs)
    assert names(open_coco(pairs).val) == ["5.png"]


def test_a_test_split_is_found_too(tmp_path: Path) -> None:
    for split, first in (("train", 1), ("val", 5), ("test", 8)):
        write_split(tmp_path, f"annotations/instances_{split}.json", split, content(first))
    found = open_coco(str(tmp_path))
    assert names(found.split("test")) == ["8.png", "9.png"]
    assert found.classes == ("dog", "cat", "mouse")
    with pytest.raises(SettingsError, match="there is no split 'dev'"):
        found.split("dev")


def test_without_validation_a_share_is_held_out_by_name_or_all_are_both(tmp_path: Path) -> None:
    annotations = [annotated(one, one, (-5, 1, 20, 20)) for one in range(1, 201)] + [annotated(999, 999)]
    write_json(tmp_path / "a.json", document([entry(one) for one in range(1, 201)], annotations))
    write_image(tmp_path / "1.png")
    pair = f"{tmp_path / 'a.json'}:{tmp_path}"
    found = open_coco(pair, val_share=0.2)
    assert sorted([*names(found.train), *names(found.val)]) == sorted(f"{one}.png" for one in range(1, 201))
    assert 20 < len(found.val) < 60
    assert set(names(open_coco(pair, val_share=0.1).val)) < set(names(found.val))
    for source in (found.train, found.val):
        for index in range(len(source)):
            assert [one.id for one in source.annotations(index)] == [source.image_id(index)]
            assert source.name(index) == f"{source.image_id(index)}.png"
        assert source.repaired["box partly outside the image; clipped"] == len(source)
    assert sum((source.repaired for source in (found.train, found.val)), Counter()).total() == 201
    assert digest_of_annotations(found.train) != digest_of_annotations(found.val)
    both = open_coco(pair, val_share=0)
    assert names(both.train) == names(both.val) == [f"{one}.png" for one in range(1, 201)]
    with refused("there are no images to validate with; add some, or name a second pair for validation"):
        open_coco(pair, val_share=1e-6)


BAD_LAYOUTS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "nothing": (
        {},
        "",
        ["is not a folder in the layout of COCO: No such file or directory; give a folder with annotations/inst"],
    ),
    "a file": ({"a.json": {}}, "a.json", ["is not a folder in the layout of COCO: Not a directory", "or FILE.json:IMAGES"]),
    "no annotations": ({"annotations/captions.json": {}}, "", ["annotations has no instances_….json, and nothing to train on"]),
    "validation alone": (
        {"annotations/instances_val2017.json": {}},
        "",
        ["annotations has instances_val2017.json, and nothing to train on; give a folder"],
    ),
    "two years": (
        {"annotations/instances_train2014.json": {}, "annotations/instances_train2017.json": {}},
        "",
        ["annotations has train2014 and train2017 for train; name one as FILE.json:IMAGES"],
    ),
    "no images": (
        {"annotations/instances_train2017.json": {}},
        "",
        ["there are no images for instances_train2017.json: no folder ", "/train2017 or ", "/images/train2017; add one"],
    ),
    "a null byte": ({}, "a\0b", ["is not a folder in the layout of COCO: embedded null byte"]),
}


@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_what_is_no_layout_is_one_error_that_says_what_is(name: str, tmp_path: Path) -> None:
    files, path, told = BAD_LAYOUTS[name]
    for file, one in files.items():
        write_json(tmp_path / file, one)
    with refused(*told):
        open_coco(str(tmp_path / path))


def test_only_what_has_annotation_files_looks_like_coco(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {})
    write_json(tmp_path / "photos" / "annotations" / "notes.json", {})
    others = ["", "digits", "hfds:x", "a\0b", "a" * 5000, str(tmp_path), str(tmp_path / "photos"), "a.jsonl", "images:masks"]
    assert not any(map(looks_like_coco, others))
    assert looks_like_coco(f"{tmp_path / 'a.json'}:{tmp_path}")


@pytest.mark.parametrize("data", ["gone.json:images", "instances_val2017.json", "a.json:x,gone.json:y"])
def test_the_name_of_an_annotation_file_is_meant_for_detection_also_if_it_is_wrong(data: str, tmp_path: Path) -> None:
    write_split(tmp_path, "a.json", "x", content(1))
    data = ",".join(str(tmp_path / one) for one in data.split(",")).replace(":", f":{tmp_path}/")
    assert looks_like_coco(data)
    with refused("FILE.json:IMAGES"):
        open_coco(data)


def test_a_folder_without_the_images_is_refused(tmp_path: Path) -> None:
    file = write_json(tmp_path / "a.json", content(1, 2))
    with refused(f"there is no folder {tmp_path}/gone with the images of {file}; give"):
        open_coco(f"{file}:{tmp_path}/gone")
    (tmp_path / "empty").mkdir()
    with refused(f"{tmp_path}/empty has none of the first 2 images of {file}, such as 1.png; give their folder"):
        open_coco_split(f"{file}:{tmp_path}/empty", "val", classes=("dog", "cat", "mouse"))
    write_image(tmp_path / "empty" / "2.png")
    assert len(open_coco_split(f"{file}:{tmp_path}/empty", "val", classes=("dog", "cat", "mouse"))) == 2


def test_names_of_data_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    here = os.getcwd()
    assert absolute("data") == f"{here}/data"
    assert absolute("gone") == "gone"
    assert absolute("a.json:x,b/c.json:y:z") == f"{here}/a.json:{here}/x,{here}/b/c.json:{here}/y:z"


# Classes


def test_classes_are_the_categories_in_the_order_of_their_ids(tmp_path: Path) -> None:
    source = CocoSource(write_json(tmp_path / "a.json", content(1)), tmp_path)
    assert (NAMES, IDS) == (("cat", "dog", "mouse"), (7, 3, 12))
    assert (source.classes, source.category_ids) == (("dog", "cat", "mouse"), (3, 7, 12))
    assert [one.label for one in source.annotations(0)] == [0, 0]


def test_labels_follow_the_names_where_other_splits_have_other_ids(tmp_path: Path) -> None:
    write_split(tmp_path, "annotations/instances_train.json", "train", content(1))
    others = document([entry(5)], [annotated(1, 5, category_id=1)], categories=categories(("mouse", "cat", "dog"), (1, 2, 3)))
    write_split(tmp_path, "annotations/instances_val.json", "val", others)
    val = open_coco(str(tmp_path)).val
    assert (val.classes, val.category_ids) == (("dog", "cat", "mouse"), (3, 2, 1))
    assert val.annotations(0)[0].label == 2
    given = open_coco(str(tmp_path), classes=NAMES)
    assert given.train.classes == given.val.classes == NAMES
    assert (given.train.annotations(0)[0].label, given.val.annotations(0)[0].label) == (1, 2)


def test_other_categories_are_refused_by_name(tmp_path: Path) -> None:
    write_split(tmp_path, "annotations/instances_train.json", "train", content(1))
    write_split(tmp_path, "annotations/instances_val.json", "val", content(5, categories=categories(("ox", "dog", "mouse"))))
    with refused(
        "instances_val.json has other categories: it lacks 'cat' and adds 'ox'; all splits, and the model, need the same"
    ):
        open_coco(str(tmp_path))
    with refused("instances_train.json has other categories: it adds 'mouse'; all splits"):
        open_coco(str(tmp_path), classes=("cat", "dog"))


def test_a_category_that_nothing_has_is_a_class(tmp_path: Path) -> None:
    source = CocoSource(write_json(tmp_path / "a.json", document([entry(1)], [])), tmp_path)
    assert (len(source.classes), source.annotations(0), source.has_masks) == (3, [], False)


def test_names_that_would_change_a_terminal_are_escaped(tmp_path: Path) -> None:
    odd = document([entry(1, "\x1b[31m.png")], [], categories=categories(("c\x1bt", "dog", "\ud800")))
    source = CocoSource(write_json(tmp_path / "a.json", odd), tmp_path)
    assert source.classes == ("dog", "c\\x1bt", "\\ud800")
    assert source.name(0) == "\\x1b[31m.png"
    assert digest_of_annotations(source)


# Content


def test_annotations_are_found_by_image_in_the_order_of_the_file(tmp_path: Path) -> None:
    objects = [
        annotated(4, 2),
        annotated(1, 1),
        crowd(9, 2),
        annotated(2, 2, segmentation=[[1, 1, 9, 1, 9, 9], [20, 20, 30, 20, 30, 30]]),
    ]
    source = CocoSource(write_json(tmp_path / "a.json", document([entry(3), entry(2), entry(1)], objects)), tmp_path)
    assert [[one.id for one in source.annotations(index)] for index in range(3)] == [[], [4, 9, 2], [1]]
    assert [source.image_id(index) for index in range(3)] == [3, 2, 1]
    assert [one.crowd for one in source.annotations(1)] == [False, True, False]
    two = source.annotations(1)[2].segmentation
    assert [polygon.tolist() for polygon in two or ()] == [[[1, 1], [9, 1], [9, 9]], [[20, 20], [30, 20], [30, 30]]]
    assert source.has_masks
    part = source.subset([2, 1])
    assert (names(part), [one.id for one in part.annotations(0)], part.image_id(1)) == (["1.png", "2.png"], [1], 2)


def test_the_digest_changes_with_annotations_classes_and_names(tmp_path: Path) -> None:
    def digest(one: dict[str, Any], **options: Any) -> str:
        return digest_of_annotations(CocoSource(write_json(tmp_path / "a.json", one), tmp_path, **options))

    base = content(1)
    moved = base | {"annotations": [annotated(10, 1, (1, 1, 5, 5))]}
    renamed = base | {"images": [entry(1), entry(2, "b.png")]}
    found = [digest(base), digest(moved), digest(renamed), digest(base, classes=NAMES)]
    assert len(set(found)) == 4
    assert digest(base) == found[0]


# The slice of COCO


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # pycocotools
@pytest.mark.parametrize(
    ("split", "images", "objects", "crowds", "empty"),
    [pytest.param("train", 343, 2974, 29, 3, marks=pytest.mark.long), ("val", 206, 1786, 21, 2)],
)
def test_the_slice_is_read_as_pycocotools_reads_it(split: str, images: int, objects: int, crowds: int, empty: int) -> None:
    """Counts, boxes and areas exactly, and masks to the pixel; nothing in it needs repair."""
    coco = pytest.importorskip("pycocotools.coco")
    root = shared(SLICE)
    file = root / "annotations" / f"instances_{split}2017.json"
    theirs, ours = coco.COCO(str(file)), CocoSource(file, root / f"{split}2017")
    assert ours.repaired == Counter()
    assert ours.category_ids == tuple(sorted(theirs.cats))
    assert ours.classes == tuple(theirs.cats[number]["name"] for number in ours.category_ids)
    found = [ours.annotations(index) for index in range(len(ours))]
    assert (len(found), sum(map(len, found))) == (images, objects)
    assert (sum(one.crowd for some in found for one in some), sum(not some for some in found)) == (crowds, empty)
    reader = DetectionReader(ours, Resize(64, 128), (0.5,) * 3, (0.5,) * 3, with_masks=True, training=False)
    for index, some in enumerate(found):
        image = theirs.imgs[ours.image_id(index)]
        assert (ours.sizes[index], ours.name(index)) == ((image["height"], image["width"]), image["file_name"])
        wanted = [theirs.anns[number] for number in theirs.getAnnIds(imgIds=image["id"])]
        for one, record, other in zip(some, reader._truth(index, some)["annotations"], wanted, strict=True):
            assert {key: record[key] for key in ("id", "image_id", "bbox", "area", "iscrowd")} == {
                key: other[key] for key in ("id", "image_id", "bbox", "area", "iscrowd")
            }
            assert ours.category_ids[one.label] == other["category_id"]
            assert record["segmentation"]["counts"].encode() == theirs.annToRLE(other)["counts"]
            if one.id % 5 == 0 or one.crowd:
                found_mask = mask_of(one.segmentation, ours.sizes[index])  # type: ignore[arg-type]
                assert np.array_equal(found_mask, theirs.annToMask(other))


def test_images_of_the_slice_become_training_samples() -> None:
    """Every tenth image, at a small size: boxes are around masks."""
    source = open_coco(str(shared(SLICE))).val
    reader = DetectionReader(source, RandomView((200,), 333), (0.5,) * 3, (0.5,) * 3, with_masks=True, training=True)
    number = 0
    for index in range(0, len(source), 10):
        target = reader.read(index).target
        assert target is not None
        for box, mask in zip(target["boxes"], target["masks"], strict=True):
            rows, columns = torch.nonzero(mask, as_tuple=True)
            inside = (
                (box[0] - 2 <= columns.min())
                & (columns.max() <= box[2] + 2)
                & (box[1] - 2 <= rows.min())
                & (rows.max() <= box[3] + 2)
            )
            assert inside, (source.name(index), box)
            number += 1
    assert number > 80


@pytest.mark.long
def test_every_image_of_the_slice_can_be_read() -> None:
    data = open_coco(str(shared(SLICE)))
    for source in (data.train, data.val):
        for index, (height, width) in enumerate(source.sizes):
            assert source.read(index, 3).size == (width, height)


def test_a_dataset_made_by_the_tests_is_valid(tmp_path: Path) -> None:
    data = open_coco(write_coco(tmp_path))
    assert (len(data.train), len(data.val)) == (6, 3)
    assert not data.train.repaired
    assert json.loads((tmp_path / "annotations" / "instances_train2017.json").read_text())["images"]
    with pytest.raises(DataError):
        open_coco(str(tmp_path / "gone"))
