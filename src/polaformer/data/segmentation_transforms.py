"""Joint transforms of images and label maps. Random draws use Python's global generator.

# H, W height and width of an image
"""

import random
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from PIL import Image as PIL
from PIL.Image import Image, Resampling

from polaformer.data.photometric import distorted
from polaformer.data.sources.label_sets import IGNORED
from polaformer.data.views import View, check_prob, check_sides, rounded_size, whole_region
from polaformer.errors import SettingsError
from polaformer.ops.grid import Grid

MAX_TRIES = 10  # of a crop in which one class is too large; the next one is taken as it is


class SegmentationTransform(Protocol):
    """Changes an image and its label map (H, W) uint8 together; gives one view of the image, or several for evaluation."""

    @property
    def least(self) -> int:
        """The number of pixels to which the sides of a batch are padded at least."""
        ...

    def __call__(self, image: Image, label_map: np.ndarray) -> tuple[list[Image], np.ndarray]:
        """The views of the image, and their labels."""
        ...


@dataclass(frozen=True)
class ResizeShorter:
    """Resizes the image to `shorter` pixels on its shorter side, but at most `longest` on the longer: what evaluation does.

    With None images keep their size. It gives one view per scale, a factor of these lengths, each from the original pixels. The
    label map stays as it is.
    """

    shorter: int | None = 512
    longest: int = 2048
    scales: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if self.shorter is not None:
            check_sides(shorter=(self.shorter,), longest=self.longest)

    @property
    def least(self) -> int:
        """Images are not padded."""
        return 1

    def view(self, size: Grid, scale: float = 1.0) -> View:
        """The view of an image of that size."""
        shorter, longest = (min(size), max(size)) if self.shorter is None else (self.shorter, self.longest)
        return View(whole_region(size), rounded_size(size, max(1, int(shorter * scale)), max(1, int(longest * scale))))

    def __call__(self, image: Image, label_map: np.ndarray) -> tuple[list[Image], np.ndarray]:
        """The resized images, and the labels as they were."""
        views = (self.view((image.height, image.width), scale) for scale in self.scales)
        return [view.resized(image, Resampling.BILINEAR) for view in views], label_map


@dataclass(frozen=True)
class RandomScaleCrop:
    """The training transform: mmsegmentation's pipeline for ADE20K.

    The image is resized to `base` (shorter side, longest side) times a factor from `scales`, a square of at most `size` pixels
    is cut out, mirrored with probability `hflip`, and its colours are changed (`distorted`) if `photometric` is set. Another
    square is drawn, up to ten times, while one class has `max_class_share` or more of the pixels that count, or there is but
    one class; 1 takes the first.
    Departs: the square is resized once, from the original pixels; where that makes it smaller, pixels are averaged.
    """

    size: int = 512
    base: tuple[int, int] = (512, 2048)
    scales: tuple[float, float] = (0.5, 2.0)
    hflip: float = 0.5
    max_class_share: float = 0.75
    photometric: bool = True

    def __post_init__(self) -> None:
        check_sides(shorter=(self.base[0],), longest=self.base[1])
        check_prob("hflip", self.hflip)
        if self.size < 1:
            raise SettingsError(f"the size of a crop is {self.size}; give at least 1 pixel")
        if not 0 < self.scales[0] <= self.scales[1] < float("inf"):
            raise SettingsError(f"scales is {self.scales}; give two positive numbers, the smaller one first")
        if not 0 < self.max_class_share <= 1:
            raise SettingsError(f"max_class_share is {self.max_class_share}; give a number in (0, 1]")

    @property
    def least(self) -> int:
        """Smaller crops are padded to the size of a crop."""
        return self.size

    def view(self, labels: Image) -> View:
        """A random view of a label map and its image."""
        size = (labels.height, labels.width)
        factor = random.uniform(*self.scales)
        resized = rounded_size(size, *(max(1, int(side * factor)) for side in self.base))
        view = self._crop(size, resized)
        for _ in range(MAX_TRIES if self.max_class_share < 1 else 0):
            if self._is_mixed(view.resized(labels, Resampling.NEAREST)):
                break
            view = self._crop(size, resized)
        return replace(view, mirrored=random.random() < self.hflip)

    def __call__(self, image: Image, label_map: np.ndarray) -> tuple[list[Image], np.ndarray]:
        """A random view of the image, and its labels."""
        labels = PIL.fromarray(label_map)
        view = self.view(labels)
        seen = view.resized(image, Resampling.BILINEAR)
        return [distorted(seen) if self.photometric else seen], np.asarray(view.resized(labels, Resampling.NEAREST))

    def _crop(self, size: Grid, resized: Grid) -> View:
        """A random part of an image of that size, with at most `size` pixels per side once the image is resized."""
        height, width = (min(self.size, side) for side in resized)
        top, left = random.randint(0, resized[0] - height), random.randint(0, resized[1] - width)
        rows, columns = size[0] / resized[0], size[1] / resized[1]
        right, bottom = min((left + width) * columns, float(size[1])), min((top + height) * rows, float(size[0]))
        return View((left * columns, top * rows, right, bottom), (height, width))

    def _is_mixed(self, labels: Image) -> bool:
        """Whether no class has too large a share of the pixels that count."""
        counts = labels.histogram()[:IGNORED]
        return max(counts) < self.max_class_share * sum(counts)
