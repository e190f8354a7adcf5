"""cosFormer (Qin et al., 2022): ReLU features, reweighted by a cosine of the distance between two tokens.

    out_t = φ_t(q_t) Σ_i φ_i(k_i)ᵀ v_i / max(φ_t(q_t) Σ_i φ_i(k_i)ᵀ, 1e-6),   φ_i(x) = [relu(x) sin a_i, relu(x) cos a_i]
    a_i = (π/2) i/L, i = 1, 2, …:   ⟨φ_t(q), φ_i(k)⟩ = ⟨relu(q), relu(k)⟩ cos((π/2)(t − i)/L)

Shapes: q (B, H, N, D), k and v (B, H, M, D), φ(x) (B, H, N, 2D). L is max_length, or max(N, M) if it is not given; then results
depend on the padding of a batch, since masked tokens count towards L.
Normaliser: the sum over the unmasked keys, clamped to at least 1e-6 as published. Cost O((N + M)·D²). Parameters: none.
Paper: cosFormer: Rethinking Softmax in Attention. Source: OpenNLPLab/cosFormer, which takes no mask.

# B batch, H heads, N queries, M keys, D head width
"""

from dataclasses import replace
from math import pi

import torch
from torch import Tensor

from polaformer.arguments import check_integer
from polaformer.attention.core import Facts, FeatureCore, check_length

EPS = 1e-6


class CosformerCore(FeatureCore):
    """cosFormer attention; max_length is L."""

    name, facts = "cosformer", Facts("linear", scaled_by_length=True)

    def __init__(self, num_heads: int, head_dim: int, *, max_length: int | None = None) -> None:
        super().__init__(num_heads, head_dim)
        if max_length is not None:
            check_integer(self.where, "max_length", max_length)
            self.facts = replace(self.facts, max_length=max_length)
        self.max_length = max_length

    def check_call(self, q: Tensor, k: Tensor, bias: Tensor | None, cross: bool) -> None:
        """Raises ValueError for arguments that the mechanism does not support."""
        super().check_call(q, k, bias, cross)
        if self.max_length is not None:
            check_length(self.name, self.max_length, max(q.shape[2], k.shape[2]))

    def features(self, q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """φ(q) and φ(k); masked keys are zero, and so are their features."""
        length = max(q.shape[2], k.shape[2]) if self.max_length is None else self.max_length
        return _features(q, length), _features(k, length)

    def divisors(self, norms: Tensor, num_keys: Tensor | int) -> Tensor:
        """1 / max(norm, 1e-6)."""
        return 1 / norms.clamp(min=EPS)

    def extra_repr(self) -> str:
        """The settings."""
        return f"max_length={self.max_length}"


def _features(x: Tensor, length: int) -> Tensor:
    """[relu(x) sin a, relu(x) cos a], (B, H, N, 2D)."""
    angles = torch.arange(1, x.shape[2] + 1, dtype=x.dtype, device=x.device)[:, None] * (pi / 2 / length)
    x = x.relu()
    return torch.cat([x * angles.sin(), x * angles.cos()], dim=-1)
