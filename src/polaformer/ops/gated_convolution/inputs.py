"""What the gated convolution computes on.

# B batch, P prefix tokens, H·W cells of the grid, C = heads · D channels, k kernel
"""

from typing import NamedTuple

from torch import Tensor

from polaformer.ops.grid import Grid


class ConvolutionInputs(NamedTuple):
    """The arguments of `gated_convolution`, in its order."""

    attended: Tensor  # (B, P + H·W, C)
    values: Tensor  # (B, H·W, C)
    weight: Tensor  # (D, 1, k, k)
    bias: Tensor | None  # (D,)
    gate: Tensor | None  # (B, P + H·W, C), or broadcastable to it
    grid: Grid  # (H, W)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All but the grid."""
        return self.attended, self.values, self.weight, self.bias, self.gate
