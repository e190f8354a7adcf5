"""Skyformer (Chen et al., 2021): the Gaussian kernel of kernelized attention from m landmarks, redrawn in every call.

    out = κ(Q, S) G⁻¹ κ(K, S)ᵀ V,   κ(x, y) = exp(−½ ‖x − y‖²),   G = κ(S, S) + γ,   Q and K scaled by D^-1/4 each
    S: ⌊m/2⌋ of the queries and m − ⌊m/2⌋ of the keys, drawn with replacement: number ⌊u n⌋ of n tokens for a uniform u
    G⁻¹ = d^-1/2 Ĝ⁻¹ d^-1/2 with d the row sums of G and Ĝ = d^-1/2 G d^-1/2; Ĝ⁻¹ by the iteration of Nyström attention

Shapes: q (B, H, N, D), k and v (B, H, M, D), S (B, H, m, D), G (B, H, m, m). Samples and heads share the uniforms.
Normaliser: none for the rows, as in kernelized attention. Cost O((N + M)·m·D + m³). Parameters: none.
Paper: Skyformer: Remodel Self-Attention with Gaussian Kernel and Nyström Method. Source: pkuzengqi/Skyformer, which draws in
evaluation too, as we do; for an odd m, which it does not support, the keys get one landmark more.
Departs: landmarks are drawn from the unmasked tokens, wherever they are; the published code takes the first n positions and so
assumes padding at the end, where both draw the same.
Departs: the inverse starts from each matrix's own largest column sum; the published code uses the largest of the whole batch
and all heads, so that samples depend on each other.
as_published=True undoes both: of n unmasked tokens, number ⌊u n⌋ is the token at that position, a zero if it is masked.

# B batch, H heads, N queries, M keys, D head width, m landmarks
"""

from dataclasses import replace

import torch
from torch import Tensor

from polaformer.arguments import check_flag, check_integer, check_number
from polaformer.attention.core import Facts, WideCore, zero_absent
from polaformer.attention.mechanisms.nystrom import iterative_inverse


class SkyformerCore(WideCore):
    """Skyformer; num_landmarks is m, gamma is γ, iterations the refinements of the inverse; as_published: see above."""

    name = "skyformer"
    facts = Facts(
        "linear",
        approximates="kernelized",
        stochastic=True,
        mixes_queries=True,
        distributions=False,
        coarse=(("num_landmarks", 16),),
    )

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_landmarks: int = 128,
        gamma: float = 0.1,
        iterations: int = 6,
        as_published: bool = False,
    ) -> None:
        super().__init__(num_heads, head_dim)
        check_integer(self.where, "num_landmarks", num_landmarks)
        check_integer(self.where, "iterations", iterations)
        check_number(self.where, "gamma", gamma, above=True)
        check_flag(self.where, "as_published", as_published)
        self.num_landmarks, self.gamma, self.iterations, self.as_published = num_landmarks, gamma, iterations, as_published
        if as_published:
            self.facts = replace(self.facts, trims=False)

    def attend_mixed(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, queries: Tensor | None) -> Tensor:
        """Outputs, (B, H, N, D)."""
        left, inverse, right = self._factors(q, k, mask, queries)
        return left @ (inverse @ (right.mT @ v))

    def map_mixed(self, q: Tensor, k: Tensor, mask: Tensor | None, queries: Tensor | None) -> Tensor:
        """Attention map, (B, H, N, M)."""
        left, inverse, right = self._factors(q, k, mask, queries)
        return left @ inverse @ right.mT

    def extra_repr(self) -> str:
        """The settings."""
        shown = f"num_landmarks={self.num_landmarks}, gamma={self.gamma}, iterations={self.iterations}"
        return f"{shown}, as_published={self.as_published}"

    def _factors(self, q: Tensor, k: Tensor, mask: Tensor | None, queries: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """κ(Q, S) (B, H, N, m), G⁻¹ (B, H, m, m), and κ(K, S) (B, H, M, m), which is zero for masked keys."""
        q, k = q * self.head_dim**-0.25, k * self.head_dim**-0.25
        landmarks = self._draw_landmarks(q, k, mask, queries)
        # Distances do not depend on the origin, but their rounding errors do.
        origin = landmarks.detach().mean(dim=2, keepdim=True)
        q, k, landmarks = q - origin, k - origin, landmarks - origin
        identity = torch.eye(self.num_landmarks, dtype=q.dtype, device=q.device)
        gram = _gaussian(landmarks, landmarks) + self.gamma * identity
        roots = gram.sum(dim=-1, keepdim=True).rsqrt()  # (B, H, m, 1)
        normalised = iterative_inverse(roots * gram * roots.mT, self.iterations, shared_start=self.as_published)
        inverse = roots * normalised * roots.mT
        return _gaussian(q, landmarks), inverse, zero_absent(_gaussian(k, landmarks), mask)

    def _draw_landmarks(self, q: Tensor, k: Tensor, mask: Tensor | None, queries: Tensor | None) -> Tensor:
        """S, (B, H, m, D): landmarks from the queries, then from the keys."""
        uniforms = torch.rand(self.num_landmarks, dtype=torch.float32, device=q.device)
        of_queries, of_keys = uniforms.tensor_split([self.num_landmarks // 2])
        sample = _sample_prefix if self.as_published else sample_positions
        from_queries = gather_tokens(q, sample(of_queries, queries, q.shape[2]))
        return torch.cat([from_queries, gather_tokens(k, sample(of_keys, mask, k.shape[2]))], dim=2)


def _gaussian(x: Tensor, y: Tensor) -> Tensor:
    """κ, (…, i, j), of x (…, i, D) and y (…, j, D)."""
    squares = x.square().sum(dim=-1, keepdim=True) + y.square().sum(dim=-1, keepdim=True).mT - 2 * x @ y.mT
    # Rounding may make a squared distance negative, and κ larger than 1.
    return torch.exp(-0.5 * squares.clamp(min=0.0))


def sample_positions(uniforms: Tensor, mask: Tensor | None, length: int) -> Tensor:
    """Positions of token number ⌊u n⌋ among the n unmasked ones of `length`: (B or 1, S) for uniforms (S,).

    Position 0 if all are masked. Draws depend on n alone, so padding at the end has no effect.
    """
    if mask is None:
        return (uniforms * length).long().clamp(max=length - 1)[None]
    count = mask.sum(dim=-1, keepdim=True)
    number = torch.minimum((uniforms * count).long(), count - 1)  # u n may round up to n
    return torch.searchsorted(mask.cumsum(dim=-1), number + 1)


def _sample_prefix(uniforms: Tensor, mask: Tensor | None, length: int) -> Tensor:
    """Like `sample_positions`, but ⌊u n⌋ is the position itself, as if the n unmasked tokens were the first."""
    if mask is None:
        return sample_positions(uniforms, None, length)
    count = mask.sum(dim=-1, keepdim=True)
    return torch.minimum((uniforms * count).long(), (count - 1).clamp(min=0))


def gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """The tokens of x (B, H, N, D) at positions (B or 1, S): (B, H, S, D)."""
    return x.gather(2, index[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3]))
