"""Reformer's LSH attention (Kitaev et al., 2020): tokens sorted by hash bucket attend to their neighbours in that order.

    κ_i = D^-1/2 q_i / √(mean_c q_ic² + 1e-6),   s_ti = ⟨q_t, κ_i⟩ for i ≠ t,   s_tt = −1e5
    bucket_r(i) = argmax [q_i R_r ; −q_i R_r],   R_r (D, num_buckets/2) standard normal, drawn in every call, one per head
    in each round r the tokens are sorted by bucket and cut into chunks; A_r(t) is the chunk of t and the one before it
    out_t = Σ_r Σ_{i ∈ A_r(t)} e^{s_ti} v_i / Σ_r Σ_{i ∈ A_r(t)} e^{s_ti}

Shapes: q and v (B, H, N, D), from the same tokens; a chunk of S queries attends to 2·S keys. The first chunk of a round looks
back at the last one of the round before, the very first at the very last. The default num_buckets is 2^⌊log2(2·T/S)⌋ for T
tokens in whole chunks; more than 2·S buckets combine several hashes. A sequence within one chunk attends to all of itself.
Normaliser: the softmax over the unmasked keys met in all rounds, a key counted each time it is met. A token attends to itself
only if there is nothing else. Cost O(num_hashes·N·(log N + S·D)).
Parameters: none; k is not read, so the layer's key projection gets no gradient.
Paper: Reformer: The Efficient Transformer. Source: transformers' LSH attention, as Skyformer used it.
Masked tokens, and the padding of the last chunk, get a separate bucket after the others; no token attends to them. The first
chunk looks back at them, so masked tokens at the end have no effect only if they add no chunk.
Departs: the paper divides the weight of a key by the number of rounds that meet it (N_ij, its multi-round attention), so that
each counts once; here, as in the libraries, it counts once per round.
Departs: the Long Range Arena's code has one hash, scores multiplied by √D, no mask, tokens that attend to themselves, rotations
that never change, and heads mixed up with positions.
Departs: transformers keeps the number of buckets of the first length it meets, requires N to be a multiple of S, and lets a
masked token attend to itself.

# B batch, H heads, N tokens, T tokens with the padding of the last chunk, D head width, R rounds, C = R·T/S chunks, S chunk
"""

from itertools import accumulate
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from polaformer.arguments import check_integer
from polaformer.attention.core import Facts, WideCore
from polaformer.attention.mechanisms.local import pad_mask, pad_tokens
from polaformer.ops.precision import reciprocal

ITSELF = -1e5  # the score of a token with itself


