"""Polarity-aware attention in plain PyTorch, linear in the number of tokens and safe at every magnitude.

The features of Eq. 9 leave the floating-point range quickly (|x|^p with p up to 1 + α), so they are never formed directly.
Two shifts that cancel between numerator and denominator keep them in [0, 1]:

    keys      2^(p·(log2|k| − log2 peak)),  peak the largest |k| of the same channel and sign → a column's largest entry is 1
    queries   2^(p·(log2|q| + log2 peak) − shift),  shift the query's largest exponent        → a row's largest entry is 1

Hence the denominator of a query that meets any key is at least 1. The opposite-sign stream is the same-sign stream of −q.

The backend (`forward`, `backward`) processes tokens in blocks: the temporaries of a block stay in cache, are reused, and do not
grow with the number of tokens. `attention` is the same mathematics for autograd and for exported programs.

Signs are applied by arithmetic, with 0/1 indicators, rather than with `torch.where`: on a CPU that is many times faster, and
NaN in the input stays visible as NaN in the output.

# B batch, H heads, N queries, M keys, D head width, E = ceil(D / 2); 2D-wide features are [positive part, negative part]
"""

from functools import reduce
from math import inf, log, log2
from typing import NamedTuple

import torch
from torch import Tensor

from polaformer.ops.memory_layout import match_layout
from polaformer.ops.polarity.inputs import Gradients, Inputs
from polaformer.ops.precision import computing_dtype, reciprocal, without_autocast

# Represents the logarithm of zero: so far below the logarithm of any product of two floats that an absent channel never sets
# the shift, and finite, so that 0 · FLOOR is 0.
FLOOR = -1.0e6
LN2 = log(2.0)
# Size of a block of one input on a CPU. Much larger temporaries are returned to the system and faulted in again on every call;
# much smaller ones cost more calls than they save.
BLOCK_BYTES = 5 << 18


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


class Keys(NamedTuple):
    """Some keys in sign-magnitude form, with their features."""

    signed: Signed
    log_ratio: Tensor  # (B, H, T, D): log2(|k| / peak)
    weight: Tensor  # (B, H, T, D): (|k| / peak)^p
    features: Tensor  # (B, H, T, 2D): the same, split by sign


class Memory(NamedTuple):
    """What queries need of all keys and values."""

    log_peak: Tensor  # (B, H, 1, 2D): log2 of the largest |k| of each channel and sign, FLOOR where there is none
    state: Tensor  # (B, H, 2D, D): Σ features ⊗ v
    total: Tensor  # (B, H, 2D, 1): Σ features
    log_added: Tensor | None  # (B or 1, 1, 1, 1): log2 of the number of keys times eps; None without eps
    log_scale: Tensor | None = None  # (H, 1, D): log2 of the divisor of a query-key product; None for 1

    def split(self, half: int) -> tuple["Memory", "Memory"]:
        """The memories of the same-sign and of the opposite-sign stream."""
        return self._replace(state=self.state[..., :half]), self._replace(state=self.state[..., half:])


class StreamGradients(NamedTuple):
    """The gradients that one stream passes back from some queries."""

    exponent: Tensor  # (B, H, T, D): of p·log|q|
    power: Tensor  # (H, 1, D): through these queries
    state: Tensor  # (B, H, 2D, E)
    total: Tensor  # (B, H, 2D, 1)


def describe() -> str:
    """What this backend is."""
    return "plain PyTorch, everywhere"


def unavailable_reason() -> str | None:
    """None: it works on every machine."""
    return None


