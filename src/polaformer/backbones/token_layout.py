"""The layout of the tokens of a stage: their grid, which of them exist, and the size of each image of the batch.

Images are padded on the right and below, never cropped: a stage of stride s has ceil(H / s) × ceil(W / s) tokens. In a batch of
images of different sizes a pixel mask marks each image; a token exists if any of its pixels does.

# B batch, C channels, H height, W width, N = H·W tokens, P prefix tokens
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polaformer.ops.grid import Grid
from polaformer.ops.windows import padding_needed


class TokenLayout(NamedTuple):
    """The grid (height, width) of a batch of token images, and which of its tokens exist.

    exists: (B, H, W), True where the token exists; None: everywhere.
    sizes: (height, width) of each image, at the top left of the grid; None: all fill the grid.
    """

    grid: Grid
    exists: Tensor | None = None
    sizes: tuple[Grid, ...] | None = None

    def shrunk(self, stride: int, grid: Grid | None = None) -> "TokenLayout":
        """The layout of cells of stride × stride tokens, the last ones padded.

        grid: its (height, width) if a tensor's shape already gives it; compilers then need not derive it.
        """
        grid, exists, sizes = grid or _cells(self.grid, stride), self.exists, self.sizes
        if exists is not None and stride > 1:
            exists = F.max_pool2d(exists[:, None].float(), stride, ceil_mode=True)[:, 0] > 0
        return TokenLayout(grid, exists, None if sizes is None else tuple(_cells(size, stride) for size in sizes))

    def token_mask(self, num_prefix_tokens: int = 0) -> Tensor | None:
        """(B, P + N), True where the token exists; prefix tokens always do."""
        return None if self.exists is None else F.pad(self.exists.flatten(1), (num_prefix_tokens, 0), value=True)

    def image(self, tokens: Tensor) -> Tensor:
        """Tokens (B, N, C) as an image (B, C, H, W), zero where no token exists."""
        return self.cleared(tokens.mT.unflatten(-1, self.grid))

    def cleared(self, image: Tensor) -> Tensor:
        """The image (B, C, H, W) with zeros where nothing exists, even if it was NaN there."""
        return image if self.exists is None else image.masked_fill(~self.exists[:, None], 0.0)


def pad_to_multiple(image: Tensor, side: int) -> Tensor:
    """(B, C, H, W) with zeros below and on the right, so that squares of that side fill it."""
    below, right = padding_needed(image.shape[2], side), padding_needed(image.shape[3], side)
    return F.pad(image, (0, right, 0, below)) if below or right else image


def pixel_layout(name: str, image: Any, mask: Any, in_chans: int, like: Tensor) -> TokenLayout:
    """The layout of the pixels of images (B, C, H, W) under a mask (B, H, W), True where the pixel belongs to the image.

    Raises for anything else, and for images that are not in the dtype of `like`, a parameter. Sizes are read from the mask,
    which synchronises with a GPU; without a mask nothing is read.
    """
    if not isinstance(image, Tensor) or image.ndim != 4 or image.shape[1] != in_chans:
        given = f"has shape {tuple(image.shape)}" if isinstance(image, Tensor) else f"is a {type(image).__name__}"
        raise ValueError(f"{name}: x {given}; give a tensor of images, (batch, {in_chans}, height, width)")
    if not image.is_floating_point():
        raise TypeError(f"{name}: x has dtype {image.dtype}; give floating-point images, normalised as the model was trained")
    if image.dtype != like.dtype and not torch.is_autocast_enabled(image.device.type):
        raise TypeError(f"{name}: x has dtype {image.dtype} but the model {like.dtype}; convert one, or use autocast")
    grid = image.shape[2], image.shape[3]
    if 0 in grid:
        raise ValueError(f"{name}: x has shape {tuple(image.shape)}; give images of at least one pixel")
    if mask is None:
        return TokenLayout(grid)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (image.shape[0], *grid):
        given = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"{name}: mask is {given}; give a boolean tensor of shape {(image.shape[0], *grid)}, True where the pixel exists"
        )
    return TokenLayout(grid, mask, _extents(name, mask))


def _extents(name: str, mask: Tensor) -> tuple[Grid, ...]:
    """The smallest (height, width) from the top left that contains all existing pixels of each image."""
    heights, widths = (
        (mask.any(dim=axis) * torch.arange(1, mask.shape[3 - axis] + 1, device=mask.device)).amax(dim=1) for axis in (2, 1)
    )
    sizes = tuple((int(height), int(width)) for height, width in torch.stack([heights, widths], dim=1).tolist())
    empty = [index for index, size in enumerate(sizes) if 0 in size]
    if empty:
        raise ValueError(f"{name}: the mask leaves no pixel of image {empty[0]}; remove that image from the batch")
    return sizes


def _cells(size: Grid, stride: int) -> Grid:
    return (size[0] + stride - 1) // stride, (size[1] + stride - 1) // stride
