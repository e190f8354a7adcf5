"""Informer's ProbSparse attention (Zhou et al., 2021): softmax for the queries that seem most selective, the mean for the rest.

    M_i = max_j q_i·k_j − Σ_j q_i·k_j / M over S keys j drawn for query i, with replacement
    out_i = Σ_j softmax_j(q_i·k_j / √D) v_j for the u queries of largest M_i,   out_i = Σ_j v_j / M for all others
    u = factor·⌈ln N⌉, at most N;   S = factor·⌈ln M⌉, at most M;   factor = ⌈128 / ln M⌉ unless given; all at least 1

Shapes: q (B, H, N, D), k and v (B, H, M, D). The positions of the drawn keys, (N, S), are the same for all samples and heads;
selection is by head. Nothing is differentiated through it, and its memory is a few times that of q.
Normaliser: the softmax, or the number of keys; every row of the map sums to 1. Cost O((N·S + M·u)·D), where S and u grow as
logarithms of M and N. Parameters: none.
Paper: Informer: Beyond Efficient Transformer for Long Sequence Time-Series Forecasting. Source: the Long Range Arena harness of
Skyformer, whence the default factor and the division by M, which is not the number of drawn keys; it also draws in evaluation.
Departs: that harness ignores the mask. Here keys are drawn among the n that exist (number ⌊r n⌋ for a uniform r), both means
divide by n, the softmax is over keys that exist, and queries that do not exist are not selected. u and S still follow from N
and M, so that a sequence with padding is drawn for otherwise than the same one without. as_published=True ignores the mask
again, as published tables did: what is under it then counts like any other token.

# B batch, H heads, N queries, M keys, D head width, S drawn keys of a query, u selected queries
"""

from math import ceil, log

import torch
from torch import Tensor

from polaformer.arguments import check_flag, check_integer
from polaformer.attention.core import Facts, WideCore, at_least_one, count_keys, masked_softmax
from polaformer.attention.mechanisms.skyformer import existing_tokens, take_tokens

# Drawn keys are gathered for so many queries at once that they take about four times the memory of all queries.
GATHERED = 4


class InformerCore(WideCore):
    """ProbSparse attention; factor times the logarithm of a length is how many queries are selected and keys drawn."""

    name, facts = "informer", Facts("n log n", approximates="softmax", stochastic=True, mixes_queries=True)

    def __init__(self, num_heads: int, head_dim: int, *, factor: int | None = None, as_published: bool = False) -> None:
        super().__init__(num_heads, head_dim)
        if factor is not None:
            check_integer(self.where, "factor", factor)
        check_flag(self.where, "as_published", as_published)
        self.factor, self.as_published = factor, as_published
        self.facts = self.facts._replace(reads_masked=as_published)

    def attend_mixed(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, queries: Tensor | None) -> Tensor:
        """(B, H, N, D)."""
        selected, weights, exists = self._selected_rows(q, k, mask, queries)
        exact = weights @ v  # (B, H, u, D)
        mean = v.sum(dim=2, keepdim=True) / at_least_one(count_keys(k, exists))  # (B, H, 1, D)
        return mean.expand(-1, -1, q.shape[2], -1).scatter(2, selected.expand_as(exact), exact)

    def map_mixed(self, q: Tensor, k: Tensor, mask: Tensor | None, queries: Tensor | None) -> Tensor:
        """(B, H, N, M): one over the number of keys in every row, then the softmax in those of the selected queries."""
        selected, weights, exists = self._selected_rows(q, k, mask, queries)
        ones = k.new_ones(k.shape[0], 1, 1, k.shape[2]) if exists is None else exists.to(k.dtype)[:, None, None, :]
        mean = ones / at_least_one(count_keys(k, exists))  # (B, 1, 1, M)
        return mean.expand(-1, q.shape[1], q.shape[2], -1).scatter(2, selected.expand_as(weights), weights)

    def extra_repr(self) -> str:
        """The settings."""
        return f"factor={self.factor}, as_published={self.as_published}"

    def counts(self, num_queries: int, num_keys: int) -> tuple[int, int]:
        """u and S, how many queries are selected and how many keys drawn for each."""
        factor = ceil(128 / log(max(num_keys, 2))) if self.factor is None else self.factor
        return _logarithmic(factor, num_queries), _logarithmic(factor, num_keys)

    def _selected_rows(
        self, q: Tensor, k: Tensor, mask: Tensor | None, queries: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The selected queries (B, H, u, 1), their rows of the map (B, H, u, M), and the mask that holds here."""
        if self.as_published:
            mask = queries = None
        selected = self._select(q, k, mask, queries)[..., None]
        # Too few queries may exist. The others are zeros, whose softmax is the mean too.
        scores = q.gather(2, selected.expand(-1, -1, -1, q.shape[3])) @ k.mT * self.head_dim**-0.5
        return selected, masked_softmax(scores, None if mask is None else mask[:, None, None, :]), mask

    @torch.no_grad()
    def _select(self, q: Tensor, k: Tensor, mask: Tensor | None, queries: Tensor | None) -> Tensor:
        """The positions (B, H, u) of the queries of largest M_i, those that do not exist last."""
        num_selected, num_drawn = self.counts(q.shape[2], k.shape[2])
        uniforms = torch.rand(q.shape[2], num_drawn, dtype=torch.float32, device=q.device)
        block = ceil(GATHERED * q.shape[2] / num_drawn)
        parts = zip(q.split(block, dim=2), uniforms.split(block), strict=True)
        measure = torch.cat([_sparsity(some, k, mask, drawn) for some, drawn in parts], dim=2)  # (B, H, N)
        if queries is not None:
            measure = measure.masked_fill(~queries[:, None], float("-inf"))
        return measure.topk(num_selected, dim=2).indices


def _sparsity(q: Tensor, k: Tensor, mask: Tensor | None, uniforms: Tensor) -> Tensor:
    """M_i, (B, H, n), of some queries (B, H, n, D) for uniforms (n, S)."""
    drawn = take_tokens(k, existing_tokens(uniforms.flatten(), mask, k.shape[2])).unflatten(2, uniforms.shape)
    scores = (drawn @ q[..., None])[..., 0]  # (B, H, n, S)
    return scores.amax(dim=-1) - (scores.sum(dim=-1, keepdim=True) / at_least_one(count_keys(k, mask)))[..., 0]


def _logarithmic(factor: int, length: int) -> int:
    return min(length, max(1, factor * ceil(log(length))))
