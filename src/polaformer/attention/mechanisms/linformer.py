"""Linformer (Wang et al., 2020): softmax attention to a fixed number of linear combinations of the keys.

    out_t = softmax_r(⟨q_t, (E k)_r⟩ / √D) (E v)_r

Shapes: q (B, H, N, D), k and v (B, H, M, D), E (H, R, max_length), shared by keys and values; M tokens use its first M columns.
Masked keys and values are zero in the combinations. E is initialised from N(0, 0.02²).
Normaliser: the softmax over the R combinations; the rows of the N×M map softmax(·) E have arbitrary sums.
Cost O((N + M)·R·D). Parameters: projection, H·R·max_length.
Paper: Linformer: Self-Attention with Linear Complexity. Source: pkuzengqi/Skyformer.
Departs: E is learned and saved. In the Skyformer harness it is no longer registered once it is moved to a GPU, so that the
published results are those of a fixed random E; with as_published=True it is a buffer, fixed but saved.

# B batch, H heads, N queries, M keys, D head width, R rank
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.arguments import check_flag, check_integer
from polaformer.attention.core import Facts, WideCore, check_length

STD = 0.02


class LinformerCore(WideCore):
    """Linformer attention to `rank` linear combinations of at most `max_length` keys."""

    name = "linformer"
    facts = Facts("linear", approximates="softmax", sized_by=("max_length",), distributions=False, coarse=(("rank", 16),))
    projection: Tensor

    def __init__(self, num_heads: int, head_dim: int, *, max_length: int, rank: int = 128, as_published: bool = False) -> None:
        super().__init__(num_heads, head_dim)
        check_integer(self.where, "max_length", max_length)
        check_integer(self.where, "rank", rank)
        check_flag(self.where, "as_published", as_published)
        self.max_length, self.rank, self.as_published = max_length, rank, as_published
        self.facts = replace(self.facts, max_length=max_length)
        projection = torch.randn(num_heads, rank, max_length) * STD
        if as_published:
            self.register_buffer("projection", projection)
        else:
            self.projection = nn.Parameter(projection)

    def check_call(self, q: Tensor, k: Tensor, bias: Tensor | None, cross: bool) -> None:
        """Raises ValueError for arguments that the mechanism does not support."""
        super().check_call(q, k, bias, cross)
        check_length(self.name, self.max_length, k.shape[2])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Outputs, (B, H, N, D)."""
        projection = self._projection_for(k)
        return F.scaled_dot_product_attention(q, projection @ k, projection @ v)

    def map(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Attention map, (B, H, N, M)."""
        projection = self._projection_for(k)
        weights = (q @ (projection @ k).mT * self.head_dim**-0.5).softmax(dim=-1) @ projection
        return weights if mask is None else weights * mask[:, None, None, :]

    def extra_repr(self) -> str:
        """The settings."""
        return f"max_length={self.max_length}, rank={self.rank}, as_published={self.as_published}"

    def _projection_for(self, k: Tensor) -> Tensor:
        """The columns of E for these keys, (H, R, M)."""
        return self.projection[:, :, : k.shape[2]].to(k.dtype)
