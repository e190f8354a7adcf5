"""`check` on images with a class per pixel: every planted problem is found, and none in clean data."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from arena import shared
from polaformer.data.audit import AuditReport, read_manifest, write_manifest
from polaformer.data.sources.semantic import open_semantic
from polaformer.data.sources.semantic_audit import audit
from polaformer.errors import DataError
from polaformer.tasks.segmentation.task import SEGMENTATION, SegmentationCheck
from semantic_files import HEIGHT, WIDTH, mask, picture, save, write_pairs, write_semantic


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """Six images for training, three for validation."""
    return Path(write_semantic(tmp_path / "data"))


def found(report: AuditReport) -> list[tuple[str, ...]]:
    return [tuple(problem) for problem in report.problems]


def test_nothing_is_found_in_clean_data_and_their_facts_are_right(clean: Path) -> None:
    counted: list[int] = []
    report = audit(open_semantic(str(clean)), advance=lambda: counted.append(1))
    assert report.problems == []
    masks = np.stack([mask(seed) for seed in range(1, 7)])
    counts = [int((masks == value).sum()) for value in (0, 1, 2)]
    facts = report.parts["train"]
    assert (facts["images"], facts["pixels"], facts["classes"], facts["unseen_classes"]) == (6, masks.size, 3, 0)
    assert facts["sizes"] == f"{WIDTH}×{HEIGHT} to {WIDTH}×{HEIGHT}"
    assert facts["ignored"] == f"{100 * (masks == 9).mean():.2g} %"
    wanted = {name: 100 * count / sum(counts) for name, count in zip(("cat", "dog", "mouse"), counts, strict=True)}
    assert facts["class_shares"] == pytest.approx(wanted, abs=1e-6)
    assert list(facts["class_shares"]) == sorted(wanted, key=lambda name: -wanted[name])
    assert json.loads(json.dumps(facts)) == facts
    assert report.parts["val"]["images"] == 3
    assert len(counted) == 9
    assert len(report.digests) == 18
    assert {"train/1.png", "train/training/1.png", "val/101.png", "val/validation/101.png"} <= report.digests.keys()


def test_data_without_training_images_are_read_too(clean: Path) -> None:
    for folder in ("images", "annotations"):
        shutil.rmtree(clean / folder / "training")
    checked = SEGMENTATION.check(str(clean), SegmentationCheck(), None, lambda total: lambda: None)
    assert {name: part["images"] for name, part in checked.parts.items()} == {"val": 3}
    with pytest.raises(DataError, match="nothing to train on"):
        open_semantic(str(clean))


def test_check_counts_each_image_once(clean: Path) -> None:
    """All of a single pair are both splits by default."""
    shutil.copy(clean / "classes.txt", clean / "annotations")
    data = f"{clean}/images/training:{clean}/annotations/training"
    totals, steps = list[int](), list[int]()

    def begin(total: int) -> Callable[[], object]:
        totals.append(total)
        return lambda: steps.append(1)

    SEGMENTATION.check(data, SegmentationCheck(), None, begin)
    assert (totals, len(steps)) == ([6], 6)


def test_shares_of_many_classes_are_cut_short_as_text() -> None:
    report = audit(open_semantic(str(shared("ade20k-samples")), val_share=0))
    shares = report.parts["train"]["class_shares"]
    assert (len(shares), report.parts["train"]["unseen_classes"]) == (150, 121)
    assert report.problems == []
    assert str(shares).startswith("sky 3")
    assert str(shares).endswith("and 138 more")


Plant = Callable[[Path], object]
PLANTED: dict[str, tuple[Plant, list[tuple[str, str, str]]]] = {
    "an unknown value": (
        lambda root: save(root / "annotations/training/2.png", mask(values=(0, 1, 7))),
        [("train", "2.png", "2.png has values that are not in the label set, which knows 0 to 2, 9: 7 (")],
    ),
    "another size": (
        lambda root: save(root / "annotations/validation/101.png", mask(height=HEIGHT - 1)),
        [("val", "101.png", "101.png has 32×23 pixels, but its image ")],
    ),
    "a damaged image": (
        lambda root: (root / "images/training/3.png").write_bytes(b"x"),
        [("train", "3.png", "images/training/3.png is not a readable image")],
    ),
    "a damaged mask": (
        lambda root: (root / "annotations/training/3.png").write_bytes(b"x"),
        [("train", "3.png", "annotations/training/3.png is not a readable image")],
    ),
    "a mask that is ignored everywhere": (
        lambda root: save(root / "annotations/training/4.png", mask(values=(9,))),
        [("train", "4.png", "no pixel of its mask counts; correct it, or remove the image")],
    ),
    "one image in both splits": (
        lambda root: save(root / "images/validation/102.png", picture(3)),
        [("val", "102.png", "same image as train, 3.png: it is in both splits")],
    ),
    "a class that only validation has": (
        lambda root: [save(root / f"annotations/training/{one}.png", mask(one, values=(0, 2))) for one in range(1, 7)],
        [("train", "dog", "no pixel has this class, but pixels of val have; add images of it")],
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_every_planted_problem_is_found_and_no_other(name: str, clean: Path) -> None:
    plant, wanted = PLANTED[name]
    plant(clean)
    problems = found(audit(open_semantic(str(clean))))
    assert [problem[:2] for problem in problems] == [problem[:2] for problem in wanted]
    for problem, (_, _, text) in zip(problems, wanted, strict=True):
        assert text in problem[2]


@pytest.mark.parametrize("num_workers", [1, 4])
def test_a_report_does_not_depend_on_the_number_of_threads(num_workers: int, clean: Path) -> None:
    (clean / "images" / "training" / "3.png").write_bytes(b"")
    assert audit(open_semantic(str(clean)), num_workers=num_workers) == audit(open_semantic(str(clean)))


def test_a_manifest_reveals_changed_images_and_masks(clean: Path, tmp_path: Path) -> None:
    write_manifest(tmp_path / "manifest.json", audit(open_semantic(str(clean))).digests)
    known = read_manifest(tmp_path / "manifest.json")
    assert audit(open_semantic(str(clean)), known).problems == []
    save(clean / "annotations/training/1.png", mask(99))
    save(clean / "images/validation/101.png", picture(99))
    problems = found(audit(open_semantic(str(clean)), known))
    assert [problem[:2] for problem in problems] == [("train", "training/1.png"), ("val", "101.png")]
    assert all("it has changed: sha256 should be " in problem[2] for problem in problems)


def test_images_that_are_both_splits_on_purpose_are_read_once(tmp_path: Path) -> None:
    write_pairs(tmp_path / "train", tmp_path / "trainannot", ["a", "b"])
    (tmp_path / "classes.txt").write_text("0 cat\n1 dog\n2 mouse\n9 -\n")
    report = audit(open_semantic(str(tmp_path), val_share=0))
    assert (list(report.parts), report.problems) == (["train"], [])


@pytest.mark.long
def test_camvid_has_no_problems() -> None:
    report = audit(open_semantic(str(shared("camvid"))))
    assert report.problems == []
    assert [part["images"] for part in report.parts.values()] == [367, 101, 233]
