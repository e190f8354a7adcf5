"""Images as tensors, and those of different sizes as one.

# B batch, C channels, H height, W width
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from polaformer.ops.grid import Grid


class PaddedImages(NamedTuple):
    """Images (B, C, H, W), zero where the mask (B, H, W) is False, and the (height, width) of each."""

    images: Tensor
    mask: Tensor
    sizes: list[Grid]


def pad_images(images: Sequence[Tensor], multiple: int = 32, *, least: int = 1, channels: int = 3) -> PaddedImages:
    """The images, each (C, H, W), padded with zeros on the right and below to a common size, a multiple of `multiple`.

    least: pixels of either side, before it becomes a multiple. channels: of the result if there are no images.
    """
    sizes = [(image.shape[-2], image.shape[-1]) for image in images]
    largest = (max([least, *sides]) for sides in (zip(*sizes, strict=True) if sizes else ((), ())))
    height, width = (-(-side // multiple) * multiple for side in largest)
    first = images[0] if images else torch.empty(channels, 0, 0)
    padded = first.new_zeros(len(images), first.shape[0], height, width)
    mask = torch.zeros(len(images), height, width, dtype=torch.bool, device=first.device)
    for index, (image, (rows, columns)) in enumerate(zip(images, sizes, strict=True)):
        padded[index, :, :rows, :columns] = image
        mask[index, :rows, :columns] = True
    return PaddedImages(padded, mask, sizes)


def normalised(image: Image, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """The pixels (C, H, W) without mean and with unit deviation; both are per channel, of values between 0 and 1."""
    channels = np.stack([np.asarray(channel) for channel in image.split()])  # (C, H, W)
    centre, spread = (255 * torch.tensor(one).view(-1, 1, 1) for one in (mean, std))
    return torch.from_numpy(channels).float().sub_(centre).div_(spread)
