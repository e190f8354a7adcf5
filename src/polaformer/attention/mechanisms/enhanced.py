"""Enhanced linear attention (EfficientViT's first version; Cai et al., 2022): ReLU linear attention, locality from the MLP.

    out_t = relu(q_t) Σ_i relu(k_i)ᵀ v_i / relu(q_t) Σ_i relu(k_i)ᵀ

Shapes: q (B, H, N, D), k and v (B, H, M, D); the state Σ relu(k_i)ᵀ v_i is (B, H, D, D).
Normaliser: the sum over the keys that exist. Cost O((N + M)·D²). Parameters: none here; its block has a 3×3 depthwise
convolution between the two layers of the MLP, which our backbones add where this mechanism is chosen.
Paper: EfficientViT: Enhanced Linear Attention for High-Resolution Low-Computation Visual Recognition (v2). Source: the paper;
where the convolution stands is the reading that gives Table 1's 5.8 M parameters.
Departs: no 1e-15 in the normaliser; a query that meets no key mass gives zeros.

# B batch, H heads, N queries, M keys, D head width
"""

import torch
from torch import Tensor

from polaformer.attention.core import Facts, FeatureCore, LayerParts


class EnhancedCore(FeatureCore):
    """ReLU linear attention."""

    name, facts = "enhanced", Facts("linear", published=LayerParts(local_mlp=True))

    def features(self, q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """relu(q) and relu(k), what does not exist being zero already; each up to a factor that cancels.

        Without it, products of tiny features would vanish, or divide by what cannot be inverted.
        """
        q, k = q.relu(), k.relu()
        largest_query, largest_key = q.detach().amax(dim=-1, keepdim=True), k.detach().amax(dim=(-2, -1), keepdim=True)
        return q / _or_one(largest_query), k / _or_one(largest_key)


def _or_one(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1.0, x)
