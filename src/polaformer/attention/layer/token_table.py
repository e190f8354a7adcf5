"""A learnable vector per token of a grid, resizable to any other grid.

# B batch, C channels
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.ops.grid import Grid, Sizes
from polaformer.ops.precision import computing_dtype


class TokenTable(nn.Module):
    """One learnable row per prefix token and per cell of a grid; initially zero.

    A sequence of N tokens is a grid of one row, (1, N). At the native size the rows are returned unchanged; at another size
    the rows of the grid are resized, those of the prefix kept.
    mode: "bicubic", as the authors resize their key tables, or "bilinear", as they resize PVT's position embeddings.
    """

    def __init__(self, size: Grid, dim: int, num_prefix_tokens: int = 0, *, mode: str = "bicubic") -> None:
        super().__init__()
        self.size, self.num_prefix_tokens, self.mode = size, num_prefix_tokens, mode
        self.rows = nn.Parameter(torch.zeros(num_prefix_tokens + size[0] * size[1], dim))

    def forward(self, grid: Grid, sizes: Sizes = None) -> Tensor:
        """(prefix + height·width, C) for the grid.

        With sizes, the (height, width) of each sample at the top left of the grid: (B, prefix + height·width, C), each sample
        with the table for its size, padded with zeros.
        """
        if sizes is None:
            return self._rows_for(grid)
        if not sizes:
            return self.rows.new_zeros(0, self.num_prefix_tokens + grid[0] * grid[1], self.rows.shape[1])
        tables = {size: self._placed(size, grid) for size in set(sizes)}
        return torch.stack([tables[size] for size in sizes])

    def resize(self, size: Grid) -> None:
        """Makes `size` the native size permanently: the parameter is replaced by its resized rows."""
        with torch.no_grad():
            rows = self._rows_for(size).clone()
        self.rows, self.size = nn.Parameter(rows, requires_grad=self.rows.requires_grad), size

    def extra_repr(self) -> str:
        """The native grid."""
        return f"size={self.size}, num_prefix_tokens={self.num_prefix_tokens}, dim={self.rows.shape[-1]}, mode={self.mode!r}"

    def _rows_for(self, grid: Grid) -> Tensor:
        if grid == self.size:
            return self.rows
        if 0 in grid:
            return self.rows[: self.num_prefix_tokens]
        prefix, cells = self.rows[: self.num_prefix_tokens], self.rows[self.num_prefix_tokens :]
        return torch.cat([prefix, resize_rows(cells, self.size, grid, self.mode)])

    def _placed(self, size: Grid, grid: Grid) -> Tensor:
        """The rows for a sample of the given size, (prefix + height·width of the grid, C)."""
        rows = self._rows_for(size)
        prefix, cells = rows[: self.num_prefix_tokens], rows[self.num_prefix_tokens :]
        image = F.pad(cells.unflatten(0, size), (0, 0, 0, grid[1] - size[1], 0, grid[0] - size[0]))
        return torch.cat([prefix, image.flatten(0, 1)])


def resize_rows(rows: Tensor, old: Grid, new: Grid, mode: str = "bicubic") -> Tensor:
    """Rows (old height·width, C) of a grid as rows (new height·width, C), corners not aligned."""
    image = rows.to(computing_dtype(rows)).T.unflatten(-1, old)[None]  # (1, C, H, W)
    image = F.interpolate(image, size=new, mode=mode, align_corners=False)
    return image[0].flatten(1).T.to(rows.dtype)
