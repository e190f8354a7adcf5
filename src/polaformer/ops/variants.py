"""What the paper compares polarity-aware attention with, on the same safe features, and the explicit maps of all of them.

Linear in the number of tokens, except for the functions named `*_map(s)`. These are for ablations and pictures: plain
PyTorch, differentiated by autograd, nothing recomputed.

# B batch, H heads, N queries, M keys, D head width
"""

import torch
from torch import Tensor

from polaformer.ops import linear
from polaformer.ops.precision import without_autocast


@without_autocast
def same_sign_attention(
    q: Tensor, k: Tensor, v: Tensor, power: Tensor, *, mask: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """The same-sign stream of Eq. 6 over all of v, (B, H, N, D): what is left without the opposite-sign stream.

    With q.relu() and k.relu() it is classical linear attention with the feature map ReLU(x)^p. Shapes as in
    `polaformer.polarity_attention`.
    """
    dtype = v.dtype
    q, k, v, power = linear.prepare(q, k, v, power, mask)
    keys = linear.key_features(k, power)
    return linear.attend(linear.signed(q), keys, keys.features.mT @ v, power, mask, eps)[0].to(dtype)


@without_autocast
def subtractive_attention(
    q: Tensor, k: Tensor, v: Tensor, power: Tensor, *, mask: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Eq. 5 put into Eq. 2, (B, H, N, D): weights (same − opposite), divided by their own sum plus n·eps.

    For study: weights can be negative and their sum close to zero, so values are unbounded. A sum of exactly zero gives zeros.
    """
    dtype = v.dtype
    q, k, v, power = linear.prepare(q, k, v, power, mask)
    keys = linear.key_features(k, power)
    difference, norm = _signed_features(linear.signed(q), keys, power, mask, eps)
    return ((difference @ (keys.features.mT @ v)) * linear.reciprocal(norm)).to(dtype)


@without_autocast
def polarity_maps(
    q: Tensor, k: Tensor, power: Tensor, *, mask: Tensor | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The explicit maps (same, opposite) that `polaformer.polarity_attention` applies, (B, H, N, M) each."""
    q, k, _, power = linear.prepare(q, k, k, power, mask)
    keys, queries = linear.key_features(k, power), linear.signed(q)
    return _map(queries, keys, power, mask, eps), _map(queries.flipped(), keys, power, mask, eps)


def same_sign_map(q: Tensor, k: Tensor, power: Tensor, *, mask: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """The explicit map that `same_sign_attention` applies, (B, H, N, M)."""
    return polarity_maps(q, k, power, mask=mask, eps=eps)[0]


@without_autocast
def subtractive_map(q: Tensor, k: Tensor, power: Tensor, *, mask: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """The explicit map that `subtractive_attention` applies, (B, H, N, M)."""
    q, k, _, power = linear.prepare(q, k, k, power, mask)
    keys = linear.key_features(k, power)
    difference, norm = _signed_features(linear.signed(q), keys, power, mask, eps)
    return (difference @ keys.features.mT) * linear.reciprocal(norm)


def _map(queries: linear.Signed, keys: linear.Keys, power: Tensor, mask: Tensor | None, eps: float) -> Tensor:
    features, norm = linear.query_features(queries, keys, power, mask, eps)
    return (features @ keys.features.mT) * linear.reciprocal(norm)


def _signed_features(
    queries: linear.Signed, keys: linear.Keys, power: Tensor, mask: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Same-sign minus opposite-sign features of each query, (B, H, N, 2D), under one shift, and their denominators."""
    weight, shift = linear.query_weight(linear.log_products(queries, keys), power)
    opposite_weight, opposite_shift = linear.query_weight(linear.log_products(queries.flipped(), keys), power)
    top = torch.maximum(shift, opposite_shift)
    same = queries.spread(weight * (shift - top).exp2())
    difference = same - queries.flipped().spread(opposite_weight * (opposite_shift - top).exp2())
    return difference, difference @ keys.total + linear.shifted_eps(eps, top, keys, mask)
