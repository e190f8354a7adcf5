"""Images and label maps are moved together, as a slow and obvious pipeline moves them."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from PIL.Image import Resampling

from polaformer.data.segmentation_transforms import MAX_TRIES, RandomScaleCrop, ResizeShorter
from polaformer.data.sources.label_sets import IGNORED
from polaformer.data.views import View, rounded_size
from polaformer.errors import SettingsError
from semantic_files import mask, picture

HEIGHT, WIDTH = 60, 80
PLAIN = RandomScaleCrop(size=32, base=(48, 160), photometric=False, max_class_share=1)


def sample(seed: int = 0, height: int = HEIGHT, width: int = WIDTH) -> tuple[Image.Image, np.ndarray]:
    """A smooth image, and a label map of blocks."""
    small = Image.fromarray(picture(seed, -(-height // 8), -(-width // 8)))
    return small.resize((width, height), Resampling.BICUBIC), mask(seed, height, width, (0, 1, 2, IGNORED))


def array(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(np.int64)


def share_of_largest(labels: np.ndarray) -> float:
    counts = np.bincount(labels[labels != IGNORED], minlength=1)
    return float(counts.max() / max(1, counts.sum()))


# Sizes


@pytest.mark.parametrize(
    ("size", "shorter", "longest", "wanted"),
    [
        ((480, 640), 512, 2048, (512, 683)),  # 682.67
        ((512, 683), 512, 2048, (512, 683)),
        ((300, 400), 512, 2048, (512, 683)),
        ((225, 336), 512, 2048, (512, 765)),  # 764.59
        ((200, 1000), 512, 2048, (410, 2048)),  # 409.6
        ((1000, 200), 256, 1024, (1024, 205)),
        ((1, 65_000), 512, 2048, (1, 2048)),
    ],
)
def test_sides_are_rounded_to_the_nearest_number(
    size: tuple[int, int], shorter: int, longest: int, wanted: tuple[int, int]
) -> None:
    assert rounded_size(size, shorter, longest) == wanted


@given(height=st.integers(1, 5000), width=st.integers(1, 5000), shorter=st.integers(1, 900), more=st.integers(0, 900))
def test_law_one_side_is_as_long_as_asked_for(height: int, width: int, shorter: int, more: int) -> None:
    found = rounded_size((height, width), shorter, shorter + more)
    assert min(found) <= shorter
    assert max(found) <= shorter + more
    assert min(found) == shorter or max(found) == shorter + more


# Evaluation


def test_evaluation_resizes_the_image_and_leaves_the_truth_in_original_pixels() -> None:
    image, labels = sample()
    [resized], truth = ResizeShorter(30, 100)(image, labels)
    assert (resized.size, truth is labels) == ((40, 30), True)
    assert np.array_equal(array(resized), array(image.resize((40, 30), Resampling.BILINEAR)))
    [bounded], _ = ResizeShorter(30, 36)(image, labels)
    assert bounded.size == (36, 27)


def test_evaluation_can_keep_the_size() -> None:
    image, labels = sample()
    [same], truth = ResizeShorter(None)(image, labels)
    assert np.array_equal(array(same), array(image))
    assert truth is labels


# Random scales and crops


@pytest.mark.parametrize("seed", range(20))
def test_the_crop_is_that_of_the_resized_image(seed: int) -> None:
    """Resized first and cut out of it, the pixels are the same to rounding, and labels but along edges."""
    image, labels = sample(seed)
    random.seed(seed)
    view = PLAIN.view(Image.fromarray(labels))
    random.seed(seed)
    [seen], seen_labels = PLAIN(image, labels)
    height, width = seen_labels.shape
    assert (seen.height, seen.width) == (height, width) == view.size
    left, top, right, bottom = view.region
    scale = height / (bottom - top), width / (right - left)
    whole = round(HEIGHT * scale[0]), round(WIDTH * scale[1])
    x, y = round(left * scale[1]), round(top * scale[0])
    cut = image.resize(whole[::-1], Resampling.BILINEAR).crop((x, y, x + width, y + height))
    cut_labels = Image.fromarray(labels).resize(whole[::-1], Resampling.NEAREST).crop((x, y, x + width, y + height))
    wanted, wanted_labels = array(cut), array(cut_labels)
    if view.mirrored:
        wanted, wanted_labels = wanted[:, ::-1], wanted_labels[:, ::-1]
    assert np.abs(array(seen) - wanted).max() <= 3
    assert np.abs(array(seen) - wanted).mean() < 0.3
    around = np.lib.stride_tricks.sliding_window_view(np.pad(wanted_labels, 1, mode="edge"), (3, 3))
    assert (around == seen_labels[..., None, None]).any(axis=(2, 3)).all()
    assert (seen_labels != wanted_labels).mean() < 0.06


@pytest.mark.parametrize("mirrored", [False, True])
def test_labels_are_those_of_the_nearest_pixels(mirrored: bool) -> None:
    """Pixel by pixel: the label under the centre of the pixel."""
    labels = mask(1, HEIGHT, WIDTH, (0, 1, 2))
    view = View((7.3, 5.1, 51.7, 47.9), (37, 53), mirrored)
    found = np.asarray(view.resized(Image.fromarray(labels), Resampling.NEAREST))
    for row in range(37):
        for column in range(53):
            seen = 52 - column if mirrored else column
            y, x = int(5.1 + (row + 0.5) * 42.8 / 37), int(7.3 + (seen + 0.5) * 44.4 / 53)
            assert found[row, column] == labels[y, x]


def test_scales_crops_and_flips_are_what_they_are_said_to_be() -> None:
    """mmsegmentation's numbers for an image of ADE20K: shorter side 256 to 1024, crops of 512."""
    random.seed(0)
    transform, labels = RandomScaleCrop(max_class_share=1), Image.new("L", (640, 480))
    views = [transform.view(labels) for _ in range(2000)]
    factors = []
    for view in views:
        left, top, right, bottom = view.region
        assert 0 <= left < right <= 640
        assert 0 <= top < bottom <= 480
        assert max(view.size) <= 512
        rows, columns = view.size[0] / (bottom - top), view.size[1] / (right - left)
        assert abs(rows / columns - 1) < 0.01
        factors.append(480 * rows / 512)
        assert view.size[0] == min(512, round(480 * rows))
    assert 0.49 < min(factors) < 0.52
    assert 1.98 < max(factors) < 2.01
    assert abs(float(np.mean(factors)) - 1.25) < 0.03
    assert 900 < sum(view.mirrored for view in views) < 1100
    tops = [
        view.region[1] / (480 - (view.region[3] - view.region[1])) for view in views if view.region[3] - view.region[1] < 470
    ]
    assert min(tops) < 0.02
    assert max(tops) > 0.98


