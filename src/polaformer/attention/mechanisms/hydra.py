"""Hydra attention (Bolya et al., 2022): as many heads as channels, so matmuls become elementwise products and sums.

    out_t = q̂_t ⊙ Σ_i k̂_i ⊙ v_i,   x̂ = x / ‖x‖₂ over all channels of a token

Shapes: q (B, H, N, D), k and v (B, H, M, D); the norm is over the H·D channels of all heads; the sum is (B, H, 1, D).
Normaliser: none. Cost O((N + M)·D). Parameters: none.
Paper: Hydra Attention: Efficient Attention with Many Heads. Source: the paper's listing; the authors released no code.
Departs: zero vectors stay zero; the listing divides by their norm and gives NaN.

# B batch, H heads, N queries, M keys, D head width
"""

import torch
from torch import Tensor

from polaformer.attention.core import Facts, Maps, WideCore, apply_map, unit_vectors


class HydraCore(WideCore):
    """Hydra attention. Every channel is a head: `weights` returns D maps, "channel c" for channel c of each of our heads."""

    name, facts = "hydra", Facts("linear", num_maps=None, distributions=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Outputs, (B, H, N, D)."""
        return _unit(q) * (_unit(k) * v).sum(dim=-2, keepdim=True)

    def maps(self, q: Tensor, k: Tensor, mask: Tensor | None, queries: Tensor | None) -> Maps:
        """D attention maps (B, H, N, M), one per channel of v."""
        q, k = _unit(q), _unit(k)
        return {name: q[..., c, None] * k[..., None, :, c] for c, name in enumerate(self.map_names())}

    def map_names(self) -> list[str]:
        """One name per channel."""
        return [f"channel {c}" for c in range(self.head_dim)]

    def apply_maps(self, maps: Maps, v: Tensor) -> Tensor:
        """Outputs, (B, H, N, D): each channel of v by its own map."""
        channels = [apply_map(maps[name], v[..., c : c + 1]) for c, name in enumerate(self.map_names())]
        return torch.cat(channels, dim=-1)


def _unit(x: Tensor) -> Tensor:
    """Unit vectors over the channels of all heads."""
    return unit_vectors(x, dim=(1, 3))
