"""Linear-angular attention (Castling-ViT; You et al., 2023): the angle between query and key, to first order.

    x_t = v_t / 2 + 1/π · q̂_t Σ_i k̂_iᵀ v_i,   out_t = x_t / ‖x_t‖₂,   x̂ = x / ‖x‖₂ in each head

Shapes: q, k and v (B, H, N, D), the same tokens in all three; the state Σ k̂_iᵀ v_i is (B, H, D, D).
Normaliser: the norm of the output. Cost O(N·D²). Parameters: none here; the published layer adds a convolution of the values
over the sequence with one filter of 9 taps for each head, `conv="sequence"`, `kernel_size=9`.
Paper: Castling-ViT: Compressing Self-Attention via Switching Towards Linear-Angular Attention at Vision Transformer Inference.
Source: GATECH-EIC/Castling-ViT. The series of 1 − θ/π would give half the sum of all values; the released code, whose accuracy
is in the tables, takes half of the token's own value, and so do we.
Departs: no sparse map; in training alone the released code adds softmax attention, thresholded at 0.02, before the norm.
Departs: zero vectors stay zero, where the released code divides by their norm and gives NaN.

# B batch, H heads, N tokens, D head width
"""

from math import pi

import torch
from torch import Tensor

from polaformer.attention.core import Facts, LayerParts, Maps, WideCore, unit_vectors


class AngularCore(WideCore):
    """Linear-angular attention; `weights` gives the map before the norm of the output is divided by."""

    name, facts = (
        "angular",
        Facts("linear", cross=False, distributions=False, published=LayerParts(conv="sequence", kernel_size=9)),
    )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, D)."""
        return unit_vectors(v / 2 + unit_vectors(q, -1) @ (unit_vectors(k, -1).mT @ v) / pi, -1)

    def apply_maps(self, maps: Maps, v: Tensor) -> Tensor:
        """The map times v, then divided by its norm."""
        weights = maps[self.name]
        return unit_vectors(weights @ v.to(weights.dtype), -1).to(v.dtype)

    def map(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, N)."""
        own = torch.eye(k.shape[2], dtype=k.dtype, device=k.device) / 2
        if mask is not None:
            own = own * mask[:, None, None, :]
        return own + unit_vectors(q, -1) @ unit_vectors(k, -1).mT / pi
