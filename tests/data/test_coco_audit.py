"""`check` on annotated images: every planted problem is found, with the image and annotation, and none in clean data."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arena import shared
from coco_files import write_coco, write_image, write_json
from polaformer.data.audit import AuditReport, read_manifest, write_manifest
from polaformer.data.sources.coco import open_coco, open_coco_to_check
from polaformer.data.sources.coco_audit import audit
from polaformer.data.sources.coco_file import NO_MASK
from polaformer.errors import DataError
from polaformer.tasks.detection.task import DETECTION, DetectionCheck


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """Six images for training with 0 to 3 objects, three for validation."""
    return Path(write_coco(tmp_path / "data"))


def found(report: AuditReport) -> list[tuple[str, ...]]:
    return [tuple(problem) for problem in report.problems]


def changed(root: Path, change: Callable[[dict[str, Any]], object], split: str = "train") -> None:
    """Change the annotation file of a split."""
    path = root / "annotations" / f"instances_{split}2017.json"
    content = json.loads(path.read_text())
    change(content)
    write_json(path, content)


def test_nothing_is_found_in_clean_data_and_their_facts_are_right(clean: Path) -> None:
    def mouse_and_crowd(content: dict[str, Any]) -> None:
        content["annotations"][0]["category_id"] = 12
        content["annotations"][6]["iscrowd"] = 1  # the only object of its image

    changed(clean, mouse_and_crowd)
    counted: list[int] = []
    report = audit(open_coco(str(clean)), advance=lambda: counted.append(1))
    assert report.problems == []
    assert report.parts["train"] == {
        "images": 6,
        "without_objects": 2,
        "annotations": 9,
        "crowds": 1,
        "masks": 9,
        "classes": 3,
        "smallest_class": "dog: 2",
        "largest_class": "cat: 3",
        "sizes": "40×40 to 60×60",
    }
    assert (report.parts["val"]["images"], report.parts["val"]["annotations"]) == (3, 6)
    assert len(counted) == 9
    assert len(set(report.digests.values())) == len(report.digests) == 11
    assert {"train/1.png", "val/101.png", "train/instances_train2017.json"} <= report.digests.keys()


def box(index: int, *numbers: float) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["annotations"][index].update(bbox=list(numbers))


PLANTED: dict[str, tuple[Callable[[Path], object], list[tuple[str, str, str]]]] = {
    "a clipped box": (
        lambda root: changed(root, box(0, -9, 4, 20, 9)),
        [("train", "1.png, annotation 100", "box partly outside the image; clipped")],
    ),
    "a skipped object": (
        lambda root: changed(root, lambda content: content["annotations"][1].update(iscrowd="no")),
        [("train", "2.png, annotation 200", "iscrowd neither 0 nor 1; skipped")],
    ),
    "an object without mask": (
        lambda root: changed(root, lambda content: content["annotations"][1].update(segmentation=[]), "val"),
        [("val", "102.png, annotation 10200", NO_MASK)],
    ),
    "an empty mask": (
        lambda root: changed(
            root, lambda content: content["annotations"][0].update(segmentation=[[1.1, 1.1, 1.2, 1.1, 1.2, 1.2]])
        ),
        [("train", "1.png, annotation 100", "its mask has no pixel")],
    ),
    "an unknown image": (
        lambda root: changed(root, lambda content: content["annotations"][0].update(image_id=77)),
        [("train", "annotation 100", "annotation of an image that is not listed; skipped")],
    ),
    "a size that is missing": (
        lambda root: changed(root, lambda content: content["images"][0].pop("width")),
        [("train", "1.png, image 1", "image without valid height and width; taken from its file")],
    ),
    "a missing image": (
        lambda root: (root / "train2017/3.png").unlink(),
        [("train", "3.png", "3.png cannot be read: No such file")],
    ),
    "a damaged image": (
        lambda root: (root / "val2017/101.png").write_bytes(b"x"),
        [("val", "101.png", "is not a readable image")],
    ),
    "another size": (
        lambda root: write_image(root / "train2017/1.png", 99, width=61),
        [("train", "1.png", "1.png has 61×60 pixels, but 40×60 in ")],
    ),
    "one image in both splits": (
        lambda root: (root / "val2017/102.png").write_bytes((root / "train2017/3.png").read_bytes()),
        [("val", "102.png", "same image as train, 3.png: it is in both splits")],
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_every_planted_problem_is_found_and_no_other(name: str, clean: Path) -> None:
    plant, wanted = PLANTED[name]
    if name == "another size":
        wanted = [("train", "1.png", "1.png has 61×40 pixels")]
    if name == "one image in both splits":  # of the same size
        changed(clean, lambda content: content["images"][1].update(width=60, height=60), "val")
        changed(clean, lambda content: content["images"][2].update(width=60, height=60))
        write_image(clean / "train2017/3.png", 33, width=60, height=60)
    plant(clean)
    problems = found(audit(open_coco(str(clean))))
    assert [problem[:2] for problem in problems] == [problem[:2] for problem in wanted]
    for problem, (_, _, text) in zip(problems, wanted, strict=True):
        assert text in problem[2]


@pytest.mark.parametrize("num_workers", [1, 4])
def test_a_report_does_not_depend_on_the_number_of_threads(num_workers: int, clean: Path) -> None:
    (clean / "train2017" / "3.png").write_bytes(b"")
    assert audit(open_coco(str(clean)), num_workers=num_workers) == audit(open_coco(str(clean)))


def test_a_manifest_reveals_changed_images_and_annotations(clean: Path, tmp_path: Path) -> None:
    write_manifest(tmp_path / "manifest.json", audit(open_coco(str(clean))).digests)
    known = read_manifest(tmp_path / "manifest.json")
    assert audit(open_coco(str(clean)), known).problems == []
    changed(clean, box(0, 3, 4, 19, 9))
    write_image(clean / "val2017/101.png", 99, width=50, height=60)
    problems = found(audit(open_coco(str(clean)), known))
    assert [problem[:2] for problem in problems[-2:]] == [("train", "instances_train2017.json"), ("val", "101.png")]
    assert all("it has changed: sha256 should be " in problem[2] for problem in problems[-2:])


def test_images_that_are_both_splits_on_purpose_are_read_once(clean: Path) -> None:
    pair = f"{clean / 'annotations' / 'instances_train2017.json'}:{clean / 'train2017'}"
    report = audit(open_coco(pair, val_share=0))
    assert (list(report.parts), report.problems) == (["train"], [])


def test_data_without_training_images_are_read_too(clean: Path) -> None:
    (clean / "annotations/instances_train2017.json").unlink()
    report = audit(open_coco_to_check(str(clean)))
    assert {name: part["images"] for name, part in report.parts.items()} == {"val": 3}
    with pytest.raises(DataError, match="nothing to train on"):
        open_coco(str(clean))


def test_a_file_without_any_annotation_is_a_problem(clean: Path) -> None:
    changed(clean, lambda content: content["annotations"].clear())
    problems = found(audit(open_coco(str(clean))))
    assert problems == [("train", "instances_train2017.json", "no object is annotated on any image; annotate some")]


def test_check_counts_each_image_once(clean: Path) -> None:
    """All of a single pair are both splits by default."""
    pair = f"{clean / 'annotations' / 'instances_train2017.json'}:{clean / 'train2017'}"
    totals, steps = list[int](), list[int]()

    def begin(total: int) -> Callable[[], object]:
        totals.append(total)
        return lambda: steps.append(1)

    checked = DETECTION.check(pair, DetectionCheck(), None, begin)
    assert (totals, len(steps), checked.parts["train"]["images"]) == ([6], 6, 6)


@pytest.mark.long
def test_the_slice_of_coco_has_no_problems() -> None:
    report = audit(open_coco(str(shared("coco-slice-480"))))
    assert report.problems == []
    assert [(part["images"], part["annotations"], part["crowds"]) for part in report.parts.values()] == [
        (343, 2974, 29),
        (206, 1786, 21),
    ]
