"""Efficient attention (Shen et al., 2021): softmax over the channels of each query, and over the tokens of each key channel.

    out_t = ρ(q_t) Σ_i κ(k_i)ᵀ v_i,   ρ(q)_c = e^{q_c} / Σ_c' e^{q_c'},   κ(k)_ic = e^{k_ic} / Σ_i' e^{k_i'c}

Shapes: q (B, H, N, D), k and v (B, H, M, D); the global contexts Σ κ(k_i)ᵀ v_i are (B, H, D, D). There is no 1/√D.
Normaliser: the two softmaxes; every row of the map sums to 1. Cost O((N + M)·D²). Parameters: none.
Paper: Efficient Attention: Attention with Linear Complexities. Source: cmsflash/efficient-attention, whose module projects with
1×1 convolutions, our linear layers, and has a residual connection, which we leave to the block.

# B batch, H heads, N queries, M keys, D head width
"""

from torch import Tensor

from polaformer.attention.core import Facts, WideCore, masked_softmax


class EfficientCore(WideCore):
    """Efficient attention."""

    name, facts = "efficient", Facts("linear")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Outputs, (B, H, N, D)."""
        return q.softmax(dim=-1) @ (_softmax_over_tokens(k, mask) @ v)

    def map(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Attention map, (B, H, N, M)."""
        return q.softmax(dim=-1) @ _softmax_over_tokens(k, mask)


def _softmax_over_tokens(k: Tensor, mask: Tensor | None) -> Tensor:
    """κ(k)ᵀ, (B, H, D, M)."""
    return masked_softmax(k.mT, None if mask is None else mask[:, None, None, :])
