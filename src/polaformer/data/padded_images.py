"""Images of different sizes as one tensor.

# B batch, C channels, H height, W width
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polaformer.ops.grid import Grid


class PaddedImages(NamedTuple):
    """Images (B, C, H, W), zero where the mask (B, H, W) is False, and the (height, width) of each."""

    images: Tensor
    mask: Tensor
    sizes: list[Grid]


def pad_images(images: Sequence[Tensor], multiple: int = 32, *, channels: int = 3) -> PaddedImages:
    """The images, each (C, H, W), padded with zeros on the right and below to a common size, a multiple of `multiple`.

    channels: of the result without images, which has one multiple of pixels per side.
    """
    sizes = [(image.shape[-2], image.shape[-1]) for image in images]
    height, width = (-(-max([1, *sides]) // multiple) * multiple for sides in (zip(*sizes, strict=True) if sizes else ((), ())))
    first = images[0] if images else torch.empty(channels, 0, 0)
    padded = first.new_zeros(len(images), first.shape[0], height, width)
    mask = torch.zeros(len(images), height, width, dtype=torch.bool, device=first.device)
    for index, (image, (rows, columns)) in enumerate(zip(images, sizes, strict=True)):
        padded[index, :, :rows, :columns] = image
        mask[index, :rows, :columns] = True
    return PaddedImages(padded, mask, sizes)
