"""Nyström attention (Nyströmformer; Xiong et al., 2021): softmax attention from m landmarks, means of consecutive tokens.

    out = softmax(Q K̃ᵀ) · softmax(Q̃ K̃ᵀ)⁺ · softmax(Q̃ Kᵀ) V,   Q and K scaled by D^-1/4 each
    Q̃_l, K̃_l = mean of the tokens of segment l;   the token of rank r among n belongs to segment ⌊r m / n⌋
    A⁺ ≈ Z after 6 steps of Z ← ¼ Z (13 − A Z (15 − A Z (7 − A Z))), from Z = Aᵀ / largest column sum of A

Shapes: q (B, H, N, D), k and v (B, H, M, D), landmarks (B, H, m, D); the three factors are (N, m), (m, m) and (m, M).
Normaliser: the three softmaxes; rows of the map sum to 1 as far as the inverse is exact. Cost O((N + M)·m·D + m³).
Parameters: none. A sample with at most m queries and at most m keys gets plain softmax attention, as published.
Paper: Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention. Source: Skyformer's Long Range Arena harness,
which leaves out the convolution of the values that Nyströmformer adds.
Departs: segments hold unmasked tokens, any number of them; published means count padding as zeros and need n to be a multiple
of m. Both agree if nothing is masked. Masked tokens therefore have no effect, wherever the padding is.
Departs: empty segments (fewer unmasked keys than landmarks) take no part in the softmaxes and the inverse.
Departs: the inverse starts from each matrix's own largest column sum; the published code uses the largest of the whole batch
and all heads, so that samples depend on each other.
as_published=True undoes all three: masked tokens are zeros in the means, hidden from the third factor alone, and a length above
m that m does not divide is refused.

# B batch, H heads, N queries, M keys, D head width, m landmarks
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from polaformer.arguments import check_flag, check_integer
from polaformer.attention.core import Facts, WideCore, masked_softmax
from polaformer.ops.precision import reciprocal


class NystromCore(WideCore):
    """Nyström attention; num_landmarks is m, iterations the number of refinements of the inverse; as_published: see above."""

    name = "nystrom"
    facts = Facts("linear", approximates="softmax", mixes_queries=True, distributions=False, coarse=(("num_landmarks", 16),))

    def __init__(
        self, num_heads: int, head_dim: int, *, num_landmarks: int = 128, iterations: int = 6, as_published: bool = False
    ) -> None:
        super().__init__(num_heads, head_dim)
        check_integer(self.where, "num_landmarks", num_landmarks)
        check_integer(self.where, "iterations", iterations)
        check_flag(self.where, "as_published", as_published)
        self.num_landmarks, self.iterations, self.as_published = num_landmarks, iterations, as_published
        if as_published:
            self.facts = replace(self.facts, trims=False)

    def check_call(self, q: Tensor, k: Tensor, bias: Tensor | None, cross: bool) -> None:
        """Raises ValueError for arguments that the mechanism does not support."""
        super().check_call(q, k, bias, cross)
        for what, length in (("queries", q.shape[2]), ("keys", k.shape[2])):
            if self.as_published and length > self.num_landmarks and length % self.num_landmarks:
                raise ValueError(
                    f"attention 'nystrom': got {length} {what} for {self.num_landmarks} landmarks, but as published each "
                    f"landmark averages equally many tokens; give a multiple of {self.num_landmarks}, or as_published=False"
                )

    def attend_mixed(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, queries: Tensor | None) -> Tensor:
        """Outputs, (B, H, N, D)."""
        if max(q.shape[2], k.shape[2]) <= self.num_landmarks:
            return self._softmax(q, k, mask) @ v
        left, inverse, right, exact = self._factors(q, k, mask, queries)
        values = inverse @ (right @ v)  # (B, H, m, D)
        return left @ (values if exact is None else torch.where(exact.samples, exact.keys.means(v), values))

    def map_mixed(self, q: Tensor, k: Tensor, mask: Tensor | None, queries: Tensor | None) -> Tensor:
        """Attention map, (B, H, N, M)."""
        if max(q.shape[2], k.shape[2]) <= self.num_landmarks:
            return self._softmax(q, k, mask)
        left, inverse, right, exact = self._factors(q, k, mask, queries)
        weights = inverse @ right  # (B, H, m, M)
        return left @ (weights if exact is None else torch.where(exact.samples, exact.keys.averaging_matrix(k.dtype), weights))

    def extra_repr(self) -> str:
        """The settings."""
        return f"num_landmarks={self.num_landmarks}, iterations={self.iterations}, as_published={self.as_published}"

    def _softmax(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """The map of softmax attention, (B, H, N, M); q and k may be landmarks."""
        return masked_softmax(q * self.head_dim**-0.5 @ k.mT, None if mask is None else mask[:, None, None, :])

    def _factors(self, q: Tensor, k: Tensor, mask: Tensor | None, queries: Tensor | None) -> "_Factors":
        if self.as_published:
            query_means, key_means = (_consecutive_means(x, self.num_landmarks) for x in (q, k))  # (B, H, m, D)
            landmark_mask, exact = None, None
        else:
            of_keys = _segments(k, mask, self.num_landmarks)
            same = queries is mask and q.shape[2] == k.shape[2]
            of_queries = of_keys if same else _segments(q, queries, self.num_landmarks)
            query_means, key_means = of_queries.means(q), of_keys.means(k)
            # Only key segments need a mask: query segments are empty only in samples with few unmasked tokens.
            landmark_mask = None if mask is None else of_keys.sizes > 0
            exact = None if mask is None else _Exact(_fit_landmarks(of_queries, of_keys, self.num_landmarks), of_keys)
        middle = self._softmax(query_means, key_means, landmark_mask)
        inverse = iterative_inverse(middle, self.iterations, shared_start=self.as_published)
        return _Factors(self._softmax(q, key_means, landmark_mask), inverse, self._softmax(query_means, k, mask), exact)


class _Segments(NamedTuple):
    """Tokens divided into segments: the mask, the segment of each token, the segment sizes, the number of unmasked tokens."""

    exists: Tensor  # (B or 1, N)
    segment: Tensor  # (B or 1, N)
    sizes: Tensor  # (B or 1, m)
    num_tokens: Tensor  # (B or 1, 1)

    def means(self, x: Tensor) -> Tensor:
        """Segment means (B, H, m, D), zero for empty segments, of x (B, H, N, D), which is zero for masked tokens."""
        sums = x.new_zeros(*x.shape[:2], self.sizes.shape[1], x.shape[3])
        sums = sums.scatter_add(2, self.segment[:, None, :, None].expand_as(x), x)
        return sums * reciprocal(self.sizes.to(x.dtype))[:, None, :, None]

    def averaging_matrix(self, dtype: torch.dtype) -> Tensor:
        """The matrix that computes the means, (B or 1, 1, m, N)."""
        number = torch.arange(self.sizes.shape[1], device=self.sizes.device)
        inside = (self.segment[:, None] == number[:, None]) & self.exists[:, None]
        return (inside * reciprocal(self.sizes.to(dtype))[:, :, None])[:, None]


class _Exact(NamedTuple):
    """The samples with at most as many unmasked queries and keys as landmarks: there a segment has one key or none."""

    samples: Tensor  # (B or 1, 1, 1, 1)
    keys: _Segments


class _Factors(NamedTuple):
    """The map is left · inverse · right; in exact samples left alone, which is then the softmax itself."""

    left: Tensor  # (B, H, N, m)
    inverse: Tensor  # (B, H, m, m), of the middle factor
    right: Tensor  # (B, H, m, M)
    exact: _Exact | None


def _segments(x: Tensor, mask: Tensor | None, num_landmarks: int) -> _Segments:
    """The unmasked tokens of x (B, H, N, D) in segments of nearly equal size: min(num_landmarks, N) segments."""
    exists = x.new_ones(1, x.shape[2], dtype=torch.bool) if mask is None else mask
    num_segments = min(num_landmarks, x.shape[2])
    count = exists.sum(dim=-1, keepdim=True)
    rank = (exists.cumsum(dim=-1) - 1).clamp(min=0)
    index = rank * num_segments // count.clamp(min=1)
    sizes = count.new_zeros(len(exists), num_segments).scatter_add(1, index, exists.long())
    return _Segments(exists, index, sizes, count)


def _fit_landmarks(of_queries: _Segments, of_keys: _Segments, num_landmarks: int) -> Tensor:
    fit = (of_queries.num_tokens <= num_landmarks) & (of_keys.num_tokens <= num_landmarks)
    return fit[:, :, None, None]


def _consecutive_means(x: Tensor, num_landmarks: int) -> Tensor:
    """(B, H, m, D), means of N/m consecutive tokens of x (B, H, N, D), counting zeros; x itself if N is less than m."""
    return x.unflatten(2, (min(num_landmarks, x.shape[2]), -1)).mean(dim=3)


def iterative_inverse(matrix: Tensor, iterations: int, *, shared_start: bool = False) -> Tensor:
    """The approximate pseudo-inverse (…, j, i) of a non-negative matrix (…, i, j) whose rows sum to at most about 1.

    Zero rows and columns stay zero. Small singular values are not inverted fully: a step multiplies by at most 3.25.
    shared_start: all matrices start from the largest column sum of any, as published, instead of each from its own.
    """
    sums = matrix.sum(dim=-2, keepdim=True)  # (…, 1, j)
    inverse = matrix.mT * reciprocal(sums.amax() if shared_start else sums.amax(dim=-1, keepdim=True))
    identity = torch.eye(matrix.shape[-2], dtype=matrix.dtype, device=matrix.device)
    for _ in range(iterations):
        product = matrix @ inverse
        inverse = 0.25 * inverse @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product)))
    return inverse
