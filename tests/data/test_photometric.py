"""Colours are changed as the formulas say, pixel by pixel, and as often as they say."""

import colorsys
import random

import numpy as np
import pytest
from PIL import Image

from polaformer.data import photometric
from polaformer.data.photometric import coloured, distorted, scaled
from semantic_files import picture


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(np.int64)


def test_brightness_and_contrast_are_those_of_the_formula() -> None:
    image = Image.fromarray(picture())
    for factor, add in ((1.0, 31.5), (1.0, -32.0), (0.5, 0.0), (1.5, 0.0), (1.2345, 0.0)):
        wanted = np.clip(pixels(image) * factor + add, 0, 255).astype(np.int64)
        assert np.abs(pixels(scaled(image, factor=factor, add=add)) - wanted).max() <= (factor == 1.2345)
    assert scaled(image) is image


@pytest.mark.parametrize(("saturation", "hue"), [(0.5, 0), (1.5, 0), (1.0, 18), (1.0, -18), (0.7, 11), (1.4, -5)])
def test_saturation_and_hue_are_those_of_a_slow_conversion(saturation: float, hue: int) -> None:
    """A step of the hue is 1.4°, which moves a channel by up to 6."""
    image = Image.fromarray(picture(1, 16, 16))
    found = pixels(coloured(image, saturation, hue))
    for row, column in np.ndindex(16, 16):
        h, s, v = colorsys.rgb_to_hsv(*(pixels(image)[row, column] / 255))
        wanted = 255 * np.array(colorsys.hsv_to_rgb((h + hue / 180) % 1, min(1.0, saturation * s), v))
        assert np.abs(found[row, column] - wanted).max() <= 10, (row, column)
    assert coloured(image, 1.0, 0) is image


def test_grey_has_no_hue_and_stays_grey() -> None:
    grey = Image.new("RGB", (4, 4), (77, 77, 77))
    assert np.array_equal(pixels(coloured(grey, 1.5, 18)), pixels(grey))
    found = pixels(distorted(Image.new("L", (4, 4), 77)))
    assert found.shape == (4, 4)


def test_each_change_is_made_to_half_of_the_images_within_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, float]] = []

    def record_scaled(image: Image.Image, *, factor: float = 1.0, add: float = 0.0) -> Image.Image:
        calls.extend([("add", add)] * (add != 0) + [("factor", factor)] * (factor != 1))
        return image

    def record_coloured(image: Image.Image, saturation: float, hue: int) -> Image.Image:
        calls.append(("colours", 0))
        calls.extend([("saturation", saturation)] * (saturation != 1) + [("hue", hue)] * (hue != 0))
        return image

    monkeypatch.setattr(photometric, "scaled", record_scaled)
    monkeypatch.setattr(photometric, "coloured", record_coloured)
    random.seed(0)
    first = 0
    for _ in range(2000):
        start = len(calls)
        distorted(Image.new("RGB", (1, 1)))
        names = [name for name, _ in calls[start:]]
        first += "factor" in names and names.index("factor") < names.index("colours")
    ranges = {"add": (-32, 32), "factor": (0.5, 1.5), "saturation": (0.5, 1.5), "hue": (-18, 18)}
    for name, (least, most) in ranges.items():
        values = [value for found, value in calls if found == name]
        assert 900 < len(values) < 1100
        assert least <= min(values) < least + 0.05 * (most - least)
        assert most - 0.05 * (most - least) < max(values) <= most
    assert 400 < first < 600  # contrast comes before the colours in half of the cases


def test_no_change_at_all_leaves_the_image() -> None:
    image = Image.fromarray(picture())
    same = 0
    random.seed(1)
    for _ in range(160):
        same += np.array_equal(pixels(distorted(image)), pixels(image))
    assert 2 <= same <= 25  # one in sixteen