class ReformerCore(WideCore):
    """LSH attention with shared queries and keys: `num_hashes` rounds, chunks of `chunk` tokens."""

    name = "reformer"
    facts = Facts(
        "n log n",
        approximates="softmax",
        stochastic=True,
        cross=False,
        mixes_queries=True,
        trims=False,
        coarse=(("chunk", 16),),
    )

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
        """Outputs, (B, H, N, D)."""
        order = self._order(q, mask)
        weights, _, key_index = self._chunk_maps(q, mask, order)
        out = weights @ _gather(pad_tokens(v, order.shape[-1]), key_index)  # (B, H, C, S, D)
        return _unsort(out, order).sum(dim=2)[:, :, : q.shape[2]]

    def map(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Attention map, (B, H, N, N), summed over the rounds."""
        order = self._order(q, mask)
        tokens, length = q.shape[2], order.shape[-1]
        weights, query_index, key_index = self._chunk_maps(q, mask, order)
        index = query_index[..., None] * length + key_index[..., None, :]  # (B, H, C, S, 2·S)
        flat = weights.new_zeros(*q.shape[:2], length * length).scatter_add(2, index.flatten(2), weights.flatten(2))
        return flat.unflatten(2, (length, length))[:, :, :tokens, :tokens]

    def rotations(self, size: int, like: Tensor) -> Tensor:
        """(H, D, R, size) standard normal numbers, the same in every precision."""
        shape = (self.num_heads, self.head_dim, self.num_hashes, size)
        return torch.randn(shape, device=like.device, dtype=torch.float32).to(like.dtype)

    def bucket_factors(self, tokens: int) -> list[int]:
        """The number of buckets of each hash; combined, the hashes have the product of these."""
        if self.num_buckets is not None:
            return [self.num_buckets]
        bits, most = max(1, (2 * tokens // self.chunk).bit_length() - 1), (2 * self.chunk).bit_length() - 1
        parts = -(-bits // most)
        return [2 ** (bits * (part + 1) // parts - bits * part // parts) for part in range(parts)]

    def extra_repr(self) -> str:
        """The settings."""
        return f"chunk={self.chunk}, num_hashes={self.num_hashes}, num_buckets={self.num_buckets}"

    def _order(self, q: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, R, T): token positions sorted by bucket in each round; a single unsorted round if one chunk holds them all."""
        tokens = q.shape[2]
        if tokens <= self.chunk:
            return torch.arange(tokens, device=q.device).expand(*q.shape[:2], 1, -1)
        length = -(-tokens // self.chunk) * self.chunk
        factors = self.bucket_factors(length)
        buckets = F.pad(self._buckets(q.detach(), factors), (0, length - tokens))
        exists = pad_mask(q, mask, length)[:, None, None]
        return buckets.masked_fill(~exists, prod(factors)).argsort(dim=-1, stable=True)

    def _buckets(self, q: Tensor, factors: list[int]) -> Tensor:
        """The bucket of each token in each round, (B, H, R, N)."""
        halves = [factor // 2 for factor in factors]
        rotated = torch.einsum("bhnd,hdrf->bhrnf", q, self.rotations(sum(halves), q)).split(halves, dim=-1)
        strides = accumulate(factors[:-1], int.__mul__, initial=1)
        hashes = [torch.cat([x, -x], dim=-1).argmax(dim=-1) * stride for x, stride in zip(rotated, strides, strict=True)]
        return torch.stack(hashes).sum(dim=0)

    def _chunk_maps(self, q: Tensor, mask: Tensor | None, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The map of each chunk (B, H, C, S, 2·S), and the positions of its queries (B, H, C, S) and keys (B, H, C, 2·S)."""
        rounds, length = order.shape[2:]
        size = min(self.chunk, length)
        query_index = order.flatten(2).unflatten(2, (rounds * length // size, size))
        key_index = query_index if length == size else torch.cat([query_index.roll(1, dims=2), query_index], dim=-1)
        padded = pad_tokens(q, length)
        scores = _gather(padded, query_index) @ _gather(_keys(padded), key_index).mT
        exists = pad_mask(q, mask, length)[:, None, :, None].expand(-1, q.shape[1], -1, -1)
        exists = _gather(exists, key_index).mT  # (B, H, C, 1, 2·S)
        scores = scores.masked_fill(query_index[..., None] == key_index[..., None, :], ITSELF)
        scores = scores.masked_fill(~exists, torch.finfo(scores.dtype).min)
        largest = _unsort(scores.detach().amax(dim=-1, keepdim=True), order).amax(dim=2)  # (B, H, T, 1)
        weights = (scores - _gather(largest, query_index)).exp() * exists
        norms = _unsort(weights.sum(dim=-1, keepdim=True), order).sum(dim=2)  # (B, H, T, 1)
        return weights * _gather(reciprocal(norms), query_index), query_index, key_index


def _keys(q: Tensor) -> Tensor:
    """κ: queries normalised to a mean square of 1, times D^-1/2."""
    return q * (q.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt() * q.shape[-1] ** -0.5


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """The tokens of x (B, H, T, D) at positions index (B, H, C, S): (B, H, C, S, D)."""
    gathered = x.gather(2, index.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1]))
    return gathered.unflatten(2, index.shape[2:])


def _unsort(x: Tensor, order: Tensor) -> Tensor:
    """The rows of chunks (B, H, C, S, D) back in token order: (B, H, R, T, D)."""
    sorted_by_round = x.flatten(2, 3).unflatten(2, order.shape[2:])
    return sorted_by_round.gather(3, order.argsort(dim=-1)[..., None].expand(-1, -1, -1, -1, x.shape[-1]))
