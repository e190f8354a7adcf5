"""Performer, FAVOR+ (Choromanski et al., 2021): positive random features whose expected products are softmax scores.

    out_t = φ(q_t) Σ_i φ(k_i)ᵀ v_i / φ(q_t) Σ_i φ(k_i)ᵀ,   φ(x) = exp(W x̂ − ‖x̂‖²/2 − max) + 1e-4,   x̂ = D^-1/4 x

Shapes: q (B, H, N, D), k and v (B, H, M, D), W (F, D), φ(x) (B, H, N, F); max is the largest entry of W x̂: of its row for a
query, of all keys of the same sample and head for a key. The rows of W are orthogonal in blocks of D, each with the norm of a
Gaussian vector; they are drawn once and stored as a buffer. The published factor F^-1/2 of φ cancels. The 1e-4 pulls results
towards the mean of v, the more the larger ‖x̂‖ is: they are close to softmax attention for small vectors only.
Normaliser: the sum over the unmasked keys. Cost O((N + M)·F·D). Parameters: none; the buffer has F·D entries.
Paper: Rethinking Attention with Performers. Source: lucidrains/performer-pytorch, in the form that pkuzengqi/Skyformer runs.
Departs: x is scaled by D^-1/4 once; the Skyformer harness does so twice, which makes the scores ⟨q, k⟩/D.
Departs: masked keys are excluded from the normaliser; in the harness they enter it as φ(0).
Departs: the max over the keys is per sample and head; in the harness it is over the batch, so that samples depend on each other
through the 1e-4.
Departs: the orthogonal blocks are uniformly distributed; a QR decomposition alone prefers some signs.
as_published=True undoes the first two, on which the results of Skyformer's harness depend.
Departs: the Long Range Arena's own results, which other tables copy, are not FAVOR+: on four tasks φ(x) is relu(x) + 1e-3
without projection or mask, and ListOps has 2 random features. No option reproduces that.

# B batch, H heads, N queries, M keys, D head width, F features
"""

from dataclasses import replace

import torch
from torch import Tensor

from polaformer.arguments import check_flag, check_integer
from polaformer.attention.core import Facts, FeatureCore, zero_absent

EPS = 1e-4


class PerformerCore(FeatureCore):
    """FAVOR+ attention with num_features random features."""

    name, facts = "performer", Facts("linear", approximates="softmax", coarse=(("num_features", 16),))
    projection: Tensor

    def __init__(self, num_heads: int, head_dim: int, *, num_features: int = 128, as_published: bool = False) -> None:
        super().__init__(num_heads, head_dim)
        check_integer(self.where, "num_features", num_features)
        check_flag(self.where, "as_published", as_published)
        self.num_features, self.as_published = num_features, as_published
        if as_published:
            self.facts = replace(self.facts, trims=False)
        projection = draw_projection(num_features, head_dim).to(torch.get_default_dtype())
        self.register_buffer("projection", projection)

    def features(self, q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """φ(q) and φ(k)."""
        key_mask = None if self.as_published else mask
        projected, half_squares = self._project(q)
        queries = (projected - half_squares - projected.amax(dim=-1, keepdim=True)).exp() + EPS
        projected, half_squares = self._project(k)
        if key_mask is not None:
            projected = projected.masked_fill(~key_mask[:, None, :, None], float("-inf"))
        largest = projected.amax(dim=(-2, -1), keepdim=True)
        largest = largest.masked_fill(largest == float("-inf"), 0.0)  # a sample without keys
        return queries, zero_absent((projected - half_squares - largest).exp() + EPS, key_mask)

    def map(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Attention map, (B, H, N, M). With as_published, rows sum to less than 1 if keys are masked."""
        weights = super().map(q, k, mask)
        return weights if mask is None else weights * mask[:, None, None, :]

    def extra_repr(self) -> str:
        """The settings."""
        return f"num_features={self.num_features}, as_published={self.as_published}"

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """W x̂ (B, H, N, F) and ‖x̂‖²/2 (B, H, N, 1)."""
        x = x * self.head_dim ** (-0.5 if self.as_published else -0.25)
        return x @ self.projection.to(x.dtype).mT, x.square().sum(dim=-1, keepdim=True) / 2


def draw_projection(num_features: int, head_dim: int) -> Tensor:
    """(F, D) Gaussian rows, orthogonal in blocks of D."""
    num_blocks = -(-num_features // head_dim)
    # Always float32, whatever PyTorch's default dtype: narrower ones have no QR decomposition.
    blocks, triangles = torch.linalg.qr(torch.randn(num_blocks, head_dim, head_dim, dtype=torch.float32))
    # These signs make the orthogonal matrices uniformly distributed, whatever sign convention the decomposition follows.
    blocks = blocks * triangles.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    return blocks.flatten(0, 1)[:num_features] * torch.randn(num_features, head_dim, dtype=torch.float32).norm(
        dim=-1, keepdim=True
    )
