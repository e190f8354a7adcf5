"""Mobile attention (Yao et al., 2024): linear attention whose heads compete through the flow into and out of them.

    q̂ = σ(q), k̂ = σ(k), e = 1e-6;   in each head h and token i, ⟨a, b⟩ = Σ_c (a_c + e)(b_c + e):
    I = 1 / ⟨q̂, Σ_h' k̂⟩,   O = 1 / ⟨k̂, Σ_h' q̂⟩                                        inflow and outflow of one head among all
    I' = ⟨q̂, Σ_h' k̂ O⟩,    O' = ⟨k̂, Σ_h' q̂ I⟩ clamped to [−1, 1]
    out_t = σ(I'_t) · I_t q̂_t Σ_j k̂_jᵀ v_j · n softmax_j(O'_j)

Shapes: q, k and v (B, H, N, D), all from the same tokens; I, O, I', O' (B, H, N, 1); the state is (B, H, D, D).
Normaliser: the flows; there is none over tokens, so outputs grow with their number n. Cost O(N·D²). Parameters: none.
Paper: Mobile Attention: Mobile-Friendly Linear-Attention for Vision Transformers. Source: thuml/MobileAttention, which applies
the softmax over tokens where the paper speaks of a competition of heads; designed for many narrow heads.
Departs: no dropout after the output projection by default; the released module has 0.05 there, the layer's proj_drop=0.05.

# B batch, H heads, N tokens, D head width
"""

from torch import Tensor

from polaformer.attention.core import Facts, WideCore, count_keys, masked_softmax, zero_absent

EPS = 1e-6


class MobileCore(WideCore):
    """Mobile attention."""

    name, facts = "mobile", Facts("linear", cross=False, mixes_queries=True, distributions=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Outputs, (B, H, N, D)."""
        queries, keys = _flow_features(q, k, mask)
        return queries @ (keys.mT @ v)

    def map(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Attention map, (B, H, N, N)."""
        queries, keys = _flow_features(q, k, mask)
        return queries @ keys.mT


def _flow_features(q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """σ(I') I q̂ and n softmax(O') k̂, (B, H, N, D) each."""
    q, k = q.sigmoid(), k.sigmoid()
    inflow, outflow = 1 / _inner_product(q, _sum_over_heads(k)), 1 / _inner_product(k, _sum_over_heads(q))
    allocated = _inner_product(q, _sum_over_heads(k * outflow)).sigmoid()
    offered = _inner_product(k, _sum_over_heads(q * inflow)).clamp(-1.0, 1.0)
    exists = None if mask is None else mask[:, None, None, :]
    competing = masked_softmax(offered.mT, exists).mT * count_keys(k, mask)
    return q * inflow * allocated, zero_absent(k, mask) * competing


def _sum_over_heads(x: Tensor) -> Tensor:
    return x.sum(dim=1, keepdim=True)


def _inner_product(a: Tensor, b: Tensor) -> Tensor:
    """⟨a, b⟩ = Σ_c (a_c + e)(b_c + e), (B, H, N, 1)."""
    return ((a + EPS) * (b + EPS)).sum(dim=-1, keepdim=True)
