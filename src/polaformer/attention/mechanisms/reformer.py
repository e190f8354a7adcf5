"""Reformer's LSH attention (Kitaev et al., 2020): tokens that hash alike are sorted next to each other, and attend there.

    κ_i = D^-1/2 q_i / √(mean_c q_ic² + 1e-6),   s_ti = ⟨q_t, κ_i⟩ for i ≠ t,   s_tt = −1e5
    bucket_r(i) = argmax [q_i R_r ; −q_i R_r],   R_r (D, num_buckets/2) standard normal, drawn in every call, one for each head
    in each round r the tokens are sorted by bucket and cut into chunks; a chunk A_r(t) sees itself and the one before it
    out_t = Σ_r Σ_{i ∈ A_r(t)} e^{s_ti} v_i / Σ_r Σ_{i ∈ A_r(t)} e^{s_ti}

Shapes: q and v (B, H, N, D), the same tokens in both; a chunk of S queries sees 2·S keys. The first chunk of a round looks back
at the last one of the round before, the very first at the very last. Without num_buckets there are 2^⌊log2(2·T/S)⌋ for T tokens
in whole chunks; more than 2·S are found by several hashes. A sequence no longer than a chunk attends to all of itself.
Normaliser: the softmax over the keys met in all rounds that exist, a key counted each time it is met. A token attends to itself
only if there is nothing else. Cost O(num_hashes·N·(log N + S·D)).
Parameters: none; k is not read, so that the layer's projection of keys gets no gradient.
Paper: Reformer: The Efficient Transformer. Source: transformers' LSH attention, as Skyformer used it.
Masked tokens, and those that fill up the last chunk, get a bucket of their own after the others, and nobody attends to them.
The first chunk looks back at them, so that masked tokens at the end change nothing only if they do not add a chunk.
Departs: the paper divides the weight of a key by the number of rounds that meet it (N_ij, its multi-round attention), so that
each counts once; here, as in the libraries, it counts once per round.
Departs: the Long Range Arena's code has one hash, scores multiplied by √D, no mask, tokens that see themselves, rotations that
never change, and heads mixed up with positions.
Departs: transformers' code keeps the number of buckets of the first length it meets, wants N to be a multiple of S, and lets a
masked token see itself.

# B batch, H heads, N tokens, T tokens with those that fill up the last chunk, D head width, R rounds, C = R·T/S chunks, S chunk
"""

from itertools import accumulate
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from polaformer.arguments import check_integer
from polaformer.attention.core import Facts, WideCore
from polaformer.attention.mechanisms.local import existing, fill_up
from polaformer.ops.polarity.plain import reciprocal

ITSELF = -1e5  # the score of a token with itself


