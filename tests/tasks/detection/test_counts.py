"""The numbers of an evaluation: pycocotools' on the same detections, whatever the number of processes."""

import json
import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from detections import NAMES, Scene, annotation, by_pycocotools, counted, scene
from polaformer.tasks.detection.counts import DetectionCounts
from polaformer.tasks.detection.detections import Detections

SLICE = Path(__file__).resolve().parents[4] / "shared" / "data" / "coco-slice-480"


def scenes(seed: int, number: int = 8) -> list[Scene]:
    return [scene(image, seed, many=image == number - 1) for image in range(1, number + 1)]


def check_against_pycocotools(counts: DetectionCounts, truths: list[dict[str, Any]]) -> None:
    record, per_class = counts.record(), counts.per_class()
    for kind in counts.kinds:
        numbers, classes = by_pycocotools(counts, truths, kind)
        assert [record[f"{kind}_{name}"] for name in NAMES] == pytest.approx(list(numbers.values()), abs=1e-9, nan_ok=True)
        ours = [(one.box_ap, one.box_ap50) if kind == "box" else (one.mask_ap, one.mask_ap50) for one in per_class]
        assert ours == [pytest.approx(one, abs=1e-9, nan_ok=True) for one in classes]


@pytest.mark.parametrize("seed", range(5))
def test_all_numbers_are_those_of_pycocotools(seed: int) -> None:
    """With crowds, images without objects, equal scores, more than 100 detections, all sizes, and a class without objects."""
    found = scenes(seed)
    counts = counted(found)
    check_against_pycocotools(counts, [truth for _, truth in found])
    record = counts.record()
    assert 0 < record["box_AP"] < 100
    assert 0 < record["mask_AP50"] < 100
    assert math.isnan(counts.per_class()[-1].box_ap)


def test_the_scenes_have_what_they_are_said_to_have() -> None:
    found = [one for seed in range(5) for one in scenes(seed)]
    objects = [shown for _, truth in found for shown in truth["annotations"]]
    assert any(not truth["annotations"] for _, truth in found)
    assert any(shown["iscrowd"] for shown in objects)
    assert {int(np.searchsorted([32**2, 96**2], shown["area"])) for shown in objects if not shown["iscrowd"]} == {0, 1, 2}
    assert any(len(detections.scores) > 100 for detections, _ in found)
    assert any(len(detections.scores.unique()) < len(detections.scores) for detections, _ in found)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_numbers_are_exactly_equal_for_any_number_of_processes_in_any_order(number: int) -> None:
    found = scenes(11)
    whole = DetectionCounts.merge([counted(found)])
    for order in (range(len(found)), reversed(range(len(found)))):
        shuffled = [found[index] for index in order]
        parts = [counted(shuffled[start::number]) for start in range(number)]
        parts[-1].bad.append("b.jpg")
        parts[0].bad.append("a.jpg")
        merged = DetectionCounts.merge([pickle.loads(pickle.dumps(part)) for part in [*parts, DetectionCounts(5, True)]])
        assert merged.record() == whole.record()
        assert repr(merged.per_class()) == repr(whole.per_class())
        assert merged.curves() == whole.curves()
        assert merged.results(range(5), "mask") == whole.results(range(5), "mask")
        assert merged.bad == ["a.jpg", "b.jpg"]


def test_counts_are_compact_and_do_not_send_what_can_be_computed_again() -> None:
    counts = counted(scenes(3), with_masks=False)
    before = len(pickle.dumps(counts))
    num_detections = counts.record()["detections"]
    assert len(pickle.dumps(counts)) == before < 24 * num_detections + 2500 * len(counts.images)


@pytest.mark.parametrize("with_masks", [False, True])
def test_nothing_was_counted_or_there_is_nothing_to_find(with_masks: bool) -> None:
    empty = DetectionCounts(3, with_masks)
    nothing = Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.long), torch.zeros(0, 1, 28, 28))
    one = counted([(nothing, {"image_id": 1, "height": 9, "width": 9, "annotations": []})], with_masks=with_masks)
    for counts, samples in ((empty, 0), (one, 1)):
        record = counts.record()
        assert (record.pop("samples"), record.pop("detections")) == (samples, 0)
        assert len(record) == 12 * (1 + with_masks)
        assert all(math.isnan(value) for value in record.values())
        assert counts.summary()["box AP"] == "–"
        assert not any(counts.curves().values())
        assert all(result.num_objects == 0 and math.isnan(result.box_ap) for result in counts.per_class())
        assert counts.results(range(counts.num_classes)) == []


