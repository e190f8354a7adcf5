"""Nyström attention (Nyströmformer; Xiong et al., 2021): softmax attention from m landmarks, means of consecutive tokens.

    out = softmax(Q K̃ᵀ) · softmax(Q̃ K̃ᵀ)⁺ · softmax(Q̃ Kᵀ) V,   Q and K scaled by D^-1/4 each
    Q̃_l, K̃_l = mean of the tokens of segment l;   the token of rank r among n lies in segment ⌊r m / n⌋
    A⁺ ≈ Z after 6 steps of Z ← ¼ Z (13 − A Z (15 − A Z (7 − A Z))), from Z = Aᵀ / largest column sum of A

Shapes: q (B, H, N, D), k and v (B, H, M, D), landmarks (B, H, m, D); the three factors are (N, m), (m, m) and (m, M).
Normaliser: the three softmaxes; rows of the map sum to 1 as far as the inverse is one. Cost O((N + M)·m·D + m³).
Parameters: none. Where a sample has neither more queries nor more keys than landmarks: plain softmax, as published.
Paper: Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention. Source: the Long Range Arena harness of
Skyformer, which leaves out the convolution of the values that Nyströmformer adds.
Departs: segments hold tokens that exist, any number of them, where published means count padding as zeros and need n to be a
multiple of m; both are the same if nothing is masked. Tokens in the padding are therefore as good as absent, wherever it is.
Departs: segments that are empty, because fewer keys exist than there are landmarks, take no part in softmax and inverse.
Departs: the inverse starts from each matrix's own largest column sum; published code takes the largest of the whole batch and
of all heads, so that samples depend on each other.
as_published=True undoes all three: masked tokens are zeros in the means, hidden from the third factor alone, and a length above
m that m does not divide is refused.

# B batch, H heads, N queries, M keys, D head width, m landmarks
"""

from typing import NamedTuple

import torch
from torch import Tensor

from polaformer.arguments import check_flag, check_integer
from polaformer.attention.core import Facts, WideCore, masked_softmax
from polaformer.ops.polarity.plain import reciprocal


