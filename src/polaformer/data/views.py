"""Views of an image: a part of it, resized and perhaps mirrored, chosen first and then taken once from the original pixels."""

from dataclasses import dataclass

import numpy as np
from PIL.Image import Image, Resampling, Transpose

from polaformer.errors import SettingsError
from polaformer.ops.grid import Grid

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels


@dataclass(frozen=True)
class View:
    """A part of an image, resized, and then perhaps mirrored.

    region: left, top, right, bottom in pixels of the image, not necessarily whole. size: (height, width) of the view.
    """

    region: Box
    size: Grid
    mirrored: bool = False

    def resized(self, image: Image, resampling: Resampling) -> Image:
        """The view of an image; where it is smaller than the region, pixels are averaged."""
        found = image.resize(self.size[::-1], resampling, box=self.region)
        return found.transpose(Transpose.FLIP_LEFT_RIGHT) if self.mirrored else found

    def points(self, points: np.ndarray) -> np.ndarray:
        """Points (P, 2) of the image as points of the view."""
        left, top, right, bottom = self.region
        height, width = self.size
        found = (points - (left, top)) * (width / (right - left), height / (bottom - top))
        if self.mirrored:
            found[:, 0] = width - found[:, 0]
        return found


def whole_region(size: Grid) -> Box:
    """The region that is the whole of an image."""
    return 0.0, 0.0, float(size[1]), float(size[0])


def resized_size(size: Grid, shorter: int, longest: float) -> Grid:
    """The size at which the shorter side is `shorter`, or less if the longer one would exceed `longest`.

    Sides are rounded down, as in torchvision's GeneralizedRCNNTransform, even 799.9999 if `shorter` is 800. They are at least
    1; torchvision refuses images whose shorter side vanishes.
    """
    scale = min(shorter / min(size), longest / max(size))
    return max(1, int(size[0] * scale)), max(1, int(size[1] * scale))


def rounded_size(size: Grid, shorter: float, longest: float) -> Grid:
    """As `resized_size`, but with sides rounded to the nearest number, as in mmsegmentation."""
    scale = min(shorter / min(size), longest / max(size))
    return max(1, int(size[0] * scale + 0.5)), max(1, int(size[1] * scale + 0.5))


def check_sides(*, shorter: tuple[int, ...], longest: float) -> None:
    """Raise SettingsError unless 1 ≤ shorter ≤ longest, for each of `shorter`."""
    if not shorter or min(shorter) < 1 or longest < max(shorter):
        sides = ", ".join(map(str, shorter)) or "none"
        raise SettingsError(
            f"the shorter side is resized to {sides} pixels and the longer to at most {longest}; give 1 ≤ shorter ≤ longest"
        )


def check_prob(name: str, prob: float) -> None:
    """Raise SettingsError unless 0 ≤ prob ≤ 1."""
    if not 0 <= prob <= 1:
        raise SettingsError(f"{name} is {prob}; give a number in [0, 1]")
