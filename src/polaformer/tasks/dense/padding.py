"""Feature maps of images that share a padded batch: an image must get the same results as alone.

Images are padded on the right and below, so the cells of an image are at the top left.

# B batch, C channels, h height, w width in cells
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from polaformer.ops.grid import Grid


def inside(sizes: Sequence[Grid] | None, like: Tensor, stride: int) -> Tensor | None:
    """(B, 1, h, w), True for the cells of `like` (B, C, h, w) that contain pixels of the image; None if all do.

    sizes: (height, width) of each image in pixels; None: all fill the batch.
    """
    if sizes is None:
        return None
    height, width = like.shape[-2:]
    cells = [_cells(size, stride) for size in sizes]
    if all(rows >= height and columns >= width for rows, columns in cells):
        return None
    limits = torch.tensor(cells, device=like.device)  # (B, 2)
    rows = torch.arange(height, device=like.device) < limits[:, :1]  # (B, h)
    columns = torch.arange(width, device=like.device) < limits[:, 1:]  # (B, w)
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def cleared(maps: Tensor, is_inside: Tensor | None) -> Tensor:
    """The maps (B, C, h, w), zero outside the images: what a convolution finds beyond the border of an image alone."""
    return maps if is_inside is None else maps.masked_fill(~is_inside, 0.0)


def extended(maps: Tensor, sizes: Sequence[Grid] | None, stride: int) -> Tensor:
    """The maps (B, C, h, w) with the border cells of each image repeated outside of it, as interpolation continues them."""
    if sizes is None or inside(sizes, maps, stride) is None:
        return maps
    found = []
    for own, size in zip(maps, sizes, strict=True):
        rows, columns = (
            torch.arange(number, device=maps.device).clamp(max=limit - 1)
            for number, limit in zip(own.shape[-2:], _cells(size, stride), strict=True)
        )
        found.append(own[:, rows][:, :, columns])
    return torch.stack(found)


def cells_of(sizes: Sequence[Grid], like: Tensor, stride: int) -> list[Grid]:
    """The (rows, columns) of the cells of `like` (B, C, h, w) that contain pixels of each image."""
    height, width = like.shape[-2:]
    return [(min(rows, height), min(columns, width)) for rows, columns in (_cells(size, stride) for size in sizes)]


def sizes_of(mask: Tensor | None) -> list[Grid] | None:
    """The (height, width) of each image from the mask (B, H, W) of its pixels; None if all images fill the batch."""
    if mask is None or mask.is_meta or bool(mask.all()):
        return None
    found = zip(mask.any(dim=2).sum(dim=1).tolist(), mask.any(dim=1).sum(dim=1).tolist(), strict=True)
    return [(int(height), int(width)) for height, width in found]


def upsampled(maps: Tensor, factor: int, grid: Grid, sizes: Sequence[Grid] | None, stride: int) -> Tensor:
    """The maps (B, C, h, w) with this stride, bilinearly upsampled (align_corners False) and cropped to `grid`.

    Each cell becomes exactly factor × factor cells, also where the finer grid is not a multiple. The border cells of an image
    continue outside of it, as they do for the image alone.
    """
    wide = F.interpolate(extended(maps, sizes, stride), scale_factor=float(factor), mode="bilinear", align_corners=False)
    return wide[..., : grid[0], : grid[1]]


def _cells(size: Grid, stride: int) -> Grid:
    return -(-size[0] // stride), -(-size[1] // stride)