def test_objects_that_nothing_was_found_of_count_as_missed() -> None:
    _, truth = scene(3, 0)
    assert truth["annotations"]
    nothing = Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.long), torch.zeros(0, 1, 28, 28))
    record = counted([(nothing, truth)]).record()
    assert record["box_AP"] == record["mask_AP"] == record["box_AR100"] == 0.0


def test_an_object_whose_mask_is_unknown_is_neither_found_nor_missed() -> None:
    size = (50, 60)
    known = annotation(1, [5.0, 6.0, 20.0, 30.0], 0, size)
    unknown = annotation(2, [30.0, 6.0, 20.0, 30.0], 0, size) | {"segmentation": None}
    truth = {"image_id": 7, "height": 50, "width": 60, "annotations": [known, unknown]}
    boxes = torch.tensor([[30.0, 6.0, 50.0, 36.0], [5.0, 6.0, 25.0, 36.0]])
    found = Detections(boxes, torch.tensor([0.9, 0.5]), torch.tensor([0, 0]), torch.ones(2, 1, 28, 28))
    record = counted([(found, truth)], num_classes=1).record()
    assert record["box_AP50"] == record["mask_AP50"] == pytest.approx(100)
    first = counted([(Detections(*(field[:1] for field in found)), truth)], num_classes=1).record()  # type: ignore[index]
    assert (first["box_AR100"], first["mask_AR100"]) == (50.0, 0.0)


def test_a_perfect_detector_gets_everything_and_its_curve_is_flat() -> None:
    truth = {"image_id": 7, "height": 50, "width": 60, "annotations": [annotation(1, [5.0, 6.0, 20.0, 30.0], 1, (50, 60))]}
    found = Detections(torch.tensor([[5.0, 6.0, 25.0, 36.0]]), torch.tensor([0.5]), torch.tensor([1]), None)
    counts = counted([(found, truth)], num_classes=2, with_masks=False)
    record = counts.record()
    assert record["box_AP"] == record["box_AP50"] == record["box_AR1"] == pytest.approx(100)
    assert counts.summary()["box AP"] == "100.0 %"
    assert set(counts.curves()) == {"box, IoU ≥ 0.5", "box, IoU ≥ 0.75"}
    assert counts.curves()["box, IoU ≥ 0.5"][::50] == [(0.0, 1.0), (0.5, 1.0), (1.0, 1.0)]
    assert [result.num_objects for result in counts.per_class()] == [0, 1]


def test_the_curve_is_the_mean_of_cocos_precision_and_its_area_is_ap() -> None:
    counts = counted(scenes(2))
    record = counts.record()
    for kind, threshold, name in (("box", 0.5, "AP50"), ("mask", 0.75, "AP75")):
        points = counts.curves()[f"{kind}, IoU ≥ {threshold}"]
        assert [recall for recall, _ in points] == pytest.approx(np.linspace(0, 1, 101).tolist())
        assert 100 * np.mean([precision for _, precision in points]) == pytest.approx(record[f"{kind}_{name}"])


def test_results_are_cocos_json_with_the_ids_of_the_file() -> None:
    truth = {"image_id": 7, "height": 50, "width": 60, "annotations": []}
    mask = torch.ones(1, 1, 28, 28)
    found = Detections(torch.tensor([[5.0, 6.0, 25.5, 36.0]]), torch.tensor([0.5]), torch.tensor([1]), mask)
    counts = counted([(found, truth)], num_classes=2)
    about = {"image_id": 7, "category_id": 90, "score": 0.5}
    assert json.loads(json.dumps(counts.results((17, 90)))) == [{**about, "bbox": [5.0, 6.0, 20.5, 30.0]}]
    [shown] = json.loads(json.dumps(counts.results((17, 90), "mask")))
    assert shown["segmentation"]["size"] == [50, 60]
    assert "bbox" not in shown
    with pytest.raises(ValueError, match="3 category ids for 2 classes"):
        counts.results((1, 2, 3))
    with pytest.raises(ValueError, match="no results of kind 'mask'"):
        counted([(found, truth)], num_classes=2, with_masks=False).results((1, 2), "mask")


