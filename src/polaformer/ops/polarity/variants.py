"""The variants that the paper compares polarity-aware attention with, on the same safe features, and the maps of all of them.

Linear in the number of tokens, except for the functions named `*_map(s)`. For ablations and figures: plain PyTorch,
differentiated by autograd, nothing recomputed.

# B batch, H heads, N queries, M keys, D head width
"""

import torch
from torch import Tensor

from polaformer.ops.polarity import plain
from polaformer.ops.precision import reciprocal, without_autocast


@without_autocast
def same_sign_attention(
    q: Tensor, k: Tensor, v: Tensor, power: Tensor, *, mask: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """The same-sign stream of Eq. 6 over all of v, (B, H, N, D): the operator without its opposite-sign stream.

    With q.relu() and k.relu() it is classical linear attention with the feature map ReLU(x)^p. Shapes as in
    `polaformer.polarity_attention`.
    """
    queries, _, memory, power = _prepare(q, k, v, power, mask, eps)
    return plain.attend(queries, memory, power)[0].to(v.dtype)


@without_autocast
def subtractive_attention(
    q: Tensor, k: Tensor, v: Tensor, power: Tensor, *, mask: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Eq. 5 inserted into Eq. 2, (B, H, N, D): weights (same − opposite), divided by their own sum plus n·eps.

    For study: weights can be negative and their sum close to zero, so the output is unbounded. A sum of zero gives zeros.
    """
    queries, _, memory, power = _prepare(q, k, v, power, mask, eps)
    difference, norm = _signed_features(queries, memory, power)
    return ((difference @ memory.state) * reciprocal(norm)).to(v.dtype)


@without_autocast
def polarity_maps(
    q: Tensor, k: Tensor, power: Tensor, *, mask: Tensor | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The explicit maps (same, opposite) that `polaformer.polarity_attention` applies, (B, H, N, M) each."""
    queries, keys, memory, power = _prepare(q, k, k, power, mask, eps)
    same, same_norm = plain.query_features(queries, memory, power)
    opposite, opposite_norm = plain.query_features(queries.flipped(), memory, power)
    return (same @ keys.mT) * reciprocal(same_norm), (opposite @ keys.mT) * reciprocal(opposite_norm)


@without_autocast
def subtractive_map(q: Tensor, k: Tensor, power: Tensor, *, mask: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """The explicit map that `subtractive_attention` applies, (B, H, N, M)."""
    queries, keys, memory, power = _prepare(q, k, k, power, mask, eps)
    difference, norm = _signed_features(queries, memory, power)
    return (difference @ keys.mT) * reciprocal(norm)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, power: Tensor, mask: Tensor | None, eps: float
) -> tuple[plain.Signed, Tensor, plain.Memory, Tensor]:
    """The queries, the keys' features (B, H, M, 2D), what queries need of keys and values, and power as (H, 1, D)."""
    power = plain.widen(power.expand(q.shape[1], -1), q)[:, None]
    k, v = plain.hide(k, mask), plain.hide(v, mask)
    memory = plain.summarise(k, v, power, plain.num_keys(k, mask), eps)
    keys = plain.key_features(plain.widen(k), memory.log_peak, power)
    return plain.signed(plain.widen(q)), keys.features, memory, power


def _signed_features(queries: plain.Signed, memory: plain.Memory, power: Tensor) -> tuple[Tensor, Tensor]:
    """Same-sign minus opposite-sign features of each query, (B, H, N, 2D), under one shift, and their denominators."""
    weight, shift = plain.query_weight(plain.log_products(queries, memory), power)
    opposite_weight, opposite_shift = plain.query_weight(plain.log_products(queries.flipped(), memory), power)
    top = torch.maximum(shift, opposite_shift)
    same = queries.spread(weight * (shift - top).exp2())
    difference = same - queries.flipped().spread(opposite_weight * (opposite_shift - top).exp2())
    return difference, difference @ memory.total + plain.shifted_eps(memory, top)
