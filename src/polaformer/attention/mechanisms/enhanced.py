"""Enhanced linear attention (EfficientViT's first version; Cai et al., 2022): ReLU linear attention, locality from the MLP.

    out_t = relu(q_t) Σ_i relu(k_i)ᵀ v_i / relu(q_t) Σ_i relu(k_i)ᵀ

Shapes: q (B, H, N, D), k and v (B, H, M, D); the state Σ relu(k_i)ᵀ v_i is (B, H, D, D).
Normaliser: the sum over the unmasked keys. Cost O((N + M)·D²). Parameters: none here; the published block has a 3×3 depthwise
convolution between the two layers of its MLP, which our backbones add for this mechanism.
Paper: EfficientViT: Enhanced Linear Attention for High-Resolution Low-Computation Visual Recognition (v2). Source: the paper;
we place the convolution where it gives the 5.8 M parameters of Table 1.
Departs: no 1e-15 in the normaliser; a query whose normaliser is zero gives zeros.

# B batch, H heads, N queries, M keys, D head width
"""

import torch
from torch import Tensor

from polaformer.attention.core import Facts, FeatureCore, LayerParts


class EnhancedCore(FeatureCore):
    """ReLU linear attention."""

    name, facts = "enhanced", Facts("linear", published=LayerParts(local_mlp=True))

    def features(self, q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """relu(q) and relu(k), each divided by a maximum that cancels; masked keys are zero already.

        Without the division, products of tiny features would underflow, or their sum would have no finite reciprocal.
        """
        q, k = q.relu(), k.relu()
        largest_query, largest_key = q.detach().amax(dim=-1, keepdim=True), k.detach().amax(dim=(-2, -1), keepdim=True)
        return q / _zeros_to_ones(largest_query), k / _zeros_to_ones(largest_key)


def _zeros_to_ones(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1.0, x)
