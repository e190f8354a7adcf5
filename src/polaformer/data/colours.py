"""Colours of classes in pictures: few are far apart, and many still differ."""

import math
from collections.abc import Sequence
from zlib import crc32

import numpy as np

Colour = tuple[int, int, int]  # red, green, blue from 0 to 255

GOLDEN_ANGLE = 137.50776405  # degrees; multiples of it never come close to each other soon
LIGHTNESS = (0.70, 0.82, 0.62)  # of successive colours, in Oklch
CHROMA = 0.18


def class_colours(classes: Sequence[str]) -> dict[str, Colour]:
    """A colour for each class by its place in the list: few classes are far apart."""
    return {name: nth_colour(index) for index, name in enumerate(classes)}


def colour_of(name: str) -> Colour:
    """A colour that depends on the name alone."""
    return nth_colour(crc32(name.encode("utf-8", "backslashreplace")) % 360)


def nth_colour(index: int) -> Colour:
    """The index-th colour: hues a golden angle apart, in three degrees of lightness (Oklch, clipped to sRGB)."""
    lightness, hue = LIGHTNESS[index % len(LIGHTNESS)], math.radians(25 + GOLDEN_ANGLE * index)
    a, b = CHROMA * math.cos(hue), CHROMA * math.sin(hue)
    cone = np.array(
        [
            lightness + 0.3963377774 * a + 0.2158037573 * b,
            lightness - 0.1055613458 * a - 0.0638541728 * b,
            lightness - 0.0894841775 * a - 1.2914855480 * b,
        ]
    )
    to_linear = np.array(
        [
            [4.0767416621, -3.3077115913, 0.2309699292],
            [-1.2684380046, 2.6097574011, -0.3413193965],
            [-0.0041960863, -0.7034186147, 1.7076147010],
        ]
    )
    linear = (to_linear @ cone**3).clip(0, 1)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    red, green, blue = (round(255 * float(value)) for value in encoded)
    return red, green, blue


def darker(paint: Colour) -> Colour:
    """A third of the light, for lines around a coloured area."""
    red, green, blue = (value // 3 for value in paint)
    return red, green, blue


def ink_on(paint: Colour) -> Colour:
    """Black or white, by the contrast ratio of WCAG 2."""
    linear = [(value / 255 + 0.055) ** 2.4 / 1.055**2.4 if value > 10 else value / 3294.6 for value in paint]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return (0, 0, 0) if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else (255, 255, 255)
