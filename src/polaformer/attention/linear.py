"""Linear attention with the feature map ELU + 1 (Katharopoulos et al., 2020), Eq. 2 of the paper.

    out_t = φ(q_t) Σ_i φ(k_i)ᵀ v_i / φ(q_t) Σ_i φ(k_i)ᵀ,   φ(x) = elu(x) + 1

Shapes: q (B, H, N, D), k and v (B, H, M, D); the state Σ φ(k_i)ᵀ v_i is (B, H, D, D).
Normaliser: the sum over the keys that exist. Cost O((N + M)·D²). Parameters: none.
Paper: Transformers are RNNs (Katharopoulos et al., 2020). Source: the paper.
Departs: the Long Range Arena's code, which ignores the mask and adds 1e-6 to the normaliser, and Nyströmformer's, which divides
by √n instead of normalising.

# B batch, H heads, N queries, M keys, D head width
"""

from torch import Tensor

from polaformer.attention.core import Facts, FeatureCore, zero_absent


class LinearCore(FeatureCore):
    """ELU + 1 linear attention."""

    name, facts = "linear", Facts("linear")

    def features(self, q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """φ(q) and φ(k)."""
        return _features(q), zero_absent(_features(k), mask)


def _features(x: Tensor) -> Tensor:
    # elu(x) + 1 as it stands loses all digits below −17 in fp32: there it is exp(x).
    return x.clamp(max=0).exp() + x.relu()
