"""Softmax attention, Eq. 1 of the paper, on PyTorch's fused kernels.

    out_t = Σ_i softmax_i(⟨q_t, k_i⟩·scale + bias_ti) v_i,   scale = D^-1/2 unless given

Shapes: q (B, H, N, D), k and v (B, H, M, D), bias broadcastable to (B, H, N, M).
Normaliser: the softmax over the unmasked keys. Cost O(N·M·D). Parameters: none. The only core that takes an additive bias.
Paper: Attention Is All You Need (Vaswani et al., 2017). Source: PyTorch's `scaled_dot_product_attention`.
Departs: no dropout of the weights by default; Skyformer's Long Range Arena harness has dropout=0.1, in training only.

# B batch, H heads, N queries, M keys, D head width
"""

from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.arguments import check_number
from polaformer.attention.core import (
    Bias,
    Facts,
    Maps,
    Mask,
    Size,
    apply_map,
    check_heads,
    check_tensors,
    masked_softmax,
    zero_absent,
)
from polaformer.ops.precision import computing_dtype, without_autocast


class SoftmaxCore(nn.Module):
    """Softmax attention through `scaled_dot_product_attention`; a sample without any key gives zeros."""

    facts = Facts("quadratic", in_windows=True, takes_bias=True)

    def __init__(self, num_heads: int, head_dim: int, *, scale: float | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        check_heads("softmax", num_heads, head_dim)
        if scale is not None:
            check_number("attention 'softmax'", "scale", scale, least=-inf, above=True)
        check_number("attention 'softmax'", "dropout", dropout, below=1.0)
        self.num_heads, self.head_dim, self.dropout = num_heads, head_dim, dropout
        self.scale = head_dim**-0.5 if scale is None else scale

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = None, bias: Bias = None, grid: Size = None, cross: bool = False
    ) -> Tensor:
        """Outputs, (B, H, N, D), in v's dtype."""
        check_tensors("softmax", self, q, k, v, mask)
        if mask is not None:
            absent = ~mask[:, None, :, None]
            k, v = k.masked_fill(absent, 0.0), v.masked_fill(absent, 0.0)
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, _attention_mask(mask, bias, q.dtype), dropout, scale=self.scale)

    def weights(
        self, q: Tensor, k: Tensor, *, mask: Mask = None, bias: Bias = None, grid: Size = None, cross: bool = False
    ) -> Maps:
        """The explicit attention map, {"softmax": (B, H, N, M)}, before any dropout, in float32 or float64.

        A row is zero if every key is masked or has a bias of −∞; a call gives zeros there too.
        """
        check_tensors("softmax", self, q, k, None, mask)
        return {"softmax": _map(q, k, mask, bias, self.scale)}

    def apply_maps(self, maps: Maps, v: Tensor) -> Tensor:
        """Outputs, (B, H, N, D): the map of `weights` applied to v (B, H, M, D)."""
        return apply_map(maps["softmax"], v)


@without_autocast
def _map(q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float) -> Tensor:
    dtype = computing_dtype(q)
    scores = q.to(dtype) * scale @ zero_absent(k.to(dtype), mask).mT
    exists = None if mask is None else mask[:, None, None, :]
    if bias is not None:
        bias = bias.to(q.dtype).to(dtype)  # rounded as in a call
        visible = bias != -inf
        scores = scores + bias.masked_fill(~visible, 0.0)
        exists = visible if exists is None else exists & visible
    return masked_softmax(scores, exists)


def _attention_mask(mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Mask and bias combined into the `attn_mask` of `scaled_dot_product_attention`.

    A sample without any key attends to all of them: they are zeros, and a softmax over nothing would be NaN.
    """
    bias = None if bias is None else bias.to(dtype)  # under autocast the bias is wider than q
    if mask is None:
        return bias
    visible = (mask | ~mask.any(dim=-1, keepdim=True))[:, None, None, :]  # (B, 1, 1, M)
    return visible if bias is None else bias.masked_fill(~visible, float("-inf"))
