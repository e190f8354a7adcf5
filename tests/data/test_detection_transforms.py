"""Images and annotations are moved together: transforming and rasterising in either order is the same, to the pixel."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from polaformer.data.detection_transforms import AnnotatedView, RandomCrop, RandomView, Resize
from polaformer.data.masks import mask_of, rle_from_mask
from polaformer.data.sources.coco_annotations import Annotation
from polaformer.data.views import resized_size
from polaformer.errors import SettingsError

HEIGHT, WIDTH = 48, 64
WHOLE = (0.0, 0.0, float(WIDTH), float(HEIGHT))
COCO_SCALES = tuple(range(480, 801, 32))


def rectangle(left: float, top: float, right: float, bottom: float) -> np.ndarray:
    return np.array([[left, top], [right, top], [right, bottom], [left, bottom]], dtype=float)


def object_at(left: float, top: float, right: float, bottom: float, segmentation: Any = None) -> Annotation:
    outline = (rectangle(left, top, right, bottom),)
    area = (right - left) * (bottom - top)
    return Annotation((left, top, right, bottom), 1, area, False, outline if segmentation is None else segmentation, 5)


def painted(polygons: Sequence[np.ndarray], size: tuple[int, int] = (HEIGHT, WIDTH)) -> Image.Image:
    """An image that is its own mask, 0 and 255."""
    return Image.fromarray(255 * mask_of(tuple(polygons), size))


def view_of(view: AnnotatedView, one: Annotation) -> tuple[np.ndarray, Annotation | None]:
    """A painted object in a view: the pixels that are at least half covered, and the moved annotation."""
    image, moved = view(painted(one.segmentation), [one])  # type: ignore[arg-type]
    return np.asarray(image) > 127, moved[0] if moved else None


def near_edge(mask: np.ndarray) -> np.ndarray:
    """The pixels that have a neighbour of another kind."""
    padded = np.pad(mask, 1, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3))
    return windows.any(axis=(2, 3)) & ~windows.all(axis=(2, 3))


# Sizes


@pytest.mark.parametrize("size", [(480, 640), (427, 640), (640, 427), (333, 500), (500, 500), (240, 1333), (375, 1242), (3, 4)])
@pytest.mark.parametrize("scale", [1, 10])
def test_the_resized_size_is_that_of_torchvision(size: tuple[int, int], scale: int) -> None:
    shorter, longest = 800 // scale, 1333 // scale
    theirs = GeneralizedRCNNTransform(shorter, longest, [0.5], [0.5])
    images, _ = theirs.eval()([torch.zeros(1, *size)])
    assert images.image_sizes == [resized_size(size, shorter, longest)]


def test_every_size_that_rounding_makes_one_smaller_is_so_in_torchvision() -> None:
    """In floating point, 800 / side · side can be below 800."""
    short = [side for side in range(2, 800) if resized_size((side, side), 800, 1333)[0] != 800]
    assert short
    for side in short:
        image = torch.zeros(1, 1, side, 1)
        scaled = torch.nn.functional.interpolate(image, scale_factor=800 / side, mode="bilinear", recompute_scale_factor=True)
        assert scaled.shape[2] == resized_size((side, side), 800, 1333)[0] == 799


@given(height=st.integers(1, 70_000), width=st.integers(1, 70_000), shorter=st.integers(1, 900), more=st.integers(0, 900))
def test_law_sides_stay_within_their_limits(height: int, width: int, shorter: int, more: int) -> None:
    found = resized_size((height, width), shorter, shorter + more)
    assert 1 <= min(found) <= shorter
    assert max(found) <= shorter + more
    assert min(found) >= shorter - 1 or max(found) >= shorter + more - 1


# Views


def test_boxes_and_polygons_are_moved_exactly() -> None:
    view = AnnotatedView((8.0, 4.0, 40.0, 44.0), (80, 48))
    _, (found,) = view(painted([]), [object_at(10, 6, 24, 30)])
    assert found.box == (3.0, 4.0, 24.0, 52.0)
    assert np.array_equal(found.segmentation[0], rectangle(3, 4, 24, 52))  # type: ignore[index]
    assert (found.label, found.id, found.area) == (1, 5, 14 * 24 * 3)
    _, (mirrored,) = AnnotatedView(view.region, view.size, mirrored=True)(painted([]), [object_at(10, 6, 24, 30)])
    assert mirrored.box == (24.0, 4.0, 45.0, 52.0)
    assert mirrored.segmentation[0].tolist() == [[45, 4], [24, 4], [24, 52], [45, 52]]  # type: ignore[index]


def test_an_unchanged_view_changes_nothing() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8))
    one = object_at(1.25, 2.5, 33.3, 40.1)
    same, (moved,) = AnnotatedView(WHOLE, (HEIGHT, WIDTH))(image, [one])
    assert np.array_equal(np.asarray(same), np.asarray(image))
    assert (moved.box, moved.area) == (one.box, one.area)
    mirrored = AnnotatedView(WHOLE, (HEIGHT, WIDTH), mirrored=True)
    back, _ = mirrored(mirrored(image, [])[0], [])
    assert np.array_equal(np.asarray(back), np.asarray(image))


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize(
    ("region", "size"),
    [
        (WHOLE, (HEIGHT, WIDTH)),
        (WHOLE, (HEIGHT, 2 * WIDTH)),  # at more than twice the size, interpolation rounds the corners
        ((8.0, 4.0, 40.0, 44.0), (40, 32)),
        ((8.0, 4.0, 40.0, 44.0), (80, 64)),
        ((0.0, 16.0, 64.0, 48.0), (16, 32)),
    ],
)
def test_rasterised_first_or_last_rectangles_on_whole_pixels_are_the_same(
    region: tuple[float, float, float, float], size: tuple[int, int], mirrored: bool
) -> None:
    view = AnnotatedView(region, size, mirrored)
    for corners in ((10, 6, 24, 30), (0, 0, 64, 48), (12, 20, 20, 40), (2, 2, 38, 46)):
        pixels, moved = view_of(view, object_at(*corners))
        assert moved is not None
        assert np.array_equal(mask_of(moved.segmentation, size).astype(bool), pixels)  # type: ignore[arg-type]
        left, top, right, bottom = moved.box
        assert pixels.any()
        assert pixels.sum() == (right - left) * (bottom - top)


@pytest.mark.parametrize("seed", range(30))
def test_rasterised_first_or_last_masks_differ_at_most_along_edges(seed: int) -> None:
    draw = np.random.default_rng(seed)
    random.seed(seed)
    polygon = draw.uniform(0.1, 0.9, (1, 2)) * (WIDTH, HEIGHT) + draw.uniform(-16, 16, (7, 2))
    around = (*polygon.min(axis=0).clip(0, (WIDTH, HEIGHT)), *polygon.max(axis=0).clip(0, (WIDTH, HEIGHT)))
    crop = RandomCrop((40, 50, 60), 38, 60, prob=0.7)
    view = RandomView((48, 64, 80), 134, crop=crop).view((HEIGHT, WIDTH))
    pixels, moved = view_of(view, object_at(*around, segmentation=(polygon,)))
    if moved is None:
        assert not pixels.any()
        return
    mask = mask_of(moved.segmentation, view.size).astype(bool)  # type: ignore[arg-type]
    assert not ((mask != pixels) & ~near_edge(mask) & ~near_edge(pixels)).any()
    rows, columns = np.nonzero(mask)
    left, top, right, bottom = moved.box
    if len(rows):  # the box is around the mask, to the pixel
        assert left - 1 <= columns.min()
        assert columns.max() + 1 <= right + 1
        assert top - 1 <= rows.min()
        assert rows.max() + 1 <= bottom + 1


@pytest.mark.parametrize("mirrored", [False, True])
def test_run_lengths_are_moved_as_the_nearest_pixels(mirrored: bool) -> None:
    mask = np.random.default_rng(0).integers(0, 2, (HEIGHT, WIDTH), dtype=np.uint8)
    one = object_at(0, 0, WIDTH, HEIGHT, segmentation=rle_from_mask(mask))
    wanted = mask[4:44, 8:40].repeat(3, axis=0).repeat(2, axis=1)
    _, (moved,) = AnnotatedView((8.0, 4.0, 40.0, 44.0), (120, 64), mirrored)(painted([]), [one])
    found = mask_of(moved.segmentation, (120, 64))  # type: ignore[arg-type]
    assert np.array_equal(found[:, ::-1] if mirrored else found, wanted)


def test_what_a_crop_cuts_off_is_dropped_and_what_it_cuts_through_is_clipped() -> None:
    view = AnnotatedView((20.0, 10.0, 40.0, 30.0), (40, 40))
    objects = [
        object_at(0, 0, 19, 48),
        object_at(0, 0, 20, 48),  # touches the part
        object_at(15, 5, 25, 15),
        object_at(39.999, 12, 50, 20),  # less than a fiftieth of a pixel is left
        object_at(22, 12, 30, 20),
    ]
    _, found = view(painted([]), objects)
    assert [one.box for one in found] == [(0.0, 0.0, 10.0, 10.0), (4.0, 4.0, 20.0, 20.0)]
    assert mask_of(found[0].segmentation, (40, 40)).sum() == 100  # type: ignore[arg-type]


def test_an_object_without_a_mask_is_moved_too() -> None:
    one = Annotation((10.0, 6.0, 24.0, 30.0), 0, 300.0, False, None, 1)
    _, (moved,) = AnnotatedView(WHOLE, (96, 128))(painted([]), [one])
    assert (moved.box, moved.segmentation) == ((20.0, 12.0, 48.0, 60.0), None)


# Random views


def test_evaluation_resizes_and_does_nothing_else() -> None:
    view = Resize(800, 1333).view((480, 640))
    assert view == AnnotatedView((0.0, 0.0, 640.0, 480.0), resized_size((480, 640), 800, 1333))
    image, _ = Resize(20, 100)(painted([]), [])
    assert image.size == (26, 20)


def test_random_views_are_what_they_are_said_to_be() -> None:
    """Multi-scale and crops as in DETR and Swin, for an image of COCO."""
    random.seed(0)
    size, transform = (480, 640), RandomView(COCO_SCALES, 1333, crop=RandomCrop())
    views = [transform.view(size) for _ in range(2000)]
    whole = [view for view in views if view.region == (0.0, 0.0, 640.0, 480.0)]
    assert 900 < len(whole) < 1100
    assert 900 < sum(view.mirrored for view in views) < 1100
    assert {min(view.size) for view in whole} <= {side - less for side in COCO_SCALES for less in (0, 1)}
    assert len({min(view.size) for view in whole}) == len(COCO_SCALES)
    for view in views:
        left, top, right, bottom = view.region
        assert 0 <= left < right <= 640
        assert 0 <= top < bottom <= 480
        assert max(view.size) <= 1333
        # The aspect is that of the part, to the rounding of three resizes.
        assert abs((right - left) / (bottom - top) * view.size[0] / view.size[1] - 1) < 0.01
        if view not in whole:  # 384 to 600 pixels of an image resized to 400, 500 or 600
            assert 384 / 600 * 480 <= bottom - top <= 480
            assert right - left + 0.5 >= 384 / 800 * 640
            assert right - left <= 600 / 533 * 640


@given(height=st.integers(1, 3000), width=st.integers(1, 3000), seed=st.integers(0, 2**32))
def test_law_any_image_has_a_view_that_pillow_takes(height: int, width: int, seed: int) -> None:
    random.seed(seed)
    view = RandomView((16, 24), 40, crop=RandomCrop((12, 16), 10, 20, prob=0.9)).view((height, width))
    image, found = view(Image.new("L", (width, height)), [object_at(0, 0, width, height)])
    assert (image.height, image.width) == view.size
    assert max(view.size) <= 40
    assert found[0].box == pytest.approx((0.0, 0.0, *map(float, image.size)), abs=1e-9)


def test_a_view_depends_on_the_seed_alone() -> None:
    transform = RandomView(COCO_SCALES, crop=RandomCrop())
    views = []
    for seed in (1, 2, 1):
        random.seed(seed)
        views.append([transform.view((480, 640)) for _ in range(5)])
    assert views[0] == views[2] != views[1]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Resize(800, 700), "resized to 800 pixels and the longer to at most 700; give 1 ≤ shorter ≤ longest"),
        (lambda: Resize(0), "resized to 0 pixels"),
        (lambda: RandomView(()), "resized to none pixels"),
        (lambda: RandomView((480, 1400)), "resized to 480, 1400 pixels and the longer to at most 1333"),
        (lambda: RandomView(hflip=1.5), "hflip is 1.5; give a number in [0, 1]"),
        (lambda: RandomCrop(least=700), "the sides of a random crop are 700 to 600 pixels; give 1 ≤ least ≤ most"),
        (lambda: RandomCrop(()), "the shorter side is resized to none pixels"),
        (lambda: RandomCrop(prob=float("nan")), "the probability of a random crop is nan; give a number in [0, 1]"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any, told: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make()
    assert told in str(caught.value)