class ReformerCore(WideCore):
    """LSH attention with shared queries and keys: `num_hashes` rounds, chunks of `chunk` tokens."""

    name, facts = "reformer", Facts("n log n", approximates="softmax", stochastic=True, cross=False, mixes_queries=True)

    def __init__(
        self, num_heads: int, head_dim: int, *, chunk: int = 64, num_hashes: int = 2, num_buckets: int | None = None
    ) -> None:
        super().__init__(num_heads, head_dim)
        check_integer(self.where, "chunk", chunk)
        check_integer(self.where, "num_hashes", num_hashes)
        if num_buckets is not None:
            check_integer(self.where, "num_buckets", num_buckets)
            if num_buckets % 2:
                raise ValueError(f"attention 'reformer': num_buckets is {num_buckets!r}; give an even number, or None")
        self.chunk, self.num_hashes, self.num_buckets = chunk, num_hashes, num_buckets

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, D)."""
        order = self._order(q, mask)
        weights, _, seen = self._weights(q, mask, order)
        out = weights @ _take(fill_up(v, order.shape[-1]), seen)  # (B, H, C, S, D)
        return _unsort(out, order).sum(dim=2)[:, :, : q.shape[2]]

    def map(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, N), the sum over the rounds."""
        tokens, order = q.shape[2], self._order(q, mask)
        length = order.shape[-1]
        weights, own, seen = self._weights(q, mask, order)
        where = own[..., None] * length + seen[..., None, :]  # (B, H, C, S, 2·S)
        flat = weights.new_zeros(*q.shape[:2], length * length).scatter_add(2, where.flatten(2), weights.flatten(2))
        return flat.unflatten(2, (length, length))[:, :, :tokens, :tokens]

    def rotations(self, size: int, like: Tensor) -> Tensor:
        """(H, D, R, size) standard normal numbers, the same ones in every precision."""
        shape = (self.num_heads, self.head_dim, self.num_hashes, size)
        return torch.randn(shape, device=like.device, dtype=torch.float32).to(like.dtype)

    def bucket_factors(self, tokens: int) -> list[int]:
        """How many buckets each of the hashes has that together find one of a number of buckets, their product."""
        if self.num_buckets is not None:
            return [self.num_buckets]
        bits, most = max(1, (2 * tokens // self.chunk).bit_length() - 1), (2 * self.chunk).bit_length() - 1
        parts = -(-bits // most)
        return [2 ** (bits * (part + 1) // parts - bits * part // parts) for part in range(parts)]

    def extra_repr(self) -> str:
        """The settings."""
        return f"chunk={self.chunk}, num_hashes={self.num_hashes}, num_buckets={self.num_buckets}"

    def _order(self, q: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, R, T): the tokens sorted by bucket in each round; unsorted in one round if a chunk holds them all."""
        tokens = q.shape[2]
        if tokens <= self.chunk:
            return torch.arange(tokens, device=q.device).expand(*q.shape[:2], 1, -1)
        length = -(-tokens // self.chunk) * self.chunk
        factors = self.bucket_factors(length)
        buckets = F.pad(self._buckets(q.detach(), factors), (0, length - tokens))
        exists = existing(q, mask, length)[:, None, None]
        return buckets.masked_fill(~exists, prod(factors)).argsort(dim=-1, stable=True)

    def _buckets(self, q: Tensor, factors: list[int]) -> Tensor:
        """(B, H, R, N)."""
        halves = [factor // 2 for factor in factors]
        rotated = torch.einsum("bhnd,hdrf->bhrnf", q, self.rotations(sum(halves), q)).split(halves, dim=-1)
        strides = accumulate(factors[:-1], int.__mul__, initial=1)
        hashes = [torch.cat([x, -x], dim=-1).argmax(dim=-1) * stride for x, stride in zip(rotated, strides, strict=True)]
        return torch.stack(hashes).sum(dim=0)

    def _weights(self, q: Tensor, mask: Tensor | None, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The map of each chunk (B, H, C, S, 2·S), its queries (B, H, C, S) and its keys (B, H, C, 2·S)."""
        rounds, length = order.shape[2:]
        size = min(self.chunk, length)
        own = order.flatten(2).unflatten(2, (rounds * length // size, size))
        seen = own if length == size else torch.cat([own.roll(1, dims=2), own], dim=-1)
        shared = fill_up(q, length)
        scores = _take(shared, own) @ _take(_keys(shared), seen).mT
        exists = existing(q, mask, length)[:, None, :, None].expand(-1, q.shape[1], -1, -1)
        exists = _take(exists, seen).mT  # (B, H, C, 1, 2·S)
        scores = scores.masked_fill(own[..., None] == seen[..., None, :], ITSELF)
        scores = scores.masked_fill(~exists, torch.finfo(scores.dtype).min)
        largest = _unsort(scores.detach().amax(dim=-1, keepdim=True), order).amax(dim=2)  # (B, H, T, 1)
        weights = (scores - _take(largest, own)).exp() * exists
        norms = _unsort(weights.sum(dim=-1, keepdim=True), order).sum(dim=2)  # (B, H, T, 1)
        return weights * _take(reciprocal(norms), own), own, seen


def _keys(q: Tensor) -> Tensor:
    """κ: queries of unit mean square, times D^-1/2."""
    return q * (q.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt() * q.shape[-1] ** -0.5


def _take(x: Tensor, which: Tensor) -> Tensor:
    """The tokens `which` (B, H, C, S) of x (B, H, T, D): (B, H, C, S, D)."""
    taken = x.gather(2, which.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1]))
    return taken.unflatten(2, which.shape[2:])


def _unsort(x: Tensor, order: Tensor) -> Tensor:
    """What chunks hold (B, H, C, S, D), in the order of the tokens: (B, H, R, T, D)."""
    sorted_by_round = x.flatten(2, 3).unflatten(2, order.shape[2:])
    return sorted_by_round.gather(3, order.argsort(dim=-1)[..., None].expand(-1, -1, -1, -1, x.shape[-1]))
