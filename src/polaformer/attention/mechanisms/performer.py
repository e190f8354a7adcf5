"""Performer, FAVOR+ (Choromanski et al., 2021): positive random features whose products are softmax scores in the mean.

    out_t = φ(q_t) Σ_i φ(k_i)ᵀ v_i / φ(q_t) Σ_i φ(k_i)ᵀ,   φ(x) = exp(W x̂ − ‖x̂‖²/2 − max) + 1e-4,   x̂ = D^-1/4 x

Shapes: q (B, H, N, D), k and v (B, H, M, D), W (F, D), φ(x) (B, H, N, F); max is the largest entry of W x̂: that of the row for
a query, that of all keys of the same sample and head for a key. The rows of W come in blocks of D orthogonal ones, each with
the norm of a Gaussian vector; they are drawn once and kept as a buffer. The published factor F^-1/2 of φ cancels. The 1e-4
draws results towards the mean of v, the more the larger ‖x̂‖ is: close to softmax attention for small vectors only.
Normaliser: the sum over the keys that exist. Cost O((N + M)·F·D). Parameters: none; the buffer has F·D entries.
Paper: Rethinking Attention with Performers. Source: lucidrains/performer-pytorch, in the form that pkuzengqi/Skyformer runs.
Departs: x is scaled with D^-1/4 once; the Skyformer harness does it twice, which makes the scores ⟨q, k⟩/D.
Departs: keys that do not exist have no part in the normaliser; in the harness they enter it as φ(0).
Departs: the max of the keys is that of one sample and head; in the harness it is that of the batch, so that samples depend on
each other through the 1e-4.
Departs: the orthogonal blocks are uniformly distributed; a QR decomposition alone prefers some signs.
as_published=True undoes the first two, on which the rows of Skyformer's harness depend.
Departs: the Long Range Arena's own rows, which other tables copy, are not FAVOR+: on four tasks φ(x) is relu(x) + 1e-3 without
projection or mask, and on ListOps there are 2 random features. No switch brings that back.

# B batch, H heads, N queries, M keys, D head width, F features
"""

import torch
from torch import Tensor

from polaformer.arguments import check_flag, check_integer
from polaformer.attention.core import Facts, FeatureCore, zero_absent

EPS = 1e-4


class PerformerCore(FeatureCore):
    """FAVOR+ attention with num_features random features."""

    name, facts = "performer", Facts("linear", approximates="softmax")
    projection: Tensor

    def __init__(self, num_heads: int, head_dim: int, *, num_features: int = 128, as_published: bool = False) -> None:
        super().__init__(num_heads, head_dim)
        check_integer(self.where, "num_features", num_features)
        check_flag(self.where, "as_published", as_published)
        self.num_features, self.as_published = num_features, as_published
        projection = draw_projection(num_features, head_dim).to(torch.get_default_dtype())
        self.register_buffer("projection", projection)

    def features(self, q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """φ(q) and φ(k)."""
        counted = None if self.as_published else mask
        projected, halves = self._project(q)
        queries = (projected - halves - projected.amax(dim=-1, keepdim=True)).exp() + EPS
        projected, halves = self._project(k)
        if counted is not None:
            projected = projected.masked_fill(~counted[:, None, :, None], float("-inf"))
        largest = projected.amax(dim=(-2, -1), keepdim=True)
        largest = largest.masked_fill(largest == float("-inf"), 0.0)  # a sample without keys
        return queries, zero_absent((projected - halves - largest).exp() + EPS, counted)

    def map(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, M). With as_published rows sum to less than 1 where keys are absent."""
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
    # In float32 whatever PyTorch's default is: narrower types have no decomposition.
    blocks, triangles = torch.linalg.qr(torch.randn(num_blocks, head_dim, head_dim, dtype=torch.float32))
    # The signs make the orthogonal matrices uniformly distributed, whatever convention the decomposition follows.
    blocks = blocks * triangles.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    return blocks.flatten(0, 1)[:num_features] * torch.randn(num_features, head_dim, dtype=torch.float32).norm(
        dim=-1, keepdim=True
    )
