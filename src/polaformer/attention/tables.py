"""A learnable vector for each token of a grid, which fits grids of any other size."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.ops.precision import computing_dtype


class TokenTable(nn.Module):
    """One learnable row for each prefix token and each cell of a grid; zeros at first.

    A sequence of N tokens is a grid of one row, (1, N). At the native size the rows are returned as they are; at another size
    the grid's rows are resized bicubically, as the authors resize their key tables, and the prefix rows stay.
    """

    def __init__(self, size: tuple[int, int], dim: int, num_prefix_tokens: int = 0) -> None:
        super().__init__()
        self.size, self.num_prefix_tokens = size, num_prefix_tokens
        self.rows = nn.Parameter(torch.zeros(num_prefix_tokens + size[0] * size[1], dim))

    def forward(self, grid: tuple[int, int]) -> Tensor:
        """(prefix + height·width, dim)."""
        if grid == self.size:
            return self.rows
        if 0 in grid:
            return self.rows[: self.num_prefix_tokens]
        prefix, cells = self.rows[: self.num_prefix_tokens], self.rows[self.num_prefix_tokens :]
        return torch.cat([prefix, resize_rows(cells, self.size, grid)])

    def extra_repr(self) -> str:
        """The native grid."""
        return f"size={self.size}, num_prefix_tokens={self.num_prefix_tokens}, dim={self.rows.shape[-1]}"


def resize_rows(rows: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Rows (old height·width, C) of a grid as rows (new height·width, C), bicubically, corners not aligned."""
    image = rows.to(computing_dtype(rows)).T.unflatten(-1, old)[None]  # (1, C, H, W)
    image = F.interpolate(image, size=new, mode="bicubic", align_corners=False)
    return image[0].flatten(1).T.to(rows.dtype)
