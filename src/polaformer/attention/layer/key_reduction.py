"""The key and value reduction of PVT: one key per square of r×r tokens.

# B batch, N = H·W tokens, C channels, r ratio
"""

import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.ops.grid import Grid


class KeyReduction(nn.Module):
    """A convolution with kernel and stride r, then a LayerNorm (ε = 1e-5), over the token grid.

    Departs: a grid that r does not divide is padded with zeros on the right and below, where the authors' code drops its last
    rows and columns.
    """

    def __init__(self, dim: int, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.conv = nn.Conv2d(dim, dim, kernel_size=ratio, stride=ratio)
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor, grid: Grid, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens (B, N, C) and mask (B, N) to (B, n, C) and (B, n), n the cells of `reduced_grid`.

        Masked tokens must already be zero, unless the core reads them. A reduced key exists if any of its tokens does.
        """
        image = self._padded(tokens.mT.unflatten(-1, grid), grid)  # (B, C, H', W')
        reduced = self.norm(self.conv(image).flatten(2).mT)
        if mask is not None:
            exists = self._padded(mask.to(tokens.dtype).unflatten(-1, grid), grid)
            mask = F.max_pool2d(exists[:, None], self.ratio)[:, 0].flatten(1) > 0
        return reduced, mask

    def reduced_grid(self, grid: Grid) -> Grid:
        """The (height, width) of the keys for a (height, width) of tokens."""
        return reduced_grid(grid, self.ratio)

    def _padded(self, image: Tensor, grid: Grid) -> Tensor:
        height, width = self.reduced_grid(grid)
        below, right = height * self.ratio - grid[0], width * self.ratio - grid[1]
        return F.pad(image, (0, right, 0, below)) if below or right else image


def reduced_grid(grid: Grid, ratio: int) -> Grid:
    """The (height, width) of the keys for a (height, width) of tokens."""
    return -(-grid[0] // ratio), -(-grid[1] // ratio)