def test_an_image_is_not_counted_twice() -> None:
    found = scenes(0)
    counts = counted(found)
    with pytest.raises(ValueError, match="image 1 was counted twice"):
        counts.add_image(*found[0])
    with pytest.raises(ValueError, match="1 images were counted twice"):
        DetectionCounts.merge([counted(found[:3]), counted(found[2:])])


class Finding(torch.nn.Module):
    """A detector that gives what it is told, and remembers what it was asked."""

    def __init__(self, detections: list[Detections]) -> None:
        super().__init__()
        self.detections = detections

    def forward(self, images: Any, mask: Any, sizes: Any) -> list[Detections]:
        self.asked = (images, mask, sizes)
        return self.detections


def test_a_batch_is_counted_in_the_pixels_of_the_original_images() -> None:
    size = (40, 30)
    truth = {"image_id": 5, "height": 80, "width": 60, "annotations": [annotation(1, [10.0, 20.0, 30.0, 40.0], 0, (80, 60))]}
    masks = torch.zeros(1, 1, 28, 28)
    masks[..., 3:25, 3:25] = 1
    halved = Detections(torch.tensor([[5.0, 10.0, 20.0, 30.0]]), torch.tensor([0.9]), torch.tensor([0]), masks)
    batch: Any = SimpleNamespace(images="images", mask="mask", sizes=[size], truths=[truth], bad=["x"], __len__=lambda: 1)
    counts, model = DetectionCounts(1, True), Finding([halved])
    counts.add(model, Batch(batch))
    assert model.asked == ("images", "mask", [size])
    assert counts.bad == ["x"]
    assert counts.record()["box_AP"] == pytest.approx(100)
    assert counts.record()["mask_AP50"] == pytest.approx(100)
    assert counts.results((1,))[0]["bbox"] == [10.0, 20.0, 30.0, 40.0]


class Batch:
    """The fields of a batch with one image."""

    def __init__(self, fields: SimpleNamespace) -> None:
        self.__dict__ |= fields.__dict__

    def __len__(self) -> int:
        return len(self.truths)


def test_a_batch_of_unreadable_images_asks_the_model_nothing() -> None:
    counts = DetectionCounts(1)
    counts.add(torch.nn.Identity(), Batch(SimpleNamespace(bad=["a", "b"], truths=[])))  # type: ignore[arg-type]
    assert (counts.bad, counts.images) == (["a", "b"], {})


def test_a_model_without_masks_is_refused_where_masks_are_counted() -> None:
    found, truth = scene(3, 0)
    with pytest.raises(ValueError, match="the model gives none"):
        counted([(found._replace(masks=None), truth)])


def test_evaluating_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    counts = counted(scenes(4))
    counts.record(), counts.summary(), counts.per_class(), counts.curves()
    assert capfd.readouterr() == ("", "")


@pytest.mark.long
@pytest.mark.skipif(not SLICE.is_dir(), reason="the COCO slice is not beside this checkout")
def test_jittered_boxes_of_coco_get_the_numbers_of_pycocotools() -> None:
    file = json.loads((SLICE / "annotations" / "instances_val2017.json").read_text())
    index = {category["id"]: label for label, category in enumerate(file["categories"])}
    truths = {one["id"]: {"image_id": one["id"], "height": one["height"], "width": one["width"]} for one in file["images"]}
    for truth in truths.values():
        truth["annotations"] = []
    for one in file["annotations"]:
        truths[one["image_id"]]["annotations"].append(one | {"category_id": index[one["category_id"]]})
    random = np.random.default_rng(0)
    found = [(jittered(truth, random), truth) for truth in truths.values()]
    counts = counted(found, num_classes=80, with_masks=True)
    check_against_pycocotools(counts, list(truths.values()))
    assert 20 < counts.record()["box_AP"] < 80


def jittered(truth: dict[str, Any], random: np.random.Generator) -> Detections:
    boxes = np.array([one["bbox"] for one in truth["annotations"]]).reshape(-1, 4)
    boxes = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    labels = np.array([one["category_id"] for one in truth["annotations"]], dtype=np.int64)
    sides = np.tile(boxes[:, 2:] - boxes[:, :2], 2)
    return Detections(
        torch.tensor(boxes + random.normal(0, 0.07, boxes.shape) * sides, dtype=torch.float32),
        torch.tensor(random.random(len(boxes)).round(2), dtype=torch.float32),
        torch.tensor(np.where(random.random(len(labels)) < 0.1, 0, labels)),
        torch.ones(len(boxes), 1, 28, 28),
    )
