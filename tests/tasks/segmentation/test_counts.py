"""The numbers of an evaluation: exact, as loops over pixels give them, whatever the number of processes."""

import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from polaformer.data.sources.label_sets import IGNORED
from polaformer.tasks.segmentation.counts import ClassIoU, MissedPixels, SegmentationCounts, confusion_matrix
from polaformer.tasks.segmentation.inference_settings import Inference

K = 5
Pair = tuple[Tensor, Tensor]  # predicted and true classes of an image


def pairs(seed: int, number: int = 7, num_classes: int = K) -> list[Pair]:
    """Images of different sizes with ignored pixels; the last class is never true, and the one before it never predicted."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(number):
        size = tuple(random.integers(3, 12, 2))
        predicted = random.choice([0, 1, 2, num_classes - 1], size)
        truth = np.where(random.random(size) < 0.6, predicted, random.integers(0, num_classes - 1, size))
        truth = np.where((random.random(size) < 0.2), IGNORED, np.where(truth == num_classes - 1, 0, truth))
        found.append((torch.tensor(predicted, dtype=torch.uint8), torch.tensor(truth, dtype=torch.uint8)))
    return found


def counted(images: list[Pair], num_classes: int = K, *, first: int = 0) -> SegmentationCounts:
    counts = SegmentationCounts(num_classes, Inference())
    for index, (predicted, truth) in enumerate(images, first):
        counts.add_image(index, predicted, truth)
    return counts


def by_hand(images: list[Pair], num_classes: int = K) -> dict[str, float]:
    """The numbers from sets of pixels, with fractions."""
    pixels = [
        (index, *place, int(true), int(predicted[place]))
        for index, (predicted, truth) in enumerate(images)
        for place, true in np.ndenumerate(truth.numpy())
        if true != IGNORED
    ]
    ious, accuracies = [], []
    for label in range(num_classes):
        true = {pixel[:3] for pixel in pixels if pixel[3] == label}
        found = {pixel[:3] for pixel in pixels if pixel[4] == label}
        if true | found:
            ious.append(Fraction(len(true & found), len(true | found)))
        if true:
            accuracies.append(Fraction(len(true & found), len(true)))
    right = sum(pixel[3] == pixel[4] for pixel in pixels)
    return {
        "samples": len(images),
        "pixels": len(pixels),
        "mIoU": float(100 * sum(ious) / len(ious)),
        "pixel_accuracy": 100 * right / len(pixels),
        "mean_accuracy": float(100 * sum(accuracies) / len(accuracies)),
    }


@pytest.mark.parametrize("seed", range(4))
def test_the_numbers_are_those_of_sets_of_pixels(seed: int) -> None:
    images = pairs(seed)
    record = counted(images).record()
    assert {name: record[name] for name in by_hand(images)} == pytest.approx(by_hand(images), abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_the_constant_baseline_is_what_a_constant_prediction_gets(seed: int) -> None:
    images = pairs(seed)
    truth = torch.cat([one.flatten() for _, one in images])
    most = torch.bincount(truth[truth != IGNORED].long()).argmax()
    constant = [(torch.full_like(one, int(most)), one) for _, one in images]
    assert counted(images).record()["constant_mIoU"] == pytest.approx(counted(constant).record()["mIoU"], abs=1e-12)


def test_iou_is_the_intersection_over_the_union() -> None:
    truth = torch.tensor([[0, 0, 1, 1], [0, 0, 1, IGNORED]], dtype=torch.uint8)
    predicted = torch.tensor([[0, 0, 0, 1], [0, 2, 1, 2]], dtype=torch.uint8)
    zero, one, two, three = counted([(predicted, truth)], 4).per_class()
    assert zero == ClassIoU(0, 4, 4, 60.0, 75.0)
    assert one == ClassIoU(1, 3, 2, pytest.approx(200 / 3), pytest.approx(200 / 3))
    assert two[:4] == (2, 0, 1, 0.0)
    assert math.isnan(two.accuracy)
    assert three[:3] == (3, 0, 0)
    assert math.isnan(three.iou)


def test_a_class_that_is_neither_true_nor_predicted_is_not_in_the_mean() -> None:
    truth = torch.tensor([[0, 1]], dtype=torch.uint8)
    assert counted([(truth, truth)], 200).record()["mIoU"] == 100.0
    missed = torch.tensor([[0, 0]], dtype=torch.uint8)
    assert counted([(missed, truth)], 200).record()["mIoU"] == 25.0


def test_a_class_in_another_image_counts_once_for_the_whole_set() -> None:
    """mIoU is not a mean over images."""
    one, other = torch.zeros(1, 9, dtype=torch.uint8), torch.ones(1, 1, dtype=torch.uint8)
    wrong = torch.zeros(1, 1, dtype=torch.uint8)
    assert counted([(one, one), (wrong, other)]).record()["mIoU"] == pytest.approx(100 * (0.9 + 0) / 2)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_numbers_are_exactly_equal_for_any_number_of_processes_in_any_order(number: int) -> None:
    images = pairs(11)
    whole = counted(images)
    for order in (range(len(images)), range(len(images) - 1, -1, -1)):
        parts = [SegmentationCounts(K, Inference()) for _ in range(number)]
        for place, index in enumerate(order):
            parts[place % number].add_image(index, *images[index])
        parts[-1].bad.append("b.jpg")
        parts[0].bad.append("a.jpg")
        merged = SegmentationCounts.merge(
            [pickle.loads(pickle.dumps(part)) for part in [*parts, SegmentationCounts(K, Inference())]]
        )
        assert merged.record() == whole.record()
        assert repr(merged.per_class()) == repr(whole.per_class())
        assert torch.equal(merged.confusion, whole.confusion)
        assert merged.images == whole.images
        assert merged.most_missed == whole.most_missed
        assert merged.bad == ["a.jpg", "b.jpg"]


def test_the_image_that_misses_most_of_a_class_is_known() -> None:
    """The first of equals; of a class that is always found there is none."""
    images = [([[0, 0, 1, 1, 2]], [[0, 0, 1, 2, 2]]), ([[0, 1, 1, 1, 2]], [[0, 0, 0, 0, 2]]), ([[0, 1, 0, 0, 0]], [[2] * 5])]
    counts = counted([(torch.tensor(found), torch.tensor(true)) for true, found in images])
    assert counts.most_missed == {1: MissedPixels(3, 1), 0: MissedPixels(4, 2)}


def test_an_image_that_is_counted_twice_is_an_error() -> None:
    images = pairs(0, 1)
    with pytest.raises(ValueError, match="image 0 was counted twice"):
        counted(images).add_image(0, *images[0])
    with pytest.raises(ValueError, match="images counted twice: 1; each image has one index"):
        SegmentationCounts.merge([counted(images), counted(images)])
    with pytest.raises(ValueError, match=r"\(2, 3\) predicted classes for \(3, 2\) pixels"):
        counted([]).add_image(0, torch.zeros(2, 3), torch.zeros(3, 2))


def test_nothing_was_counted_or_everything_is_ignored() -> None:
    ignored = torch.full((3, 3), IGNORED, dtype=torch.uint8)
    for counts, samples in ((counted([]), 0), (counted([(torch.zeros_like(ignored), ignored)]), 1)):
        record = counts.record()
        assert (record.pop("samples"), record.pop("pixels")) == (samples, 0)
        assert all(math.isnan(value) for value in record.values())
        assert set(counts.summary().values()) == {"–"}
        assert all(image.accuracy == 1.0 for image in counts.images.values())


def test_numbers_of_pixels_beyond_32_bits_are_exact() -> None:
    counts = SegmentationCounts(2, Inference(), torch.tensor([[2**53 + 1, 0], [0, 2**40]]))
    assert counts.per_class()[0].num_pixels == 2**53 + 1
    assert counts.record()["pixels"] == 2**53 + 1 + 2**40
    assert counts.record()["mIoU"] == 100.0


def test_the_largest_number_of_classes_has_no_place_for_ignored_pixels() -> None:
    """Pixels with the label 254 count, those with 255 do not."""
    truth = torch.tensor([[254, IGNORED, 0]], dtype=torch.uint8)
    confusion = confusion_matrix(torch.tensor([[254, 254, 254]], dtype=torch.uint8), truth, 255)
    assert (int(confusion.sum()), int(confusion[254, 254]), int(confusion[0, 254])) == (2, 1, 1)


def test_counts_of_a_large_set_are_small_to_send() -> None:
    counts = SegmentationCounts(150, Inference())
    for index in range(500):
        counts.add_image(index, torch.zeros(8, 8), torch.zeros(8, 8, dtype=torch.uint8))
    assert len(pickle.dumps(counts)) < 8 * 150**2 + 100 * 500 + 10_000
