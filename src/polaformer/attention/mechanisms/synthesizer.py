"""Synthesizer (Tay et al., 2021), "random" with the dot product kept: softmax attention plus a learned matrix of scores.

    out_t = Σ_i softmax_i(⟨q_t, k_i⟩ / √D + R_ti) v_i

Shapes: q (B, H, N, D), k and v (B, H, M, D), R (H, max_length, max_keys); N queries and M keys use its top-left part. max_keys
defaults to max_length; it is smaller where keys are fewer by design, as PVT's reduced keys are.
R is initialised uniformly with variance 2/(H·(max_length + max_keys)), the Xavier rule as the Long Range Arena applies it to a
tensor of this shape; for its square R that is 1/(H·max_length).
Normaliser: the softmax over the unmasked keys. Cost O(N·M·D). Parameters: synthetic, H·max_length·max_keys.
Paper: Synthesizer: Rethinking Self-Attention for Transformer Models. Source: google-research/long-range-arena, whose trainer
uses this default variant; factorised R, R without the dot product, and "dense" synthesizers are not implemented.

# B batch, H heads, N queries, M keys, D head width
"""

from dataclasses import replace
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.arguments import check_integer
from polaformer.attention.core import Facts, WideCore, check_length, masked_softmax


class SynthesizerCore(WideCore):
    """Random synthesizer attention for at most `max_length` queries and `max_keys` keys (None: max_length)."""

    name, facts = "synthesizer", Facts("quadratic", sized_by=("max_length", "max_keys"))

    def __init__(self, num_heads: int, head_dim: int, *, max_length: int, max_keys: int | None = None) -> None:
        super().__init__(num_heads, head_dim)
        check_integer(self.where, "max_length", max_length)
        if max_keys is not None:
            check_integer(self.where, "max_keys", max_keys)
        self.max_length, self.max_keys = max_length, max_length if max_keys is None else max_keys
        self.facts = replace(self.facts, max_length=self.max_length, max_keys=self.max_keys)
        self.synthetic = nn.Parameter(torch.empty(num_heads, self.max_length, self.max_keys))
        bound = sqrt(6 / (num_heads * (self.max_length + self.max_keys)))
        nn.init.uniform_(self.synthetic, -bound, bound)

    def check_call(self, q: Tensor, k: Tensor, bias: Tensor | None, cross: bool) -> None:
        """Raises ValueError for arguments that the mechanism does not support."""
        super().check_call(q, k, bias, cross)
        check_length(self.name, self.max_length, q.shape[2], what="queries")
        check_length(self.name, self.max_keys, k.shape[2], what="keys", argument="max_keys")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Outputs, (B, H, N, D)."""
        synthetic = self._synthetic(q, k)[None]  # (1, H, N, M)
        if mask is not None:
            # A sample without any key attends to all: their values are zeros, and a softmax over nothing would be NaN.
            visible = mask | ~mask.any(dim=-1, keepdim=True)
            synthetic = synthetic.masked_fill(~visible[:, None, None, :], float("-inf"))  # (B, H, N, M)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=synthetic)

    def map(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Attention map, (B, H, N, M)."""
        scores = q @ k.mT * self.head_dim**-0.5 + self._synthetic(q, k)
        return masked_softmax(scores, None if mask is None else mask[:, None, None, :])

    def extra_repr(self) -> str:
        """The settings."""
        return f"max_length={self.max_length}, max_keys={self.max_keys}"

    def _synthetic(self, q: Tensor, k: Tensor) -> Tensor:
        """R for these queries and keys, (H, N, M)."""
        return self.synthetic[:, : q.shape[2], : k.shape[2]].to(q.dtype)