def unsupported_reason(device: str, dtype: torch.dtype, width: int) -> str | None:
    """None: it computes on all tensors."""
    return None


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The output (B, H, N, D) and its denominators (B, H, N, 2), in blocks, laid out as all backends lay them out."""
    out, norms = attention(inputs, block_size(inputs.q))
    return match_layout(out, inputs.q), norms.contiguous()


def backward(grad: Tensor, norms: Tensor, inputs: Inputs) -> Gradients:
    """The gradients of q, k, v, power and scale, in blocks, laid out as all backends lay them out."""
    *tokens, grad_power, grad_scale = attention_backward(grad, norms, inputs, block_size(inputs.q))
    grad_q, grad_k, grad_v = (match_layout(g, x) for g, x in zip(tokens, inputs.tokens, strict=True))
    return grad_q, grad_k, grad_v, grad_power.contiguous(), None if grad_scale is None else grad_scale.contiguous()


@without_autocast
def attention(inputs: Inputs, block: int | None = None) -> tuple[Tensor, Tensor]:
    """Eq. 6 before the gate, and the denominators of its two streams.

    block: number of tokens to process at a time, all of them by default.
    Returns (B, H, N, D) in v's dtype and (B, H, N, 2) in the computing dtype. Autograd can differentiate it, also twice.
    """
    q, k, v, power, scale, mask, eps = inputs
    k, v, power, half = hide(k, mask), hide(v, mask), widen(power, q)[:, None], (v.shape[-1] + 1) // 2
    memory = summarise(k, v, power, num_keys(k, mask), eps, block)._replace(log_scale=log_scales(scale, q))
    same, opposite = memory.split(half)
    outs, norms = [], []
    for part in blocks(q.shape[-2], block):
        queries = signed(widen(q[:, :, part]))
        out, norm = zip(attend(queries, same, power), attend(queries.flipped(), opposite, power), strict=True)
        outs.append(torch.cat(out, dim=-1).to(v.dtype))
        norms.append(torch.cat(norm, dim=-1))
    return torch.cat(outs, dim=-2), torch.cat(norms, dim=-2)


@without_autocast
def attention_backward(grad: Tensor, norms: Tensor, inputs: Inputs, block: int | None = None) -> Gradients:
    """The gradients of q, k, v, power and scale in closed form; features are recomputed rather than kept.

    grad (B, H, N, D), norms (B, H, N, 2) as `attention` returned them, eps included. The shifts are treated as constants: the
    result does not depend on them.
    """
    q, k, v, power, scale, mask, _ = inputs
    k, v, p, half = hide(k, mask), hide(v, mask), widen(power, q)[:, None], (v.shape[-1] + 1) // 2
    memory = summarise(k, v, p, num_keys(k, mask), 0.0, block)._replace(log_scale=log_scales(scale, q))
    grad_q, grad_power, grad_memory, exponents = _queries_backward(grad, norms, q, p, memory.split(half), block)
    grads_k, grads_v = [], []
    for part in blocks(k.shape[-2], block):
        k_part, v_part = widen(k[:, :, part]), widen(v[:, :, part])
        keys = key_features(k_part, memory.log_peak, p)
        grad_features = v_part @ grad_memory.state.mT + grad_memory.total.mT  # (B, H, T, 2D)
        exponent = keys.weight * keys.signed.gather(grad_features)  # (B, H, T, D): of p·log|k|
        grads_k.append(_divided(exponent * p, k_part).to(k.dtype))
        grads_v.append((keys.features @ grad_memory.state).to(v.dtype))
        grad_power = grad_power + LN2 * sum_to_power(exponent * keys.log_ratio)
    # The scale divides queries and keys alike, so the gradient of the queries' exponents counts twice.
    grad_scale = None if scale is None else (-2 * exponents * p)[:, 0].to(scale.dtype) / scale
    return grad_q, torch.cat(grads_k, dim=-2), torch.cat(grads_v, dim=-2), grad_power[:, 0].to(power.dtype), grad_scale


def _queries_backward(
    grad: Tensor, norms: Tensor, q: Tensor, power: Tensor, memories: tuple[Memory, Memory], block: int | None
) -> tuple[Tensor, Tensor, Memory, Tensor]:
    """The gradients of q, of power through q, of the memory's state and total, and the sum of that of p·log|q| (H, 1, D)."""
    half, grads_q = memories[0].state.shape[-1], []
    grad_power, grad_total, exponents = torch.zeros_like(power), torch.zeros_like(memories[0].total), torch.zeros_like(power)
    grad_states = [torch.zeros_like(memory.state) for memory in memories]
    for part in blocks(q.shape[-2], block):
        q_part, grad_part, norm_part = widen(q[:, :, part]), widen(grad[:, :, part], q), norms[:, :, part]
        queries = signed(q_part)
        same = attend_backward(grad_part[..., :half], norm_part[..., :1], queries, memories[0], power)
        opposite = attend_backward(grad_part[..., half:], norm_part[..., 1:], queries.flipped(), memories[1], power)
        exponent = same.exponent + opposite.exponent
        grads_q.append(_divided(exponent * power, q_part).to(q.dtype))
        exponents = exponents + sum_to_power(exponent)
        grad_power = grad_power + same.power + opposite.power
        grad_total = grad_total + same.total + opposite.total
        grad_states = [grad_states[0] + same.state, grad_states[1] + opposite.state]
    gradients = memories[0]._replace(state=torch.cat(grad_states, dim=-1), total=grad_total)
    return torch.cat(grads_q, dim=-2), grad_power, gradients, exponents


