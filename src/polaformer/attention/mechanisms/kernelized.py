"""Kernelized attention (Chen et al., 2021): a Gaussian kernel in place of the softmax; Skyformer approximates it.

    out_t = Σ_i C_ti v_i,   C_ti = exp(−‖s q_t − s k_i‖² / 2),   s = D^-1/4

Shapes: q (B, H, N, D), k and v (B, H, M, D), C (B, H, N, M), zero for masked keys.
Normaliser: none, so outputs grow with the number of nearby keys. Cost O(N·M·D). Parameters: none.
Paper: Skyformer: Remodel Self-Attention with Gaussian Kernel and Nyström Method. Source: pkuzengqi/Skyformer.
Departs: no dropout of C by default; the Skyformer harness has dropout=0.1, in training only.
Departs: masked queries are not set to zero; no other token's result depends on them.

# B batch, H heads, N queries, M keys, D head width
"""

import torch.nn.functional as F
from torch import Tensor

from polaformer.arguments import check_number
from polaformer.attention.core import Facts, WideCore, at_least_one, count_keys


class KernelizedCore(WideCore):
    """Attention with a Gaussian kernel; dropout applies to the weights, in training only."""

    name, facts = "kernelized", Facts("quadratic", distributions=False)

    def __init__(self, num_heads: int, head_dim: int, *, dropout: float = 0.0) -> None:
        super().__init__(num_heads, head_dim)
        check_number(self.where, "dropout", dropout, below=1.0)
        self.dropout = dropout

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Outputs, (B, H, N, D)."""
        return self.map(q, k, mask) @ v

    def map(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Attention map, (B, H, N, M); in training, after dropout."""
        # Distances do not depend on the origin, but their rounding errors do.
        origin = k.detach().sum(dim=2, keepdim=True) / at_least_one(count_keys(k, mask))
        weights = gaussian_kernel(q - origin, k - origin)
        if mask is not None:
            weights = weights * mask[:, None, None, :]
        return F.dropout(weights, self.dropout, self.training)

    def extra_repr(self) -> str:
        """The settings."""
        return f"dropout={self.dropout}"


def gaussian_kernel(q: Tensor, k: Tensor) -> Tensor:
    """exp(−‖q_t − k_i‖² / (2√D)), (B, H, N, M)."""
    squares = q.square().sum(dim=-1, keepdim=True) + k.square().sum(dim=-1, keepdim=True).mT
    # Rounding may make a squared distance negative, by a lot for large vectors.
    return ((q @ k.mT - squares / 2) * q.shape[-1] ** -0.5).clamp(max=0).exp()
