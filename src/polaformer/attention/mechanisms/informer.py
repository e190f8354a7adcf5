"""Informer's ProbSparse attention (Zhou et al., 2021): softmax for the queries of largest sparsity M_i, the mean for the rest.

    M_i = max_j q_i·k_j − Σ_j q_i·k_j / M over S keys j drawn for query i, with replacement
    out_i = Σ_j softmax_j(q_i·k_j / √D) v_j for the u queries of largest M_i,   out_i = Σ_j v_j / M for all others
    u = factor·⌈ln N⌉, at most N;   S = factor·⌈ln M⌉, at most M;   factor = ⌈128 / ln M⌉ unless given; all at least 1

Shapes: q (B, H, N, D), k and v (B, H, M, D). All samples and heads share the positions of the drawn keys, (N, S); queries are
selected per head. The selection is not differentiated; it takes a few times the memory of q.
Normaliser: the softmax, or the number of keys; every row of the map sums to 1. Cost O((N·S + M·u)·D), where S and u grow
logarithmically with M and N. Parameters: none.
Paper: Informer: Beyond Efficient Transformer for Long Sequence Time-Series Forecasting. Source: Skyformer's Long Range Arena
harness: the default factor, the division by M instead of the number of drawn keys, and draws in evaluation too.
Departs: that harness ignores the mask. Here keys are drawn from the n unmasked ones (number ⌊r n⌋ for a uniform r), both means
divide by n, the softmax is over unmasked keys, and masked queries are not selected. u and S still follow from N and M, so a
padded sequence has other draws than the same one without padding. as_published=True ignores the mask again, as published tables
did: masked tokens then count like any other.

# B batch, H heads, N queries, M keys, D head width, S drawn keys per query, u selected queries
"""

from dataclasses import replace
from math import ceil, log

import torch
from torch import Tensor

from polaformer.arguments import check_flag, check_integer
from polaformer.attention.core import Facts, WideCore, at_least_one, count_keys, masked_softmax
from polaformer.attention.mechanisms.skyformer import gather_tokens, sample_positions

# Drawn keys are gathered for a group of queries at a time: as many as take about four times the memory of all queries.
GATHERED = 4


class InformerCore(WideCore):
    """ProbSparse attention; factor times the logarithm of the length is the number of selected queries and of drawn keys."""

    name = "informer"
    facts = Facts("n log n", approximates="softmax", stochastic=True, mixes_queries=True, trims=False, coarse=(("factor", 2),))

    def __init__(self, num_heads: int, head_dim: int, *, factor: int | None = None, as_published: bool = False) -> None:
        super().__init__(num_heads, head_dim)
        if factor is not None:
            check_integer(self.where, "factor", factor)
        check_flag(self.where, "as_published", as_published)
        self.factor, self.as_published = factor, as_published
        if as_published:
            self.facts = replace(self.facts, reads_masked=True)

    def attend_mixed(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, queries: Tensor | None) -> Tensor:
        """Outputs, (B, H, N, D)."""
        selected, weights, exists = self._selected_rows(q, k, mask, queries)
        exact = weights @ v  # (B, H, u, D)
        mean = v.sum(dim=2, keepdim=True) / at_least_one(count_keys(k, exists))  # (B, H, 1, D)
        return mean.expand(-1, -1, q.shape[2], -1).scatter(2, selected.expand_as(exact), exact)

    def map_mixed(self, q: Tensor, k: Tensor, mask: Tensor | None, queries: Tensor | None) -> Tensor:
        """Attention map, (B, H, N, M): the softmax in the rows of selected queries, 1 / number of keys in the others."""
        selected, weights, exists = self._selected_rows(q, k, mask, queries)
        ones = k.new_ones(k.shape[0], 1, 1, k.shape[2]) if exists is None else exists.to(k.dtype)[:, None, None, :]
        mean = ones / at_least_one(count_keys(k, exists))  # (B, 1, 1, M)
        return mean.expand(-1, q.shape[1], q.shape[2], -1).scatter(2, selected.expand_as(weights), weights)

    def extra_repr(self) -> str:
        """The settings."""
        return f"factor={self.factor}, as_published={self.as_published}"

    def counts(self, num_queries: int, num_keys: int) -> tuple[int, int]:
        """u and S: the number of selected queries, and of keys drawn for each query."""
        factor = ceil(128 / log(max(num_keys, 2))) if self.factor is None else self.factor
        return _log_count(factor, num_queries), _log_count(factor, num_keys)

    def _selected_rows(
        self, q: Tensor, k: Tensor, mask: Tensor | None, queries: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The selected queries (B, H, u, 1), their rows of the map (B, H, u, M), and the mask in effect."""
        if self.as_published:
            mask = queries = None
        selected = self._select(q, k, mask, queries)[..., None]
        # If fewer than u queries are unmasked, masked ones fill up: they are zeros, whose softmax is the mean too.
        scores = q.gather(2, selected.expand(-1, -1, -1, q.shape[3])) @ k.mT * self.head_dim**-0.5
        return selected, masked_softmax(scores, None if mask is None else mask[:, None, None, :]), mask

    @torch.no_grad()
    def _select(self, q: Tensor, k: Tensor, mask: Tensor | None, queries: Tensor | None) -> Tensor:
        """The positions (B, H, u) of the queries with the largest M_i, masked ones last."""
        num_selected, num_drawn = self.counts(q.shape[2], k.shape[2])
        uniforms = torch.rand(q.shape[2], num_drawn, dtype=torch.float32, device=q.device)
        group = ceil(GATHERED * q.shape[2] / num_drawn)
        parts = zip(q.split(group, dim=2), uniforms.split(group), strict=True)
        measure = torch.cat([_sparsity(some, k, mask, draws) for some, draws in parts], dim=2)  # (B, H, N)
        if queries is not None:
            measure = measure.masked_fill(~queries[:, None], float("-inf"))
        return measure.topk(num_selected, dim=2).indices


def _sparsity(q: Tensor, k: Tensor, mask: Tensor | None, uniforms: Tensor) -> Tensor:
    """M_i, (B, H, n), of a group of queries (B, H, n, D) with their uniforms (n, S)."""
    drawn = gather_tokens(k, sample_positions(uniforms.flatten(), mask, k.shape[2])).unflatten(2, uniforms.shape)
    scores = (drawn @ q[..., None])[..., 0]  # (B, H, n, S)
    return scores.amax(dim=-1) - (scores.sum(dim=-1, keepdim=True) / at_least_one(count_keys(k, mask)))[..., 0]


def _log_count(factor: int, length: int) -> int:
    return min(length, max(1, factor * ceil(log(length))))