def block_size(q: Tensor) -> int | None:
    """The number of tokens to process at a time; None for all of them, except on a CPU."""
    if q.device.type != "cpu":
        return None
    return max(1, BLOCK_BYTES // max(1, q.shape[0] * q.shape[1] * q.shape[3] * computing_dtype(q).itemsize))


def blocks(num_tokens: int, size: int | None) -> list[slice]:
    """The tokens in blocks; a single one, possibly empty, unless there are more tokens than `size`."""
    if size is None or num_tokens <= size:
        return [slice(None)]
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


def widen(x: Tensor, like: Tensor | None = None) -> Tensor:
    """x in the computing dtype of `like`, or of itself."""
    return x.to(computing_dtype(x if like is None else like))


def hide(x: Tensor, mask: Tensor | None) -> Tensor:
    """Keys or values (B, H, M, D) with zeros at the masked positions."""
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0.0)


def num_keys(k: Tensor, mask: Tensor | None) -> Tensor:
    """The number of keys of each sample, (B or 1, 1, 1, 1) in the computing dtype."""
    if mask is None:
        return torch.full((1, 1, 1, 1), k.shape[-2], dtype=computing_dtype(k), device=k.device)
    return mask.sum(dim=-1).to(computing_dtype(k))[:, None, None, None]


def signed(x: Tensor) -> Signed:
    """x (B, H, T, D) in sign-magnitude form; its logarithm has a zero derivative where x is 0."""
    sign = x.detach().sign()
    positive, negative = sign.relu(), (-sign).relu()
    absent = 1 - positive - negative
    return Signed((x.abs() + absent).log2() + FLOOR * absent, positive, negative)


def summarise(k: Tensor, v: Tensor, power: Tensor, count: Tensor, eps: float, block: int | None = None) -> Memory:
    """What queries need of all keys and values (B, H, M, D), of which `count` exist."""
    log_peak = signed(widen(peaks(k))).log2
    states, totals = [], []
    for part in blocks(k.shape[-2], block):
        features = key_features(widen(k[:, :, part]), log_peak, power).features
        states.append(features.mT @ widen(v[:, :, part]))
        totals.append(features.sum(dim=-2, keepdim=True).mT)
    return Memory(log_peak, reduce(torch.add, states), reduce(torch.add, totals), count.log2() + log2(eps) if eps else None)


def log_scales(scale: Tensor | None, like: Tensor) -> Tensor | None:
    """log2 of scale², (H, 1, D) in the computing dtype: the divisor of a query-key product."""
    return None if scale is None else 2 * widen(scale, like).log2()[:, None]


