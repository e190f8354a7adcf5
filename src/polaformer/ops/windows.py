"""Windows of tokens, as in Swin: partitioning an image of tokens into squares, shifted or not, and merging them again.

# B batch, H height, W width, C channels, w side of a window, L = w·w tokens of a window, n windows of an image
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from polaformer.ops.grid import Grid

SHIFT_PENALTY = -100.0  # added to the score of two tokens that only the shift made neighbours; the value published by Swin


def padding_needed(length: int, side: int) -> int:
    """The padding that brings a length to a multiple of `side`; traceable by compilers with symbolic lengths."""
    rest = length % side
    return side - rest if rest else 0


def pad_to_windows(image: Tensor, window: int) -> Tensor:
    """(B, H, W, C) padded with zeros below and on the right, so that w divides H and W."""
    below, right = padding_needed(image.shape[1], window), padding_needed(image.shape[2], window)
    return F.pad(image, (0, 0, 0, right, 0, below)) if below or right else image


def partition(image: Tensor, window: int) -> Tensor:
    """(B, H, W, C) as windows (B·n, L, C), row by row; w must divide H and W."""
    image = image.unflatten(2, (-1, window)).unflatten(1, (-1, window))  # (B, H/w, w, W/w, w, C)
    return image.transpose(2, 3).flatten(3, 4).flatten(0, 2)


def merge(windows: Tensor, window: int, size: Grid) -> Tensor:
    """Windows (B·n, L, C) as the image (B, H, W, C) of the given (height, width): the inverse of `partition`."""
    rows, columns = size[0] // window, size[1] // window
    image = windows.unflatten(1, (window, window)).unflatten(0, (-1, rows, columns))  # (B, H/w, W/w, w, w, C)
    return image.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def relative_index(window: int) -> Tensor:
    """(L, L): for each pair of tokens of a window, its row in a table of the (2w − 1)² offsets."""
    steps = torch.arange(window)
    offset = steps[:, None] - steps[None, :] + window - 1  # (w, w), from 0 to 2w − 2
    index = offset[:, None, :, None] * (2 * window - 1) + offset[None, :, None, :]  # (w, w, w, w)
    return index.reshape(window * window, window * window)


def shift_bias(size: Grid, window: int, shift: Grid, device: torch.device | None = None) -> Tensor:
    """(n, L, L), to be added to the scores after a cyclic shift: SHIFT_PENALTY between parts that were not neighbours."""
    rows, columns = (_parts(length, window, by, device) for length, by in zip(size, shift, strict=True))
    parts = partition((3 * rows[:, None] + columns[None, :])[None, :, :, None], window)[..., 0]  # (n, L)
    return (parts[:, :, None] != parts[:, None, :]) * SHIFT_PENALTY


def _parts(length: int, window: int, shift: int, device: torch.device | None) -> Tensor:
    """For each position along an axis after the shift: 0 in whole windows, 1 and 2 on the two sides of the seam in the last."""
    position = torch.arange(length, device=device)
    if shift == 0:
        return torch.zeros_like(position)
    return (position >= length - window).long() + (position >= length - shift).long()
