"""Photometric distortion: random brightness, contrast, saturation and hue, as in mmsegmentation's training pipelines."""

import random
from collections.abc import Callable

import numpy as np
from PIL.Image import Image

BRIGHTNESS = 32.0  # at most added to or taken from every channel
CONTRAST = (0.5, 1.5)  # factors of every channel
SATURATION = (0.5, 1.5)
HUE = 18  # of 180
PROB = 0.5  # of each of the four


def distorted(image: Image) -> Image:
    """The image with each of the four changes made or not, by chance; greyscale images have neither saturation nor hue.

    Contrast comes before saturation and hue, or after them. After each change, values are cut off at 0 and 255 and rounded
    down. Departs: hue has 256 steps instead of 180, as in Pillow. Random draws use Python's global generator.
    """
    brightness = random.uniform(-BRIGHTNESS, BRIGHTNESS) if random.random() < PROB else 0.0
    contrast_first = random.random() < 0.5
    contrast = random.uniform(*CONTRAST) if random.random() < PROB else 1.0
    saturation = random.uniform(*SATURATION) if random.random() < PROB else 1.0
    hue = random.randint(-HUE, HUE) if random.random() < PROB else 0
    changed = scaled(image, add=brightness)
    if contrast_first:
        changed = scaled(changed, factor=contrast)
    if image.mode == "RGB":
        changed = coloured(changed, saturation, hue)
    return changed if contrast_first else scaled(changed, factor=contrast)


def scaled(image: Image, *, factor: float = 1.0, add: float = 0.0) -> Image:
    """The image with `factor`·value + `add` for every value."""
    return image if (factor, add) == (1.0, 0.0) else _mapped(image, lambda _, values: factor * values + add)


def coloured(image: Image, saturation: float, hue: int) -> Image:
    """The RGB image with its saturation times a factor, and its hue turned by `hue` of 180."""
    if (saturation, hue) == (1.0, 0):
        return image
    turn = round(hue * 256 / 180)

    def change(channel: int, values: np.ndarray) -> np.ndarray:
        return ((values + turn) % 256, saturation * values, values)[channel]

    return _mapped(image.convert("HSV"), change).convert("RGB")


def _mapped(image: Image, change: Callable[[int, np.ndarray], np.ndarray]) -> Image:
    """The image with each channel's values 0 … 255 changed by a function of the channel and the values."""
    values = np.arange(256, dtype=np.float32)
    tables = [change(channel, values).clip(0, 255).astype(np.uint8) for channel in range(len(image.getbands()))]
    return image.point(np.concatenate(tables).tolist())
