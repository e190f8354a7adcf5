"""Synthesizer (Tay et al., 2021), "random" with the dot product kept: softmax attention plus a learned map of its own.

    out_t = Σ_i softmax_i(⟨q_t, k_i⟩ / √D + R_ti) v_i

Shapes: q (B, H, N, D), k and v (B, H, M, D), R (H, max_length, max_length); N and M tokens use its top left part.
R starts uniform with variance 1/(H·max_length), the Xavier rule as the Long Range Arena applies it to a tensor of this shape.
Normaliser: the softmax over the keys that exist. Cost O(N·M·D). Parameters: synthetic, H·max_length².
Paper: Synthesizer: Rethinking Self-Attention for Transformer Models. Source: google-research/long-range-arena, whose trainer
leaves the model at this variant; factorised R, R without the dot product, and "dense" synthesizers are not here.

# B batch, H heads, N queries, M keys, D head width
"""

from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.attention.core import Facts, WideCore, check_count, check_length, masked_softmax


class SynthesizerCore(WideCore):
    """Random synthesizer attention for at most `max_length` queries and keys."""

    name, facts = "synthesizer", Facts("quadratic", needs_length=True)

    def __init__(self, num_heads: int, head_dim: int, *, max_length: int) -> None:
        super().__init__(num_heads, head_dim)
        check_count(self.name, "max_length", max_length)
        self.max_length = max_length
        self.synthetic = nn.Parameter(torch.empty(num_heads, max_length, max_length))
        bound = sqrt(3 / (num_heads * max_length))
        nn.init.uniform_(self.synthetic, -bound, bound)

    def check_call(self, q: Tensor, k: Tensor, bias: Tensor | None, cross: bool) -> None:
        """Raises for what the mechanism cannot honour."""
        super().check_call(q, k, bias, cross)
        check_length(self.name, self.max_length, max(q.shape[2], k.shape[2]))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, D)."""
        synthetic = self._synthetic(q, k)[None]  # (1, H, N, M)
        if mask is not None:
            # Where no key exists all are seen: their values are zeros, and a softmax over nothing would be NaN.
            seen = mask | ~mask.any(dim=-1, keepdim=True)
            synthetic = synthetic.masked_fill(~seen[:, None, None, :], float("-inf"))  # (B, H, N, M)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=synthetic)

    def map(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, M)."""
        scores = q @ k.mT * self.head_dim**-0.5 + self._synthetic(q, k)
        return masked_softmax(scores, None if mask is None else mask[:, None, None, :])

    def extra_repr(self) -> str:
        """The settings."""
        return f"max_length={self.max_length}"

    def _synthetic(self, q: Tensor, k: Tensor) -> Tensor:
        """R for these queries and keys, (H, N, M)."""
        return self.synthetic[:, : q.shape[2], : k.shape[2]].to(q.dtype)
