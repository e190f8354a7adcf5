"""Images to tensors, through timm's transforms: augmented for training, resized and cropped for evaluation."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from PIL.Image import Image
from PIL.Image import new as new_image
from timm.data import auto_augment, create_transform
from torch import Tensor

from polaformer.data.images import MAX_PIXELS
from polaformer.errors import SettingsError
from polaformer.ops.grid import Grid

Transform = Callable[[Image], Tensor]
# How an image of another shape becomes a square: squashed, as the authors evaluate, or cropped, as timm and torchvision do.
RESIZE = {"square": "squash", "shorter": "center"}
INTERPOLATIONS = ("bicubic", "bilinear", "nearest", "lanczos", "box", "hamming")
MIN_STD = 1e-6  # normalised pixels should stay finite
MAX_ASPECT = 16  # longer over shorter side; images beyond this are cropped before they are resized


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the input of a model in evaluation; stored in the weights file for `eval` and `predict`.

    resize: "square" squashes the image to a square of img_size / crop_pct, "shorter" resizes its shorter side to that; then the
    centre of img_size is cropped. mean and std have one number per channel. Raises SettingsError for invalid values.
    """

    img_size: Grid
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: str = "square"
    crop_pct: float = 0.875
    interpolation: str = "bicubic"

    def __post_init__(self) -> None:
        if len(self.img_size) != 2 or not all(isinstance(side, int) and side > 0 for side in self.img_size):
            raise SettingsError(f"img_size is {self.img_size}; give a height and a width in pixels")
        if self.resize not in RESIZE or self.interpolation not in INTERPOLATIONS:
            raise SettingsError(
                f"images are resized by {self.resize!r} with {self.interpolation!r}; choose {' or '.join(RESIZE)}, with one of "
                f"{', '.join(INTERPOLATIONS)}"
            )
        if not 0 < self.crop_pct <= 1:
            raise SettingsError(f"crop_pct is {self.crop_pct}; give a number in (0, 1]")
        if self.img_size[0] * self.img_size[1] > MAX_PIXELS * self.crop_pct**2:
            raise SettingsError(
                f"img_size is {self.img_size} and crop_pct {self.crop_pct:g}, so images would be resized to more than "
                f"{MAX_PIXELS:,} pixels; give a smaller img_size, or a larger crop_pct"
            )
        if len(self.mean) not in (1, 3) or len(self.std) != len(self.mean) or not all(map(isfinite, self.mean)):
            raise SettingsError(
                f"mean is {self.mean} and std {self.std}; give one number per channel, for three channels or one"
            )
        if not all(MIN_STD <= one < float("inf") for one in self.std):
            raise SettingsError(f"std is {self.std}; give numbers ≥ {MIN_STD:g}")

    @property
    def channels(self) -> int:
        """The number of image channels: three or one."""
        return len(self.mean)

    def transform(self) -> Transform:
        """The transform from an image to a tensor (channels, height, width)."""
        transform = create_transform(
            (self.channels, *self.img_size),
            is_training=False,
            crop_pct=self.crop_pct,
            crop_mode=RESIZE[self.resize],
            interpolation=self.interpolation,
            mean=self.mean,
            std=self.std,
        )
        if self.resize == "square":
            return transform
        return _WithoutExtremeAspect(transform, MAX_ASPECT * max(self.img_size) // min(self.img_size))


@dataclass(frozen=True)
class _WithoutExtremeAspect:
    """A transform preceded by a centre crop of images whose longer side exceeds `most_aspect` times the shorter.

    Resized by its shorter side, an image of 1×65,535 pixels would become 256×16,776,960.
    """

    transform: Transform
    most_aspect: int

    def __call__(self, image: Image) -> Tensor:
        width, height = (min(side, self.most_aspect * min(image.size)) for side in image.size)
        if (width, height) != image.size:
            left, top = (image.width - width) // 2, (image.height - height) // 2
            image = image.crop((left, top, left + width, top + height))
        return self.transform(image)


def training_transform(
    preprocessing: Preprocessing,
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    hflip: float,
    color_jitter: float,
    augmentation: str | None,
    erase_prob: float,
    interpolation: str,
) -> Transform:
    """Random crop, flip, RandAugment (without it: colour jitter) and random erasing, from an image to a tensor."""
    transform: Any = create_transform(
        (preprocessing.channels, *preprocessing.img_size),
        is_training=True,
        scale=scale,
        ratio=ratio,
        hflip=hflip,
        color_jitter=color_jitter if color_jitter and preprocessing.channels == 3 else None,
        auto_augment=augmentation,
        interpolation=interpolation,
        mean=preprocessing.mean,
        std=preprocessing.std,
        re_prob=erase_prob,
        re_mode="pixel",
    )
    _allow_zero_bits(transform)
    return transform


def _allow_zero_bits(transform: Any) -> None:
    """Makes timm's strongest posterize, which keeps zero bits, return a black image; since Pillow 13 it raises."""
    for step in transform.transforms:
        policies = getattr(step, "policy", None) or [getattr(step, "ops", [])]
        for operation in (operation for policy in policies for operation in policy):
            if operation.aug_fn is auto_augment.posterize:
                operation.aug_fn = _posterize


def _posterize(image: Image, bits: int, **options: Any) -> Image:
    return auto_augment.posterize(image, bits, **options) if bits > 0 else new_image(image.mode, image.size)
