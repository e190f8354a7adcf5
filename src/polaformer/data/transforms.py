"""Images to tensors, through timm's transforms: augmented for training, resized and cropped for evaluation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL.Image import Image
from PIL.Image import new as new_image
from timm.data import auto_augment, create_transform
from torch import Tensor

from polaformer.attention.tables import Grid

Transform = Callable[[Image], Tensor]
# How an image of another shape becomes a square: squeezed, as the authors evaluate, or cut, as timm and torchvision do.
RESIZE = {"square": "squash", "shorter": "center"}


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes what a model is evaluated on: told to `eval` and `predict` by the file of weights.

    resize: "square" squeezes the image to a square of img_size / crop_pct, "shorter" brings its shorter side to that; then the
    middle of img_size is cut out. mean and std have one number a channel.
    """

    img_size: Grid
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: str = "square"
    crop_pct: float = 0.875
    interpolation: str = "bicubic"

    @property
    def channels(self) -> int:
        """Of the images: three, or one."""
        return len(self.mean)

    def transform(self) -> Transform:
        """From an image to a tensor (channels, height, width)."""
        return create_transform(
            (self.channels, *self.img_size),
            is_training=False,
            crop_pct=self.crop_pct,
            crop_mode=RESIZE[self.resize],
            interpolation=self.interpolation,
            mean=self.mean,
            std=self.std,
        )


def training_transform(
    preprocessing: Preprocessing,
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    hflip: float,
    color_jitter: float,
    augmentation: str | None,
    erase_prob: float,
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
        interpolation=preprocessing.interpolation,
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
