"""Polarity-aware attention in plain PyTorch, linear in the number of tokens and safe at every magnitude.

The features of Eq. 9 leave the floating-point range quickly (|x|^p with p up to 1 + α), so they are never formed as they
stand. Two shifts that cancel between numerator and denominator keep them in [0, 1]:

    keys      2^(p·(log2|k| − log2 peak)),  peak the largest |k| of the same channel and sign → a column's largest entry is 1
    queries   2^(p·(log2|q| + log2 peak) − shift),  shift the query's largest exponent        → a row's largest entry is 1

so that the denominator of a query that meets any key is at least 1. The opposite-sign stream is the same-sign stream of −q.

Signs are applied by arithmetic, with 0/1 indicators, rather than with `torch.where`: on a CPU that is many times faster, and
NaN in the input stays visible as NaN in the output.

# B batch, H heads, N queries, M keys, D head width, E = ceil(D / 2); 2D-wide features are [positive part, negative part]
"""

from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from polaformer.ops.precision import computing_dtype, without_autocast

# Stands for the logarithm of zero: so far below the logarithm of any product of two floats that an absent channel never sets
# the shift, and finite, so that 0 · FLOOR is 0.
FLOOR = -1.0e6
LN2 = log(2.0)


class Signed(NamedTuple):
    """A tensor in sign-magnitude form, each part of its shape (B, H, T, D)."""

    log2: Tensor  # log2|x|, FLOOR where x is 0
    positive: Tensor  # 1 where x > 0, else 0
    negative: Tensor  # 1 where x < 0, else 0

    def flipped(self) -> "Signed":
        """The same for −x."""
        return Signed(self.log2, self.negative, self.positive)

    def spread(self, values: Tensor) -> Tensor:
        """(…, D) to (…, 2D): each value into the half of its sign, zero in the other."""
        return torch.cat([values * self.positive, values * self.negative], dim=-1)

    def gather(self, features: Tensor) -> Tensor:
        """(…, 2D) to (…, D): each value from the half of its sign, zero where x is 0."""
        width = features.shape[-1] // 2
        return features[..., :width] * self.positive + features[..., width:] * self.negative

    def divide(self, values: Tensor, x: Tensor) -> Tensor:
        """values / x, for values that are zero where x is."""
        return values / (x + (1 - self.positive - self.negative))


class Keys(NamedTuple):
    """Every key in sign-magnitude form with its features, and their sum."""

    signed: Signed
    log_ratio: Tensor  # (B, H, M, D): log2(|k| / peak)
    weight: Tensor  # (B, H, M, D): (|k| / peak)^p
    features: Tensor  # (B, H, M, 2D): the same, split by sign
    log_peak: Tensor  # (B, H, 1, 2D): log2 peak, FLOOR where no key has that sign
    total: Tensor  # (B, H, 2D, 1): Σ features


class StreamGradients(NamedTuple):
    """What one stream sends back."""

    exponent: Tensor  # (B, H, N, D): of p·log|q|
    power: Tensor  # (H, 1, D): through the queries
    state: Tensor  # (B, H, 2D, E)
    total: Tensor  # (B, H, 2D, 1)


