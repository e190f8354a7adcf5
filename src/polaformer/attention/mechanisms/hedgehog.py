"""Hedgehog (Zhang et al., 2024): learned feature maps, softmaxes over channels, that mimic softmax attention.

    out_t = φ(q_t W_q) Σ_i φ(k_i W_k)ᵀ v_i / φ(q_t W_q) Σ_i φ(k_i W_k)ᵀ,   φ(x) = [softmax(x), softmax(−x)] over channels

Shapes: q (B, H, N, D), k and v (B, H, M, D), W_q and W_k (H, D, D), φ(x) (B, H, N, 2D). W_q and W_k start as the identity.
Normaliser: the sum over the unmasked keys. Cost O((N + M)·D²). Parameters: query_map and key_map, 2·H·D².
Paper: The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry. Source: HazyResearch/lolcats.
Departs: features are not clamped to at least 1e-12 but computed in log space, shifted by terms that cancel between numerator
and denominator, so that sharp features keep their value and no normaliser is zero.

# B batch, H heads, N queries, M keys, D head width
"""

import torch
from torch import Tensor, nn

from polaformer.attention.core import Facts, FeatureCore


class HedgehogCore(FeatureCore):
    """Hedgehog attention."""

    name, facts = "hedgehog", Facts("linear", approximates="softmax")

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads, head_dim)
        self.query_map = nn.Parameter(torch.eye(head_dim).repeat(num_heads, 1, 1))
        self.key_map = nn.Parameter(torch.eye(head_dim).repeat(num_heads, 1, 1))

    def features(self, q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """φ(q W_q) and φ(k W_k), up to one factor per query and one per channel, which cancel.

        The maximum of each channel over the keys is 1, and of each query over its channels: normalisers are at least 1.
        """
        queries = _log_features(q @ self.query_map.to(q.dtype))
        keys = _log_features(k @ self.key_map.to(k.dtype))
        if mask is not None:
            keys = keys.masked_fill(~mask[:, None, :, None], float("-inf"))
        peaks = keys.detach().amax(dim=-2, keepdim=True)  # (B, H, 1, 2D)
        peaks = peaks.masked_fill(peaks == float("-inf"), 0.0)  # a sample without keys
        queries = queries + peaks
        return (queries - queries.detach().amax(dim=-1, keepdim=True)).exp(), (keys - peaks).exp()


def _log_features(x: Tensor) -> Tensor:
    """log φ(x), (B, H, N, 2D)."""
    return torch.cat([x.log_softmax(dim=-1), (-x).log_softmax(dim=-1)], dim=-1)