def test_an_image_of_the_size_of_the_base_is_not_resampled() -> None:
    image, labels = sample()
    [same], same_labels = RandomScaleCrop(100, (60, 200), (1, 1), hflip=0, photometric=False)(image, labels)
    assert np.array_equal(array(same), array(image))
    assert np.array_equal(same_labels, labels)
    [mirrored], mirrored_labels = RandomScaleCrop(100, (60, 200), (1, 1), hflip=1, photometric=False)(image, labels)
    assert np.array_equal(array(mirrored), array(image)[:, ::-1])
    assert np.array_equal(mirrored_labels, labels[:, ::-1])


def test_the_longest_side_bounds_the_scale() -> None:
    random.seed(0)
    wide = Image.new("L", (400, 10))
    for _ in range(50):
        view = RandomScaleCrop(512, (64, 100), (1, 1)).view(wide)
        assert view.size == (3, 100)  # 2.5, rounded up


# The class-ratio rule


def halves(ignored: bool = False) -> np.ndarray:
    """The left tenth is class 1; the rest is class 0, or is ignored."""
    labels = np.full((100, 200), IGNORED if ignored else 0, dtype=np.uint8)
    labels[:, :20] = 1
    return labels


def test_crops_in_which_one_class_is_too_large_are_drawn_again() -> None:
    transform = RandomScaleCrop(40, (100, 400), (1, 1), hflip=0, photometric=False)

    def shares(one: RandomScaleCrop) -> np.ndarray:
        random.seed(0)
        image, labels = Image.new("RGB", (200, 100)), halves()
        return np.array([share_of_largest(one(image, labels)[1]) for _ in range(400)])

    first, drawn = shares(replace(transform, max_class_share=1)), shares(transform)
    mixed = float((first < 0.75).mean())
    assert 0.05 < mixed < 0.2
    # Ten crops may fail, and the eleventh is taken as it is.
    assert abs(float((drawn < 0.75).mean()) - (1 - (1 - mixed) ** (MAX_TRIES + 1))) < 0.08


