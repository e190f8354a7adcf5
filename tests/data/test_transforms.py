"""From images to tensors: invalid settings are refused, and no image shape takes more memory than it should."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from polaformer.data.transforms import Preprocessing, training_transform
from polaformer.errors import SettingsError

GOOD: dict[str, Any] = {"img_size": (16, 16), "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.2)}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"img_size": (16,)}, "img_size is (16,); give a height and a width in pixels"),
        ({"img_size": (0, 16)}, "img_size is (0, 16); give a height"),
        ({"img_size": (16.5, 16)}, "img_size is (16.5, 16); give a height"),
        ({"resize": "longer"}, "images are resized by 'longer' with 'bicubic'; choose square or shorter"),
        ({"interpolation": "magic"}, "with one of bicubic, bilinear"),
        ({"crop_pct": 0.0}, "crop_pct is 0.0; give a number in (0, 1]"),
        ({"crop_pct": 1.5}, "crop_pct is 1.5; give a number in (0, 1]"),
        ({"crop_pct": float("nan")}, "crop_pct is nan; give a number in (0, 1]"),
        ({"crop_pct": 1e-9}, "resized to more than 64,000,000 pixels; give a smaller img_size, or a larger crop_pct"),
        ({"img_size": (10**6, 10**6)}, "resized to more than 64,000,000 pixels"),
        ({"mean": (0.5, 0.5)}, "mean is (0.5, 0.5) and std (0.2, 0.2, 0.2); give one number per channel, for three channels"),
        ({"mean": (0.5,) * 2, "std": (0.2,) * 2}, "give one number per channel, for three channels or one"),
        ({"mean": (0.5, float("nan"), 0.5)}, "give one number per channel, for three channels"),
        ({"std": (0.2, 0.0, 0.2)}, "std is (0.2, 0.0, 0.2); give numbers ≥ 1e-06"),
        ({"std": (0.2, 1e-300, 0.2)}, "give numbers ≥ 1e-06"),
        ({"std": (0.2, 0.2, float("nan"))}, "give numbers ≥ 1e-06"),
        ({"std": (0.2, 0.2, float("inf"))}, "give numbers ≥ 1e-06"),
    ],
)
def test_a_preparation_that_makes_no_sense_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Preprocessing(**GOOD | changes)
    assert told in str(caught.value)


@pytest.mark.parametrize("resize", ["square", "shorter"])
@pytest.mark.parametrize("size", [(1, 1), (1, 65535), (65535, 1), (300, 4), (16, 16), (640, 480)])
@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_of_any_shape_becomes_a_tensor_without_becoming_huge_on_the_way(
    resize: str, size: tuple[int, int], channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, sizes = Image.Image.resize, []

    def noted(image: Image.Image, size: tuple[int, int], *arguments: Any, **options: Any) -> Image.Image:
        sizes.append(size)
        return original(image, size, *arguments, **options)

    monkeypatch.setattr(Image.Image, "resize", noted)
    prepare = Preprocessing((32, 32), GOOD["mean"][:channels], GOOD["std"][:channels], resize).transform()
    found = prepare(Image.new("RGB" if channels == 3 else "L", size, 128))
    assert found.shape == (channels, 32, 32)
    assert torch.isfinite(found).all()
    assert all(width * height <= 16 * 37**2 for width, height in sizes)


@pytest.mark.parametrize("size", [(1, 1), (1, 65535), (65535, 1), (300, 4)])
def test_an_image_of_any_shape_is_augmented_to_the_same_size(size: tuple[int, int]) -> None:
    transform = training_transform(
        Preprocessing(**GOOD),
        scale=(0.08, 1.0),
        ratio=(3 / 4, 4 / 3),
        hflip=0.5,
        color_jitter=0.4,
        augmentation="rand-m9-mstd0.5-inc1",
        erase_prob=0.25,
        interpolation="random",
    )
    for _ in range(10):
        assert transform(Image.new("RGB", size, (1, 2, 3))).shape == (3, 16, 16)


def test_squeezing_keeps_the_edges_of_an_image_and_cutting_does_not() -> None:
    image = Image.fromarray(np.repeat(np.repeat([[0, 100, 200, 100, 0]], 20, axis=0), 20, axis=1).astype(np.uint8))  # (20, 100)
    prepared = {
        resize: Preprocessing((20, 20), (0.0,), (1.0,), resize, 1.0, "nearest").transform()(image)[0]
        for resize in ("square", "shorter")
    }
    assert torch.round(255 * prepared["square"][0, ::4]).tolist() == [0, 100, 200, 100, 0]
    assert torch.round(255 * prepared["shorter"]).unique().tolist() == [200]


def test_of_a_very_long_image_its_middle_is_seen() -> None:
    image = Image.new("L", (3, 3000), 0)
    image.paste(255, (0, 1490, 3, 1510))
    found = Preprocessing((8, 8), (0.0,), (1.0,), "shorter").transform()(image)
    assert found.min() > 0.99


def test_the_strongest_posterisation_gives_a_black_image() -> None:
    """Since Pillow 13 it raises, in timm."""
    transform = training_transform(
        Preprocessing(**GOOD),
        scale=(1.0, 1.0),
        ratio=(1.0, 1.0),
        hflip=0.0,
        color_jitter=0.0,
        augmentation="rand-m10-inc1",
        erase_prob=0.0,
        interpolation="bicubic",
    )
    steps = transform.transforms  # type: ignore[attr-defined]
    posterize = [one for step in steps for one in getattr(step, "ops", []) if one.name == "PosterizeIncreasing"]
    assert len(posterize) == 1
    posterize[0].prob = 1.0
    assert posterize[0](Image.new("RGB", (4, 4), (200, 100, 50))).getextrema() == ((0, 0),) * 3
