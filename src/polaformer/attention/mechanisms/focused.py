"""Focused linear attention (FLatten; Han et al., 2023): a fixed power sharpens ReLU features and preserves their norm.

    u(x) = (relu(x) + 1e-6) / softplus(scale),   f(u) = ‖u‖ u^p / ‖u^p‖,   p = 3, norms over all channels of a token
    out_t = f(u(q_t)) Σ_i f(u(k_i))ᵀ v_i / (f(u(q_t)) Σ_i f(u(k_i))ᵀ + n·eps)

Shapes: q (B, H, N, D), k and v (B, H, M, D), scale (H, D); the norms are over the H·D channels of all heads.
Normaliser: the sum over the n unmasked keys, plus n·eps. Cost O((N + M)·D²). Parameters: scale, H·D; the published layer adds a
table of key positions and a 5×5 depthwise convolution of the values.
Paper: FLatten Transformer: Vision Transformer using Focused Linear Attention. Source: LeapLabTHU/FLatten-Transformer.

# B batch, H heads, N queries, M keys, D head width
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.arguments import check_number
from polaformer.attention.core import Facts, FeatureCore, LayerParts, norm_of, zero_absent


class FocusedCore(FeatureCore):
    """Focused linear attention; focusing_factor is p."""

    name, facts = "focused", Facts("linear", published=LayerParts(conv="depthwise", key_positions=True))

    def __init__(self, num_heads: int, head_dim: int, *, focusing_factor: float = 3.0, eps: float = 1e-6) -> None:
        super().__init__(num_heads, head_dim)
        check_number(self.where, "focusing_factor", focusing_factor, above=True)
        check_number(self.where, "eps", eps)
        self.focusing_factor, self.eps = focusing_factor, eps
        self.scale = nn.Parameter(torch.zeros(num_heads, head_dim))

    def features(self, q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """f(u(q)) and f(u(k))."""
        # A scale near zero is clamped so that its reciprocal stays far from overflow.
        scale = F.softplus(self.scale.to(q.dtype)).clamp(min=torch.finfo(q.dtype).tiny ** 0.25)[:, None]  # (H, 1, D)
        return self._focus((q.relu() + 1e-6) / scale), zero_absent(self._focus((k.relu() + 1e-6) / scale), mask)

    def divisors(self, norms: Tensor, num_keys: Tensor | int) -> Tensor:
        """1 / (norm + n·eps)."""
        return super().divisors(norms + num_keys * self.eps, num_keys)

    def extra_repr(self) -> str:
        """The settings that are not visible in the parameters."""
        return f"focusing_factor={self.focusing_factor}, eps={self.eps}"

    def _focus(self, u: Tensor) -> Tensor:
        """f(u) for positive u, which is first scaled to a maximum of 1 so that its powers do not overflow."""
        largest = u.amax(dim=(1, 3), keepdim=True)
        u = u / largest
        sharp = u**self.focusing_factor
        return sharp * (largest * norm_of(u, (1, 3)) / norm_of(sharp, (1, 3)))