def test_the_crop_that_is_taken_is_the_first_that_a_slow_pipeline_takes() -> None:
    """The rule on whole arrays: counts of the labels that are there, without those that are ignored."""
    labels = mask(3, 64, 64, (0, 0, 0, 0, 1, IGNORED))
    image = Image.fromarray(labels).convert("RGB")
    transform = RandomScaleCrop(12, (64, 256), (1, 1), hflip=0, photometric=False, max_class_share=0.7)

    def slow() -> np.ndarray:
        random.uniform(1, 1)
        for attempt in range(11):
            top, left = random.randint(0, 52), random.randint(0, 52)
            crop = labels[top : top + 12, left : left + 12]
            values, counts = np.unique(crop[crop != IGNORED], return_counts=True)
            if attempt < 10 and len(values) > 1 and counts.max() / counts.sum() < 0.7:
                break
        return crop

    differ = 0
    for seed in range(100):
        random.seed(seed)
        wanted = slow()
        random.seed(seed)
        assert np.array_equal(np.asarray(transform(image, labels)[0][0])[..., 0], wanted)
        random.seed(seed)
        differ += not np.array_equal(np.asarray(replace(transform, max_class_share=1)(image, labels)[0][0])[..., 0], wanted)
    assert 30 < differ < 100


def test_ignored_pixels_count_for_no_class_and_one_class_alone_is_taken_in_the_end() -> None:
    transform = RandomScaleCrop(40, (100, 400), (1, 1), photometric=False)
    for labels in (halves(ignored=True), np.full((100, 200), IGNORED, np.uint8), np.zeros((100, 200), np.uint8)):
        _, found = transform(Image.new("RGB", (200, 100)), labels)
        assert found.shape == (40, 40)


# Laws


@given(height=st.integers(1, 300), width=st.integers(1, 300), seed=st.integers(0, 2**32), mode=st.sampled_from(["RGB", "L"]))
def test_law_any_image_has_a_view(height: int, width: int, seed: int, mode: str) -> None:
    random.seed(seed)
    labels = np.random.default_rng(seed).choice(np.array([0, 1, IGNORED], np.uint8), (height, width))
    [image], found = RandomScaleCrop(16, (12, 40))(Image.new(mode, (width, height)), labels)
    assert (image.height, image.width) == found.shape
    assert max(found.shape) <= 16
    assert (image.mode, found.dtype) == (mode, np.uint8)
    assert set(np.unique(found)) <= set(np.unique(labels))


@pytest.mark.parametrize(("height", "width"), [(1, 65_000), (65_000, 1), (1, 1), (3, 20_000)])
def test_extreme_shapes_become_small_images(height: int, width: int) -> None:
    for transform in (RandomScaleCrop(), ResizeShorter(512, 2048)):
        [image], labels = transform(Image.new("RGB", (width, height)), np.zeros((height, width), np.uint8))
        assert max(image.size) <= 2048
        assert labels.size


def test_a_sample_depends_on_the_seed_alone() -> None:
    image, labels = sample()
    transform, found = RandomScaleCrop(40, (48, 160)), []
    for seed in (1, 2, 1):
        random.seed(seed)
        drawn = [transform(image, labels) for _ in range(3)]
        found.append([np.asarray(one) for views, seen in drawn for one in (*views, seen)])
    assert all(np.array_equal(one, other) for one, other in zip(found[0], found[2], strict=True))
    assert not all(np.array_equal(one, other) for one, other in zip(found[0], found[1], strict=True))


def test_the_given_image_and_labels_stay_as_they_are() -> None:
    image, labels = sample()
    before = image.tobytes(), labels.tobytes()
    for seed in range(5):
        random.seed(seed)
        RandomScaleCrop(40, (48, 160))(image, labels)
    assert (image.tobytes(), labels.tobytes()) == before


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ResizeShorter(800, 700), "resized to 800 pixels and the longer to at most 700; give 1 ≤ shorter ≤ longest"),
        (lambda: ResizeShorter(0), "resized to 0 pixels"),
        (lambda: RandomScaleCrop(0), "the size of a crop is 0; give at least 1 pixel"),
        (lambda: RandomScaleCrop(base=(512, 100)), "resized to 512 pixels and the longer to at most 100"),
        (lambda: RandomScaleCrop(scales=(2, 0.5)), "scales is (2, 0.5); give two positive numbers, the smaller one first"),
        (lambda: RandomScaleCrop(scales=(0, 1)), "scales is (0, 1)"),
        (lambda: RandomScaleCrop(scales=(float("nan"), 1)), "scales is (nan, 1)"),
        (lambda: RandomScaleCrop(hflip=-1), "hflip is -1; give a number in [0, 1]"),
        (lambda: RandomScaleCrop(max_class_share=0), "max_class_share is 0; give a number in (0, 1]"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any, told: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make()
    assert told in str(caught.value)
