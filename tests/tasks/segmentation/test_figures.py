"""What the report shows of a segmenter."""

from typing import Any

import numpy as np
import torch
from PIL import Image

from polaformer.data.sources.label_sets import IGNORED
from polaformer.errors import ImageError
from polaformer.tasks.figures import Confusion, Pictures, Rows, Text
from polaformer.tasks.segmentation.counts import SegmentationCounts
from polaformer.tasks.segmentation.figures import collect_figures
from polaformer.tasks.segmentation.inference_settings import Inference

CLASSES = ("sky", "grass", "house", "boat")
COLOURS = ((96, 128, 192), (48, 160, 64), (192, 48, 32), (0, 0, 0))
SIZE = (10, 20)


def truth(wrong: int = 0, label: int = 2) -> np.ndarray:
    """Sky over grass, with a row of ignored pixels; `wrong` pixels at the top are houses, or something else."""
    labels = np.zeros(SIZE, dtype=np.uint8)
    labels[5:] = 1
    labels[-1] = IGNORED
    labels.reshape(-1)[:wrong] = label
    return labels


class Scenes:
    """Grey images, of which a segmenter that knows sky and grass alone gets some pixels wrong; some cannot be read."""

    classes = CLASSES

    def __init__(self, wrong: list[int], unreadable: tuple[int, ...] = (), boats: tuple[int, ...] = ()) -> None:
        self.truths = [truth(number, 3 if index in boats else 2) for index, number in enumerate(wrong)]
        self.unreadable = unreadable

    def name(self, index: int) -> str:
        return f"{index}.png"

    def pair(self, index: int) -> tuple[Image.Image, np.ndarray]:
        if index in self.unreadable:
            raise ImageError("damaged")
        return Image.new("RGB", SIZE[::-1], (128, 128, 128)), self.truths[index]


class Constant:
    """Sees sky over grass everywhere."""

    classes, colours = CLASSES, COLOURS

    def segment(self, image: Image.Image) -> np.ndarray:
        return np.where(truth() == IGNORED, 1, truth())


def figures_of(
    wrong: list[int], unreadable: tuple[int, ...] = (), boats: tuple[int, ...] = ()
) -> tuple[dict[str, Any], SegmentationCounts]:
    source, predictor = Scenes(wrong, unreadable, boats), Constant()
    counts = SegmentationCounts(len(CLASSES), Inference())
    for index, labels in enumerate(source.truths):
        counts.add_image(index, torch.tensor(predictor.segment(source.pair(-1)[0])), torch.tensor(labels))
    return collect_figures(counts, source, predictor), counts  # type: ignore[arg-type]


def test_the_images_that_miss_most_of_the_worst_classes_come_first_then_some_at_random() -> None:
    found, _ = figures_of([0, 0, 5, 80, 40, 0, 20, 60, 0, 0, 0], boats=(4, 6), unreadable=(7,))
    assert next(iter(found)) == "IoU by class"
    pictures = found["Predictions"]
    assert isinstance(pictures, Pictures)
    titles = [row.title for row in pictures.rows]
    assert titles[:2] == ["3.png (misses house, IoU 0.0 %)", "4.png (misses boat, IoU 0.0 %)"]
    assert len(titles) == len(set(titles)) == 6
    assert all(title.endswith("(drawn at random)") for title in titles[2:])
    assert "7.png" not in " ".join(titles)
    assert "11 validation images" in pictures.caption


def test_image_truth_and_prediction_stand_side_by_side_in_the_colours_of_the_classes() -> None:
    [row] = figures_of([45])[0]["Predictions"].rows
    captions, pictures = zip(*row.pictures, strict=True)
    assert captions == ("image", "ground truth", "prediction: 75.0 % of the pixels right")
    image, true, predicted = (np.asarray(one)[:240, :480].astype(int) for one in pictures)
    assert image.shape[:2] == (240, 480)
    house, sky, grass = (20, 240), (80, 400), (180, 240)  # places in the picture
    nearest = [
        [min(range(3), key=lambda label: np.abs(np.array(COLOURS[label]) - one[place]).sum()) for place in (house, sky, grass)]
        for one in (true, predicted)
    ]
    assert nearest == [[2, 0, 1], [0, 0, 1]]
    assert (image == 128).all()
    assert (true[-10:] == 128).all()  # ignored


def test_an_image_without_a_labelled_pixel_is_shown_without_a_share() -> None:
    source: Any = Scenes([0])
    source.truths[0][:] = IGNORED
    counts = SegmentationCounts(len(CLASSES), Inference())
    counts.add_image(0, torch.zeros(SIZE), torch.tensor(source.truths[0]))
    predictor: Any = Constant()
    [row] = collect_figures(counts, source, predictor)["Predictions"].rows  # type: ignore[union-attr]
    assert [caption for caption, _ in row.pictures][2] == "prediction"


def test_the_table_has_the_classes_with_the_lowest_iou_first_and_names_those_that_are_missing() -> None:
    found, counts = figures_of([45, 0])
    table = found["IoU by class"]
    assert isinstance(table, Rows)
    assert [row[0] for row in table.rows] == ["house", "sky", "grass"]
    assert table.rows[0] == ("house", "12.50", "0.00", "0.0", "0.0")
    values = [float(row[3]) for row in table.rows]
    assert values == sorted(values)
    assert abs(sum(values) / 3 - counts.record()["mIoU"]) < 0.05
    assert table.caption.endswith("Neither there nor predicted: boat.")
    confusion = found["Confusion of classes"]
    assert isinstance(confusion, Confusion)
    assert confusion.counts is counts.confusion
    assert confusion.parts == "pixels"


def test_nothing_readable_and_nothing_counted_are_reported_too() -> None:
    source: Any = Scenes([3, 0], unreadable=(0, 1))
    counts, predictor = figures_of([3, 0])[1], Constant()
    assert isinstance(collect_figures(counts, source, predictor)["Predictions"], Text)  # type: ignore[arg-type]
    found, _ = figures_of([])
    assert isinstance(found["Predictions"], Text)
    assert found["IoU by class"].rows == []
