"""What the paper compares polarity-aware attention with, on the same safe features, and the explicit maps of all of them.

Linear in the number of tokens, except for the functions named `*_map(s)`. These are for ablations and pictures: plain
PyTorch, differentiated by autograd, nothing recomputed.

# B batch, H heads, N queries, M keys, D head width
"""

import torch
from torch import Tensor

from polaformer.ops.polarity import plain as linear
from polaformer.ops.precision import without_autocast


@without_autocast
def same_sign_attention(
    q: Tensor, k: Tensor, v: Tensor, power: Tensor, *, mask: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """The same-sign stream of Eq. 6 over all of v, (B, H, N, D): what is left without the opposite-sign stream.

    With q.relu() and k.relu() it is classical linear attention with the feature map ReLU(x)^p. Shapes as in
    `polaformer.polarity_attention`.
    """
    queries, _, memory, power = _prepare(q, k, v, power, mask, eps)
    return linear.attend(queries, memory, power)[0].to(v.dtype)


@without_autocast
def subtractive_attention(
    q: Tensor, k: Tensor, v: Tensor, power: Tensor, *, mask: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Eq. 5 put into Eq. 2, (B, H, N, D): weights (same − opposite), divided by their own sum plus n·eps.

    For study: weights can be negative and their sum close to zero, so values are unbounded. A sum of exactly zero gives zeros.
    """
    queries, _, memory, power = _prepare(q, k, v, power, mask, eps)
    difference, norm = _signed_features(queries, memory, power)
    return ((difference @ memory.state) * linear.reciprocal(norm)).to(v.dtype)


@without_autocast
def polarity_maps(
    q: Tensor, k: Tensor, power: Tensor, *, mask: Tensor | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The explicit maps (same, opposite) that `polaformer.polarity_attention` applies, (B, H, N, M) each."""
    queries, keys, memory, power = _prepare(q, k, k, power, mask, eps)
    same, same_norm = linear.query_features(queries, memory, power)
    opposite, opposite_norm = linear.query_features(queries.flipped(), memory, power)
    return (same @ keys.mT) * linear.reciprocal(same_norm), (opposite @ keys.mT) * linear.reciprocal(opposite_norm)


@without_autocast
def subtractive_map(q: Tensor, k: Tensor, power: Tensor, *, mask: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """The explicit map that `subtractive_attention` applies, (B, H, N, M)."""
    queries, keys, memory, power = _prepare(q, k, k, power, mask, eps)
    difference, norm = _signed_features(queries, memory, power)
    return (difference @ keys.mT) * linear.reciprocal(norm)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, power: Tensor, mask: Tensor | None, eps: float
) -> tuple[linear.Signed, Tensor, linear.Memory, Tensor]:
    """The queries, the keys' features (B, H, M, 2D), what queries need of keys and values, and power as (H, 1, D)."""
    power = linear.widen(power.expand(q.shape[1], -1), q)[:, None]
    k, v = linear.hide(k, mask), linear.hide(v, mask)
    memory = linear.summarise(k, v, power, linear.num_keys(k, mask), eps)
    keys = linear.key_features(linear.widen(k), memory.log_peak, power)
    return linear.signed(linear.widen(q)), keys.features, memory, power


def _signed_features(queries: linear.Signed, memory: linear.Memory, power: Tensor) -> tuple[Tensor, Tensor]:
    """Same-sign minus opposite-sign features of each query, (B, H, N, 2D), under one shift, and their denominators."""
    weight, shift = linear.query_weight(linear.log_products(queries, memory), power)
    opposite_weight, opposite_shift = linear.query_weight(linear.log_products(queries.flipped(), memory), power)
    top = torch.maximum(shift, opposite_shift)
    same = queries.spread(weight * (shift - top).exp2())
    difference = same - queries.flipped().spread(opposite_weight * (opposite_shift - top).exp2())
    return difference, difference @ memory.total + linear.shifted_eps(memory, top)
