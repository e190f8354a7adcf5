"""Softmax attention, Eq. 1 of the paper, on PyTorch's fused kernels.

    out_t = Σ_i softmax_i(⟨q_t, k_i⟩·scale + bias_ti) v_i,   scale = D^-1/2 unless given

Normaliser: the softmax. Cost O(N·M·D). No parameters. The only core that takes an additive bias.

# B batch, H heads, N queries, M keys, D head width
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.attention.core import Bias, Facts, Maps, Mask, Size, check_heads


class SoftmaxCore(nn.Module):
    """Softmax attention through `scaled_dot_product_attention`; a sample without any key gives zeros."""

    facts: ClassVar[Facts] = Facts("quadratic")

    def __init__(self, num_heads: int, head_dim: int, *, scale: float | None = None) -> None:
        super().__init__()
        check_heads("softmax", num_heads, head_dim)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = None, bias: Bias = None, grid: Size = None) -> Tensor:
        """(B, H, N, D) in v's dtype."""
        if mask is not None:
            absent = ~mask[:, None, :, None]
            k, v = k.masked_fill(absent, 0.0), v.masked_fill(absent, 0.0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=_allowed(mask, bias, q.dtype), scale=self.scale)

    def weights(self, q: Tensor, k: Tensor, *, mask: Mask = None, bias: Bias = None, grid: Size = None) -> Maps:
        """The explicit map, {"softmax": (B, H, N, M)}."""
        if mask is not None:
            k = k.masked_fill(~mask[:, None, :, None], 0.0)
        scores = q @ k.mT * self.scale
        allowed = _allowed(mask, bias, q.dtype)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, float("-inf")) if allowed.dtype == torch.bool else scores + allowed
        weights = scores.softmax(dim=-1)
        return {"softmax": weights if mask is None else weights * mask[:, None, None, :]}

    def apply_maps(self, maps: Maps, v: Tensor) -> Tensor:
        """What a call makes of v (B, H, M, D) by the maps that `weights` gave."""
        return maps["softmax"] @ v


def _allowed(mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Mask and bias as the one argument that `scaled_dot_product_attention` takes.

    A sample without any key is let see all of them: they are zeros, and a softmax over nothing would be NaN.
    """
    bias = None if bias is None else bias.to(dtype)  # under autocast the bias is wider than q
    if mask is None:
        return bias
    seen = (mask | ~mask.any(dim=-1, keepdim=True))[:, None, None, :]  # (B, 1, 1, M)
    return seen if bias is None else bias.masked_fill(~seen, float("-inf"))