def peaks(k: Tensor) -> Tensor:
    """The largest positive and the largest negative magnitude of each channel over all keys, (B, H, 1, 2D)."""
    if k.shape[-2] == 0:
        return k.new_zeros((*k.shape[:2], 1, 2 * k.shape[-1]))
    k = k.detach()
    return torch.cat([k.amax(dim=-2, keepdim=True), -k.amin(dim=-2, keepdim=True)], dim=-1).relu()


def key_features(k: Tensor, log_peak: Tensor, power: Tensor) -> Keys:
    """Keys (B, H, T, D) with their features, shifted so that the largest of each channel and sign is 1."""
    keys = signed(k)
    log_ratio = keys.log2 - keys.gather(log_peak)
    weight = (power * log_ratio).exp2()
    return Keys(keys, log_ratio, weight, keys.spread(weight))


def log_products(queries: Signed, memory: Memory) -> Tensor:
    """log2(|q| · peak), peak that of the keys with the query's sign, both divided by the scale, (B, H, T, D)."""
    product = queries.log2 + queries.gather(memory.log_peak)
    return product if memory.log_scale is None else product - memory.log_scale


def query_weight(log_product: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
    """The queries' features before the split by sign, (B, H, T, D), and the shift of each query's exponents, (B, H, T, 1)."""
    exponent = power * log_product
    shift = exponent.detach().amax(dim=-1, keepdim=True)
    return (exponent - shift).exp2(), shift


def query_features(queries: Signed, memory: Memory, power: Tensor) -> tuple[Tensor, Tensor]:
    """The queries' features (B, H, T, 2D) for the keys of their own sign, and the denominators (B, H, T, 1)."""
    weight, shift = query_weight(log_products(queries, memory), power)
    features = queries.spread(weight)
    return features, features @ memory.total + shifted_eps(memory, shift)


def attend(queries: Signed, memory: Memory, power: Tensor) -> tuple[Tensor, Tensor]:
    """One stream: its output (B, H, T, E) and its denominators (B, H, T, 1), both zero where a query meets no key."""
    features, norm = query_features(queries, memory, power)
    return (features @ memory.state) * reciprocal(norm), norm


def attend_backward(grad: Tensor, norm: Tensor, queries: Signed, memory: Memory, power: Tensor) -> StreamGradients:
    """The derivative of `attend`: grad (B, H, T, E), norm (B, H, T, 1)."""
    log_product = log_products(queries, memory)
    weight = query_weight(log_product, power)[0] * reciprocal(norm)
    features = queries.spread(weight)  # (B, H, T, 2D), rows divided by their denominators
    numerator = weight * queries.gather(grad @ memory.state.mT)  # (B, H, T, D)
    # The gradient of the denominator is −⟨grad, out⟩. Summed from the numerator's own terms, not from a rounded output, it
    # cancels them as it should where attention is sharp.
    slope = -numerator.sum(dim=-1, keepdim=True)
    exponent = numerator + slope * (weight * queries.gather(memory.total.mT))
    through_power = LN2 * sum_to_power(exponent * log_product)
    return StreamGradients(exponent, through_power, features.mT @ grad, features.mT @ slope)


def shifted_eps(memory: Memory, shift: Tensor) -> Tensor | float:
    """n · eps in the units of a shifted denominator, (B, H, T, 1); infinite where the true sum is negligible beside it."""
    return 0.0 if memory.log_added is None else (memory.log_added - shift).exp2()


def sum_to_power(x: Tensor) -> Tensor:
    """Sums over batch and tokens: (B, H, T, D) to (H, 1, D)."""
    return x.sum(dim=(0, 2))[:, None]


def _divided(values: Tensor, x: Tensor) -> Tensor:
    """values / x, and 0 where x is 0 or subnormal.

    Terms that cancel leave a rounding error in values; divided by a subnormal x it would become arbitrarily large.
    """
    return values / x.masked_fill(x.abs() < torch.finfo(x.dtype).tiny, inf)
