"""Joint transforms of images and annotations: a view of the image is chosen, and everything is moved into it at once.

Boxes and polygons are moved exactly; nothing is rasterised on the way. Random draws use Python's global generator.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from PIL import Image as PIL
from PIL.Image import Image, Resampling

from polaformer.data.masks import Segmentation, mask_of, rle_from_mask
from polaformer.data.sources.coco_annotations import Annotation
from polaformer.data.views import Box, View, check_prob, check_sides, resized_size, whole_region
from polaformer.errors import SettingsError
from polaformer.ops.grid import Grid

# Boxes that are narrower vanish; where coordinates are in the thousands, float32 resolves a ten-thousandth of a pixel.
MIN_SIDE = 0.01


class DetectionTransform(Protocol):
    """Changes an image and the annotations on it together."""

    def __call__(self, image: Image, annotations: Sequence[Annotation]) -> tuple[Image, list[Annotation]]:
        """The changed image, and those of its annotations that can still be seen."""
        ...


@dataclass(frozen=True)
class AnnotatedView(View):
    """A view of an image and of the objects on it."""

    def __call__(self, image: Image, annotations: Sequence[Annotation]) -> tuple[Image, list[Annotation]]:
        """The view of the image, and the annotations that can be seen in it."""
        moved = (self._annotation(one, (image.height, image.width)) for one in annotations)
        return self.resized(image, Resampling.BILINEAR), [one for one in moved if one is not None]

    def _annotation(self, one: Annotation, size: Grid) -> Annotation | None:
        """An annotation of an image of that size in the view, or None if its box vanishes; its area is not cropped."""
        corners = self.points(np.array(one.box).reshape(2, 2)).clip(0, self.size[::-1])  # (2, 2)
        (left, top), (right, bottom) = corners.min(axis=0).tolist(), corners.max(axis=0).tolist()
        if min(right - left, bottom - top) < MIN_SIDE:
            return None
        seen = (self.region[2] - self.region[0]) * (self.region[3] - self.region[1])
        area = one.area * self.size[0] * self.size[1] / seen
        return replace(one, box=(left, top, right, bottom), area=area, segmentation=self._segmentation(one.segmentation, size))

    def _segmentation(self, segmentation: Segmentation | None, size: Grid) -> Segmentation | None:
        """Polygons may leave the view; rasterising cuts them off. Run lengths are resampled, to the nearest pixel."""
        if segmentation is None:
            return None
        if isinstance(segmentation, dict):
            mask = PIL.fromarray(mask_of(segmentation, size))
            return rle_from_mask(np.asarray(self.resized(mask, Resampling.NEAREST)))
        return tuple(map(self.points, segmentation))


@dataclass(frozen=True)
class Resize:
    """Resizes to `shorter` pixels on the shorter side, but at most `longest` on the longer: what evaluation does."""

    shorter: int = 800
    longest: int = 1333

    def __post_init__(self) -> None:
        check_sides(shorter=(self.shorter,), longest=self.longest)

    def view(self, size: Grid) -> AnnotatedView:
        """The view of an image of that size."""
        return AnnotatedView(whole_region(size), resized_size(size, self.shorter, self.longest))

    def __call__(self, image: Image, annotations: Sequence[Annotation]) -> tuple[Image, list[Annotation]]:
        """The resized image and its annotations."""
        return self.view((image.height, image.width))(image, annotations)


@dataclass(frozen=True)
class RandomCrop:
    """The crop of DETR and Swin: with `prob`, the shorter side is resized to one of `shorter`, and then a part is cut out.

    least, most: the range of the sides of that part; smaller sides are kept whole.
    """

    shorter: tuple[int, ...] = (400, 500, 600)
    least: int = 384
    most: int = 600
    prob: float = 0.5

    def __post_init__(self) -> None:
        check_sides(shorter=self.shorter, longest=math.inf)
        if not 1 <= self.least <= self.most:
            raise SettingsError(f"the sides of a random crop are {self.least} to {self.most} pixels; give 1 ≤ least ≤ most")
        check_prob("the probability of a random crop", self.prob)

    def region(self, size: Grid) -> tuple[Box, Grid]:
        """The part to cut out of an image of that size, in pixels of the image, and its size in the resized image."""
        resized = resized_size(size, random.choice(self.shorter), math.inf)
        height, width = (random.randint(min(self.least, side), min(self.most, side)) for side in resized)
        top, left = random.randint(0, resized[0] - height), random.randint(0, resized[1] - width)
        rows, columns = size[0] / resized[0], size[1] / resized[1]
        right, bottom = min((left + width) * columns, float(size[1])), min((top + height) * rows, float(size[0]))
        return (left * columns, top * rows, right, bottom), (height, width)


@dataclass(frozen=True)
class RandomView:
    """The training transform: resizes the shorter side to one of `shorter`, the longer at most to `longest`.

    hflip: probability that the image is mirrored. crop: cuts out a part first, and resizes that.
    Departs: the part is resized once, from the original pixels, not twice.
    """

    shorter: tuple[int, ...] = (800,)
    longest: int = 1333
    hflip: float = 0.5
    crop: RandomCrop | None = None

    def __post_init__(self) -> None:
        check_sides(shorter=self.shorter, longest=self.longest)
        check_prob("hflip", self.hflip)

    def view(self, size: Grid) -> AnnotatedView:
        """A random view of an image of that size."""
        mirrored = random.random() < self.hflip
        region, part = whole_region(size), size
        if self.crop is not None and random.random() < self.crop.prob:
            region, part = self.crop.region(size)
        return AnnotatedView(region, resized_size(part, random.choice(self.shorter), self.longest), mirrored)

    def __call__(self, image: Image, annotations: Sequence[Annotation]) -> tuple[Image, list[Annotation]]:
        """A random view of the image, and the annotations that can be seen in it."""
        return self.view((image.height, image.width))(image, annotations)
