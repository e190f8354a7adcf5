"""Images to tensors, through timm's transforms: augmented for training, resized and cropped for evaluation."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from PIL.Image import Image
from PIL.Image import new as new_image
from timm.data import auto_augment, create_transform
from torch import Tensor

from polaformer.data.images import MOST_PIXELS
from polaformer.errors import SettingsError
from polaformer.ops.grid import Grid

Transform = Callable[[Image], Tensor]
# How an image of another shape becomes a square: squeezed, as the authors evaluate, or cut, as timm and torchvision do.
RESIZE = {"square": "squash", "shorter": "center"}
INTERPOLATIONS = ("bicubic", "bilinear", "nearest", "lanczos", "box", "hamming")
LEAST_STD = 1e-6  # what is divided by it should stay finite
LONGEST = 16  # longer side over shorter side, beyond which the ends of an image are cut off before it is resized


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes what a model is evaluated on: told to `eval` and `predict` by the file of weights.

    resize: "square" squeezes the image to a square of img_size / crop_pct, "shorter" brings its shorter side to that; then the
    middle of img_size is cut out. mean and std have one number a channel. Raises SettingsError for what makes no sense.
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
            raise SettingsError(f"crop_pct is {self.crop_pct}; give a share above 0, up to 1")
        if self.img_size[0] * self.img_size[1] > MOST_PIXELS * self.crop_pct**2:
            raise SettingsError(
                f"img_size is {self.img_size} and crop_pct {self.crop_pct:g}, so images would be resized to more than "
                f"{MOST_PIXELS:,} pixels; give a smaller img_size, or a larger crop_pct"
            )
        if len(self.mean) not in (1, 3) or len(self.std) != len(self.mean) or not all(map(isfinite, self.mean)):
            raise SettingsError(
                f"mean is {self.mean} and std {self.std}; give one number for each of three channels, or of one"
            )
        if not all(LEAST_STD <= one < float("inf") for one in self.std):
            raise SettingsError(f"std is {self.std}; give numbers of at least {LEAST_STD:g}")

    @property
    def channels(self) -> int:
        """Of the images: three, or one."""
        return len(self.mean)

    def transform(self) -> Transform:
        """From an image to a tensor (channels, height, width)."""
        made = create_transform(
            (self.channels, *self.img_size),
            is_training=False,
            crop_pct=self.crop_pct,
            crop_mode=RESIZE[self.resize],
            interpolation=self.interpolation,
            mean=self.mean,
            std=self.std,
        )
        return made if self.resize == "square" else _OfTheMiddle(made, LONGEST * max(self.img_size) // min(self.img_size))


@dataclass(frozen=True)
class _OfTheMiddle:
    """A transform that cuts the middle out, of images that are too long to be resized by their shorter side.

    1×65,535 pixels would become 256×16,776,960.
    """

    transform: Transform
    longest: int

    def __call__(self, image: Image) -> Tensor:
        width, height = (min(side, self.longest * min(image.size)) for side in image.size)
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
    """Random crop, flip, RandAugment (or colour jitter where there is none) and erasing, from an image to a tensor."""
    made: Any = create_transform(
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
    _allow_no_bits(made)
    return made


def _allow_no_bits(transform: Any) -> None:
    """Lets timm's strongest posterisation, which keeps no bits, give a black image again; since Pillow 13 it raises."""
    for step in transform.transforms:
        policies = getattr(step, "policy", None) or [getattr(step, "ops", [])]
        for operation in (operation for policy in policies for operation in policy):
            if operation.aug_fn is auto_augment.posterize:
                operation.aug_fn = _posterize


def _posterize(image: Image, bits: int, **options: Any) -> Image:
    return auto_augment.posterize(image, bits, **options) if bits > 0 else new_image(image.mode, image.size)
