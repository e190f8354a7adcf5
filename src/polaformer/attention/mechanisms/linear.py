"""Linear attention with the feature map ELU + 1 (Katharopoulos et al., 2020), Eq. 2 of the paper.

    out_t = φ(q_t) Σ_i φ(k_i)ᵀ v_i / φ(q_t) Σ_i φ(k_i)ᵀ,   φ(x) = elu(x) + 1

Shapes: q (B, H, N, D), k and v (B, H, M, D); the state Σ φ(k_i)ᵀ v_i is (B, H, D, D).
Normaliser: the sum over the unmasked keys. Cost O((N + M)·D²). Parameters: none.
Paper: Transformers are RNNs (Katharopoulos et al., 2020). Source: the paper.
Departs: the Long Range Arena's code ignores the mask and adds 1e-6 to the normaliser; as_published=True does the same, so that
masked tokens count like any other.
Departs: Nyströmformer's code divides by √n instead of normalising.

# B batch, H heads, N queries, M keys, D head width
"""

from dataclasses import replace

from torch import Tensor

from polaformer.arguments import check_flag
from polaformer.attention.core import Facts, FeatureCore, zero_absent

EPS = 1e-6


class LinearCore(FeatureCore):
    """ELU + 1 linear attention; as_published: as in the Long Range Arena's code."""

    name, facts = "linear", Facts("linear")

    def __init__(self, num_heads: int, head_dim: int, *, as_published: bool = False) -> None:
        super().__init__(num_heads, head_dim)
        check_flag(self.where, "as_published", as_published)
        self.as_published = as_published
        if as_published:
            self.facts = replace(self.facts, reads_masked=True, trims=False)

    def features(self, q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """φ(q) and φ(k)."""
        return _features(q), zero_absent(_features(k), None if self.as_published else mask)

    def divisors(self, norms: Tensor, num_keys: Tensor | int) -> Tensor:
        """1 / norm, or 1 / (norm + 1e-6) as published."""
        return 1 / (norms + EPS) if self.as_published else super().divisors(norms, num_keys)

    def extra_repr(self) -> str:
        """The settings."""
        return f"as_published={self.as_published}"


def _features(x: Tensor) -> Tensor:
    # For x < 0 this is exp(x); computed literally, elu(x) + 1 has no correct digit below −17 in float32.
    return x.clamp(max=0).exp() + x.relu()