class NystromCore(WideCore):
    """Nyström attention; num_landmarks is m, iterations how often the inverse is refined; as_published: see above."""

    name, facts = "nystrom", Facts("linear", approximates="softmax", mixes_queries=True, distributions=False)

    def __init__(
        self, num_heads: int, head_dim: int, *, num_landmarks: int = 128, iterations: int = 6, as_published: bool = False
    ) -> None:
        super().__init__(num_heads, head_dim)
        check_integer(self.where, "num_landmarks", num_landmarks)
        check_integer(self.where, "iterations", iterations)
        check_flag(self.where, "as_published", as_published)
        self.num_landmarks, self.iterations, self.as_published = num_landmarks, iterations, as_published

    def check_call(self, q: Tensor, k: Tensor, bias: Tensor | None, cross: bool) -> None:
        """Raises for what the mechanism cannot honour."""
        super().check_call(q, k, bias, cross)
        for what, length in (("queries", q.shape[2]), ("keys", k.shape[2])):
            if self.as_published and length > self.num_landmarks and length % self.num_landmarks:
                raise ValueError(
                    f"attention 'nystrom': got {length} {what} for {self.num_landmarks} landmarks, but as published each is "
                    f"the mean of as many tokens; give a multiple of {self.num_landmarks}, or as_published=False"
                )

    def attend_mixed(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, queries: Tensor | None) -> Tensor:
        """(B, H, N, D)."""
        if max(q.shape[2], k.shape[2]) <= self.num_landmarks:
            return self._softmax(q, k, mask) @ v
        left, inverse, right, few = self._factors(q, k, mask, queries)
        values = inverse @ (right @ v)  # (B, H, m, D)
        return left @ (values if few is None else torch.where(few.where, few.keys.means(v), values))

    def map_mixed(self, q: Tensor, k: Tensor, mask: Tensor | None, queries: Tensor | None) -> Tensor:
        """(B, H, N, M)."""
        if max(q.shape[2], k.shape[2]) <= self.num_landmarks:
            return self._softmax(q, k, mask)
        left, inverse, right, few = self._factors(q, k, mask, queries)
        weights = inverse @ right  # (B, H, m, M)
        return left @ (weights if few is None else torch.where(few.where, few.keys.matrix(k.dtype), weights))

    def extra_repr(self) -> str:
        """The settings."""
        return f"num_landmarks={self.num_landmarks}, iterations={self.iterations}, as_published={self.as_published}"

    def _softmax(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """The map of softmax attention, (B, H, N, M), also for landmarks."""
        return masked_softmax(q * self.head_dim**-0.5 @ k.mT, None if mask is None else mask[:, None, None, :])

    def _factors(self, q: Tensor, k: Tensor, mask: Tensor | None, queries: Tensor | None) -> "_Factors":
        if self.as_published:
            near_queries, near_keys = (_consecutive_means(x, self.num_landmarks) for x in (q, k))  # (B, H, m, D)
            landmarks, few = None, None
        else:
            of_keys = _segments(k, mask, self.num_landmarks)
            same = queries is mask and q.shape[2] == k.shape[2]
            of_queries = of_keys if same else _segments(q, queries, self.num_landmarks)
            near_queries, near_keys = of_queries.means(q), of_keys.means(k)
            # Only segments of keys need a mask: those of queries are empty where few tokens exist, and nowhere else.
            landmarks = None if mask is None else of_keys.sizes > 0
            few = None if mask is None else _Few(_are_few(of_queries, of_keys, self.num_landmarks), of_keys)
        middle = self._softmax(near_queries, near_keys, landmarks)
        inverse = iterative_inverse(middle, self.iterations, one_start=self.as_published)
        return _Factors(self._softmax(q, near_keys, landmarks), inverse, self._softmax(near_queries, k, mask), few)


class _Segments(NamedTuple):
    """How tokens are divided: which exist, the segment of each, how many each segment holds, and how many there are at all."""

    exists: Tensor  # (B or 1, N)
    segment: Tensor  # (B or 1, N)
    sizes: Tensor  # (B or 1, m)
    num_tokens: Tensor  # (B or 1, 1)

    def means(self, x: Tensor) -> Tensor:
        """(B, H, m, D), zero for empty segments, of x (B, H, N, D) that is zero for tokens that do not exist."""
        sums = x.new_zeros(*x.shape[:2], self.sizes.shape[1], x.shape[3])
        sums = sums.scatter_add(2, self.segment[:, None, :, None].expand_as(x), x)
        return sums * reciprocal(self.sizes.to(x.dtype))[:, None, :, None]

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """What takes the means, as a matrix, (B or 1, 1, m, N)."""
        number = torch.arange(self.sizes.shape[1], device=self.sizes.device)
        inside = (self.segment[:, None] == number[:, None]) & self.exists[:, None]
        return (inside * reciprocal(self.sizes.to(dtype))[:, :, None])[:, None]


class _Few(NamedTuple):
    """Where neither more queries nor more keys exist than there are landmarks: a segment then has one key or none."""

    where: Tensor  # (B or 1, 1, 1, 1)
    keys: _Segments


class _Factors(NamedTuple):
    """The map in parts: left · inverse · right, or left alone, which is the softmax itself, where few tokens exist."""

    left: Tensor  # (B, H, N, m)
    inverse: Tensor  # (B, H, m, m), of the middle factor
    right: Tensor  # (B, H, m, M)
    few: _Few | None


def _segments(x: Tensor, mask: Tensor | None, num_landmarks: int) -> _Segments:
    """The tokens of x (B, H, N, D) that exist, in segments as even as can be: at most num_landmarks, at most N."""
    exists = x.new_ones(1, x.shape[2], dtype=torch.bool) if mask is None else mask
    number = min(num_landmarks, x.shape[2])
    count = exists.sum(dim=-1, keepdim=True)
    rank = (exists.cumsum(dim=-1) - 1).clamp(min=0)
    index = rank * number // count.clamp(min=1)
    sizes = count.new_zeros(len(exists), number).scatter_add(1, index, exists.long())
    return _Segments(exists, index, sizes, count)


def _are_few(of_queries: _Segments, of_keys: _Segments, num_landmarks: int) -> Tensor:
    few = (of_queries.num_tokens <= num_landmarks) & (of_keys.num_tokens <= num_landmarks)
    return few[:, :, None, None]


def _consecutive_means(x: Tensor, num_landmarks: int) -> Tensor:
    """(B, H, m, D), means of N/m consecutive tokens of x (B, H, N, D), zeros counted too; x itself where N is less than m."""
    return x.unflatten(2, (min(num_landmarks, x.shape[2]), -1)).mean(dim=3)


def iterative_inverse(matrix: Tensor, iterations: int, *, one_start: bool = False) -> Tensor:
    """The pseudo-inverse (…, j, i), roughly, of a matrix (…, i, j) without negative entries whose rows sum to at most about 1.

    Rows and columns of zeros stay out of it. Small singular values are not inverted fully: a step multiplies by at most 3.25.
    one_start: all matrices start from the largest column sum of any, as published, not each from its own.
    """
    sums = matrix.sum(dim=-2, keepdim=True)  # (…, 1, j)
    inverse = matrix.mT * reciprocal(sums.amax() if one_start else sums.amax(dim=-1, keepdim=True))
    identity = torch.eye(matrix.shape[-2], dtype=matrix.dtype, device=matrix.device)
    for _ in range(iterations):
        product = matrix @ inverse
        inverse = 0.25 * inverse @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product)))
    return inverse
