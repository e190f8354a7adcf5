"""Colours of classes in pictures: few are far apart, and many still differ."""

import math
from collections.abc import Mapping, Sequence
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


def spread_colours(number: int, fixed: Mapping[int, Colour] | None = None) -> list[Colour]:
    """That many colours, those of `fixed` at their places, each other one as far as possible from all before it (Oklab).

    So the first ones differ most: put the classes that are seen most often first.
    """
    given = fixed or {}
    candidates = _candidates()
    places = oklab(candidates)
    seen = oklab(np.array([*given.values()] or [(255, 255, 255)]))
    distances = np.linalg.norm(places[:, None] - seen, axis=2).min(axis=1)
    found = []
    for index in range(number):
        farthest = int(distances.argmax())
        red, green, blue = given.get(index) or candidates[farthest].tolist()
        found.append((red, green, blue))
        if index not in given:
            distances = np.minimum(distances, np.linalg.norm(places - places[farthest], axis=1))
    return found


def oklab(colours: np.ndarray) -> np.ndarray:
    """sRGB colours (N, 3) from 0 to 255 in Oklab, where distances are about as they are seen."""
    encoded = colours / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    to_cone = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    to_lab = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    return np.cbrt(linear @ to_cone.T) @ to_lab.T


def _candidates() -> np.ndarray:
    """Colours (N, 3) that are neither dark, nor pale, nor grey, so that they are seen over any image."""
    steps = np.arange(0, 256, 15)
    colours = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), axis=-1).reshape(-1, 3)
    lightness, a, b = oklab(colours).T
    return colours[(lightness > 0.45) & (lightness < 0.93) & (np.hypot(a, b) > 0.07)]


def darker(paint: Colour) -> Colour:
    """A third of the light, for lines around a coloured area."""
    red, green, blue = (value // 3 for value in paint)
    return red, green, blue


def ink_on(paint: Colour) -> Colour:
    """Black or white, by the contrast ratio of WCAG 2."""
    linear = [(value / 255 + 0.055) ** 2.4 / 1.055**2.4 if value > 10 else value / 3294.6 for value in paint]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return (0, 0, 0) if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else (255, 255, 255)