@without_autocast
def forward(q: Tensor, k: Tensor, v: Tensor, power: Tensor, mask: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Eq. 6 before the gate, and the denominators of its two streams.

    q (B, H, N, D), k and v (B, H, M, D), power (H, D), mask (B, M) or None.
    Returns (B, H, N, D) in v's dtype and (B, H, N, 2) in the computing dtype. Autograd can differentiate it, also twice.
    """
    dtype, half = v.dtype, (v.shape[-1] + 1) // 2
    q, k, v, power = prepare(q, k, v, power, mask)
    keys, queries = key_features(k, power), signed(q)
    state = keys.features.mT @ v  # (B, H, 2D, D)
    same, same_norm = attend(queries, keys, state[..., :half], power, mask, eps)
    opposite, opposite_norm = attend(queries.flipped(), keys, state[..., half:], power, mask, eps)
    return torch.cat([same, opposite], dim=-1).to(dtype), torch.cat([same_norm, opposite_norm], dim=-1)


@without_autocast
def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, power: Tensor, norms: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and power in closed form; features are computed again rather than kept.

    grad (B, H, N, D), norms (B, H, N, 2) as `forward` returned them, eps included. The shifts count as constants: the result
    does not depend on them.
    """
    dtypes, half = (q.dtype, k.dtype, v.dtype, power.dtype), (v.shape[-1] + 1) // 2
    q, k, v, power = prepare(q, k, v, power, mask)
    grad = grad.to(q.dtype)
    keys, queries = key_features(k, power), signed(q)
    state = keys.features.mT @ v  # (B, H, 2D, D)

    same = attend_backward(grad[..., :half], norms[..., :1], queries, keys, state[..., :half], power)
    opposite = attend_backward(grad[..., half:], norms[..., 1:], queries.flipped(), keys, state[..., half:], power)
    grad_state = torch.cat([same.state, opposite.state], dim=-1)  # (B, H, 2D, D)
    grad_features = v @ grad_state.mT + (same.total + opposite.total).mT  # (B, H, M, 2D)
    exponent = keys.weight * keys.signed.gather(grad_features)  # (B, H, M, D): of p·log|k|

    grad_q = queries.divide((same.exponent + opposite.exponent) * power, q)
    grad_k = keys.signed.divide(exponent * power, k)
    grad_v = keys.features @ grad_state
    grad_power = same.power + opposite.power + LN2 * sum_to_power(exponent * keys.log_ratio)
    gradients = (grad_q, grad_k, grad_v, grad_power[:, 0])
    return tuple(g.to(dtype) for g, dtype in zip(gradients, dtypes, strict=True))  # type: ignore[return-value]


def prepare(q: Tensor, k: Tensor, v: Tensor, power: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inputs in the computing dtype, masked keys and values zeroed, power as (H, 1, D)."""
    dtype = computing_dtype(q)
    if mask is not None:
        absent = ~mask[:, None, :, None]
        k, v = k.masked_fill(absent, 0.0), v.masked_fill(absent, 0.0)
    return q.to(dtype), k.to(dtype), v.to(dtype), power.to(dtype)[:, None]


def signed(x: Tensor) -> Signed:
    """x (B, H, T, D) in sign-magnitude form; its logarithm has a zero derivative where x is 0."""
    sign = x.detach().sign()
    positive, negative = sign.relu(), (-sign).relu()
    absent = 1 - positive - negative
    return Signed((x.abs() + absent).log2() + FLOOR * absent, positive, negative)


def key_features(k: Tensor, power: Tensor) -> Keys:
    """The keys' features, shifted so that the largest of each channel and sign is 1."""
    keys, log_peak = signed(k), signed(peaks(k)).log2
    log_ratio = keys.log2 - keys.gather(log_peak)
    weight = (power * log_ratio).exp2()
    features = keys.spread(weight)
    return Keys(keys, log_ratio, weight, features, log_peak, features.sum(dim=-2, keepdim=True).mT)


def peaks(k: Tensor) -> Tensor:
    """The largest positive and the largest negative magnitude of each channel over all keys, (B, H, 1, 2D)."""
    if k.shape[-2] == 0:
        return k.new_zeros((*k.shape[:2], 1, 2 * k.shape[-1]))
    k = k.detach()
    return torch.cat([k.amax(dim=-2, keepdim=True), -k.amin(dim=-2, keepdim=True)], dim=-1).relu()


def log_products(queries: Signed, keys: Keys) -> Tensor:
    """log2(|q| · peak), peak that of the keys with the queries' sign, (B, H, N, D)."""
    return queries.log2 + queries.gather(keys.log_peak)


def query_weight(log_product: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
    """The queries' features before the split by sign, (B, H, N, D), and the exponent each was shifted by, (B, H, N, 1)."""
    exponent = power * log_product
    shift = exponent.detach().amax(dim=-1, keepdim=True)
    return (exponent - shift).exp2(), shift


def query_features(queries: Signed, keys: Keys, power: Tensor, mask: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The queries' features (B, H, N, 2D) for the keys of their own sign, and the denominators (B, H, N, 1)."""
    weight, shift = query_weight(log_products(queries, keys), power)
    features = queries.spread(weight)
    return features, features @ keys.total + shifted_eps(eps, shift, keys, mask)


def attend(queries: Signed, keys: Keys, state: Tensor, power: Tensor, mask: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """One stream: its output (B, H, N, E) and its denominators (B, H, N, 1), both zero where a query meets no key."""
    features, norm = query_features(queries, keys, power, mask, eps)
    return (features @ state) * reciprocal(norm), norm


def attend_backward(grad: Tensor, norm: Tensor, queries: Signed, keys: Keys, state: Tensor, power: Tensor) -> StreamGradients:
    """The derivative of `attend`: grad (B, H, N, E), norm (B, H, N, 1)."""
    log_product = log_products(queries, keys)
    weight = query_weight(log_product, power)[0] * reciprocal(norm)
    features = queries.spread(weight)  # (B, H, N, 2D), rows divided by their denominators
    numerator = weight * queries.gather(grad @ state.mT)  # (B, H, N, D)
    # What reaches the denominator is −⟨grad, out⟩. Summed from the numerator's own terms, not from a rounded output, it
    # cancels them as it should where attention is sharp.
    slope = -numerator.sum(dim=-1, keepdim=True)
    exponent = numerator + slope * (weight * queries.gather(keys.total.mT))
    through_power = LN2 * sum_to_power(exponent * log_product)
    return StreamGradients(exponent, through_power, features.mT @ grad, features.mT @ slope)


def shifted_eps(eps: float, shift: Tensor, keys: Keys, mask: Tensor | None) -> Tensor | float:
    """n · eps in the units of a shifted denominator, (B, H, N, 1); infinite where the true sum is negligible beside it."""
    if eps == 0:
        return 0.0
    if mask is None:
        num_keys = torch.full_like(shift[:, :1, :1], keys.features.shape[-2])
    else:
        num_keys = mask.sum(dim=-1).to(shift.dtype)[:, None, None, None]
    return ((num_keys * eps).log2() - shift).exp2()


def reciprocal(norm: Tensor) -> Tensor:
    """1 / norm, and 0 where there was nothing to divide by."""
    empty = norm == 0
    return torch.where(empty, 0.0, 1 / torch.where(empty, 1.0, norm))


def sum_to_power(x: Tensor) -> Tensor:
    """Sum over batch and tokens: (B, H, T, D) to (H, 1, D)."""
    return x.sum(dim=(0, 2))[:, None]
