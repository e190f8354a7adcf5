"""What the report shows of a detector."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from detections import Scene, annotation, counted, scene
from polaformer.data.colours import class_colours
from polaformer.errors import ImageError
from polaformer.tasks.detection.counts import DetectionCounts
from polaformer.tasks.detection.detections import Detections
from polaformer.tasks.detection.figures import ObjectRecall, _box_iou, collect_figures, found_objects
from polaformer.tasks.figures import Curves, Pictures, Rows, Text

CLASSES = ("cat", "dog", "mouse", "horse", "cow")
SIZE = (100, 120)


class Shown:
    """Grey images of the sizes of the truths; some cannot be read."""

    classes = CLASSES

    def __init__(self, truths: list[dict[str, Any]], unreadable: tuple[int, ...] = ()) -> None:
        self.truths, self.unreadable = truths, unreadable

    def __len__(self) -> int:
        return len(self.truths)

    def image_id(self, index: int) -> int:
        return self.truths[index]["image_id"]

    def name(self, index: int) -> str:
        return f"{self.image_id(index)}.jpg"

    def read(self, index: int, channels: int) -> Image.Image:
        if self.image_id(index) in self.unreadable:
            raise ImageError("damaged")
        return Image.new("RGB", (self.truths[index]["width"], self.truths[index]["height"]), (128, 128, 128))


def image(number: int, boxes: list[list[float]], found: dict[int, float], *, crowds: tuple[int, ...] = ()) -> Scene:
    """An image with a cat in each box; found: the scores of exact detections, by the index of the box."""
    objects = [annotation(index + 1, box, 0, SIZE, crowd=index in crowds) for index, box in enumerate(boxes)]
    corners = torch.tensor([boxes[index] for index in found]).reshape(-1, 4)
    corners = torch.cat([corners[:, :2], corners[:, :2] + corners[:, 2:]], dim=1)
    labels = torch.zeros(len(found), dtype=torch.long)
    detections = Detections(corners, torch.tensor(list(found.values())), labels, torch.ones(len(found), 1, 28, 28))
    return detections, {"image_id": number, "height": SIZE[0], "width": SIZE[1], "annotations": objects}


def boxes(number: int) -> list[list[float]]:
    return [[5.0 + 18 * index, 10.0, 12.0, 60.0] for index in range(number)]


def figures_of(
    scenes: list[Scene], *, unreadable: tuple[int, ...] = (), with_masks: bool = True
) -> tuple[dict[str, Any], DetectionCounts]:
    counts = counted(scenes, with_masks=with_masks)
    source: Any = Shown([truth for _, truth in scenes], unreadable)
    return collect_figures(counts, source), counts


def test_the_images_with_the_lowest_recall_come_first_then_some_at_random() -> None:
    every = dict.fromkeys(range(4), 0.9)
    scenes = [image(number, boxes(4), every) for number in range(1, 8)]
    scenes += [image(8, boxes(2), {}), image(9, boxes(5), {}), image(10, boxes(4), {0: 0.9}), image(11, boxes(1), {})]
    scenes += [image(12, boxes(4), {0: 0.9, 1: 0.9}), image(13, [], {})]
    pictures = figures_of(scenes, unreadable=(8,))[0]["Predictions"]
    assert isinstance(pictures, Pictures)
    titles = [row.title for row in pictures.rows]
    assert titles[:4] == [f"{number}.jpg (lowest recall)" for number in (9, 11, 10, 12)]
    assert len(titles) == len(set(titles)) == 8
    assert all(title.endswith("(drawn at random)") for title in titles[4:])
    captions = [caption for caption, _ in pictures.rows[2].pictures]
    assert captions == ["ground truth: 4 objects", "prediction: 1 detection, 1 of 4 objects found"]
    assert "8.jpg" not in " ".join(titles).split()
    assert "13 validation images" in pictures.caption


def test_pictures_show_objects_and_detections_in_the_colour_of_their_class() -> None:
    [row] = figures_of([image(1, [[20.0, 20.0, 60.0, 60.0]], {0: 0.9})])[0]["Predictions"].rows
    for _, picture in row.pictures:
        assert picture.size == (480, 400)
        assert tuple(np.asarray(picture)[200, 80]) == class_colours(CLASSES)["cat"]
    [empty] = figures_of([image(1, [], {})])[0]["Predictions"].rows
    for _, picture in empty.pictures:
        assert (np.asarray(picture) == 128).all()


def test_a_model_with_low_scores_is_shown_with_its_best_detections() -> None:
    figures, _ = figures_of([image(1, boxes(3), {0: 0.04, 1: 0.015})])
    assert "with a score ≥ 2 %" in figures["Predictions"].caption
    assert [caption for caption, _ in figures["Predictions"].rows[0].pictures][1].startswith("prediction: 1 detection,")


def test_a_caption_does_not_tell_of_images_that_are_not_shown() -> None:
    every = [image(number, boxes(1), {0: 0.9}) for number in (1, 2)]
    assert figures_of(every)[0]["Predictions"].caption.startswith("Of the 2 validation images: 2 at random. ")
    figures, _ = figures_of([image(1, boxes(1), {})])
    wanted = "Of the 1 validation images: 1 with the lowest recall, those with the most objects first. "
    assert figures["Predictions"].caption.startswith(wanted)


def test_nothing_detected_and_nothing_readable_are_reported_too() -> None:
    figures, _ = figures_of([image(1, boxes(2), {}), image(2, [], {})], unreadable=(1, 2))
    assert isinstance(figures["Predictions"], Text)
    nothing: Any = Shown([])
    found = collect_figures(DetectionCounts(5), nothing)
    assert isinstance(found["Predictions"], Text)
    table = found["Average precision by class"]
    assert isinstance(table, Rows)
    assert table.rows == []


def test_an_object_is_found_once_by_its_class_and_crowds_are_not_counted() -> None:
    one, two = boxes(2)
    twice = image(1, [one, two, [70.0, 10.0, 40.0, 40.0]], {0: 0.9, 2: 0.8}, crowds=(2,))
    again = twice[0]._replace(boxes=twice[0].boxes[[0, 0]])
    found, other = counted([twice]), counted([(again, twice[1])])
    assert found_objects(found.images[1], 0.5) == found_objects(other.images[1], 0.5) == ObjectRecall(1, 2)
    assert found_objects(found.images[1], 0.95) == ObjectRecall(0, 2)
    as_dog = counted([(again._replace(labels=torch.ones(2, dtype=torch.long)), twice[1])])
    assert found_objects(as_dog.images[1], 0.5).num_found == 0


def test_a_recall_over_all_detections_is_that_of_coco() -> None:
    scenes = [image(number, boxes(5), dict.fromkeys(range(number), 0.5)) for number in range(1, 5)]
    counts = counted(scenes)
    found = [found_objects(one, 0.0) for one in counts.images.values()]
    assert sum(one.num_found for one in found) / sum(one.num_objects for one in found) == 0.5
    assert counts.record()["box_AR100"] == pytest.approx(50)


def test_the_overlaps_of_boxes() -> None:
    found = _box_iou(np.array([[0.0, 0, 2, 2], [5, 5, 0, 0]]), np.array([[1.0, 1, 2, 2], [0, 0, 2, 2], [5, 5, 0, 0]]))
    assert found.tolist() == [[1 / 7, 1.0, 0.0], [0.0, 0.0, 0.0]]


def test_curves_and_tables_hold_the_numbers_of_the_counts() -> None:
    figures, counts = figures_of([scene(number, 2) for number in range(1, 9)])
    curves, metrics, classes = (figures[name] for name in list(figures)[1:])
    assert isinstance(curves, Curves)
    assert curves.lines == counts.curves()
    record = counts.record()
    assert metrics.columns == ("metric", "box", "mask")
    assert metrics.rows[0] == ("AP", f"{record['box_AP']:.1f}", f"{record['mask_AP']:.1f}")
    assert [row[0] for row in metrics.rows][3:9] == ["AP small", "AP medium", "AP large", "AR1", "AR10", "AR100"]
    assert len(metrics.rows) == 12
    values = [float(row[2]) for row in classes.rows]
    assert values == sorted(values)
    assert {row[0] for row in classes.rows} == set(CLASSES[:4])
    assert classes.caption.endswith("Without objects: cow.")
    assert len(classes.columns) == len(classes.rows[0]) == 6


def test_a_detector_without_masks_has_tables_without_them() -> None:
    figures, _ = figures_of([scene(number, 2) for number in range(1, 5)], with_masks=False)
    assert figures["COCO metrics"].columns == ("metric", "box")
    assert figures["Average precision by class"].columns == ("class", "objects", "box AP", "box AP50")
    assert set(figures["Precision and recall"].lines) == {"box, IoU ≥ 0.5", "box, IoU ≥ 0.75"}
