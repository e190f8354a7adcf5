"""What the operator hands to its backends, and what it gets back from them.

# B batch, H heads, N queries, M keys, D head width
"""

from typing import NamedTuple

from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # of q, k, v, power and scale; None without a scale


class Inputs(NamedTuple):
    """The arguments of `polarity_attention`, checked."""

    q: Tensor  # (B, H, N, D)
    k: Tensor  # (B, H, M, D)
    v: Tensor  # (B, H, M, D)
    power: Tensor  # (H, D)
    scale: Tensor | None = None  # (H, D): what q and k are divided by; None for 1
    mask: Tensor | None = None  # (B, M): True where the key exists; None if all do
    eps: float = 0.0

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        return self.q, self.k, self.v

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All but eps."""
        return *self.tokens, self.power, self.scale, self.mask
