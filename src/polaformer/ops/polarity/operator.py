"""Polarity-aware linear attention, the public operator: choice of the backend and registration with PyTorch.

# B batch, H heads, N queries, M keys, D head width
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from polaformer.ops.dispatch import can_bypass_dispatcher, must_use_plain_operations
from polaformer.ops.memory_layout import empty_like_heads
from polaformer.ops.polarity import backends, checks, plain, reference
from polaformer.ops.polarity.inputs import Inputs
from polaformer.ops.precision import computing_dtype
from polaformer.ops.second_derivative import second_derivative


def polarity_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: Tensor,
    *,
    scale: Tensor | None = None,
    mask: Tensor | None = None,
    eps: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Polarity-aware linear attention, Eq. 3-6 and 9 of the paper, in O((N + M)·D²).

    q (B, H, N, D), k and v (B, H, M, D), power (H, D) or (D,), every entry at least 1.
    Returns (B, H, N, D) before the gate: the first ceil(D/2) channels are the same-sign stream over that part of v, the rest
    the opposite-sign stream over the rest of v. If q is a view of tokens (B, N, H·D), so is the result.

    With w_ti = Σ_d |q_td|^p_d |k_id|^p_d over the channels where q_t and k_i agree in sign (same) or differ (opposite):

        out_t = Σ_i w_ti v_i / (Σ_i w_ti + n·eps),   n the number of keys that exist

    scale: (H, D) or (D,), every entry above 0: q and k are divided by it, at no cost: s^(-2p) is a factor of the sum over d.
    mask: boolean (B, M), True where the key exists. This is the opposite of PyTorch's `key_padding_mask`. Masked positions have
        no effect, even if they hold NaN or infinity, and get a zero gradient.
    eps: 0 is the paper's equation; 1e-6 reproduces the authors' code, which adds it to the mean over the keys.
    backend: "torch" (plain PyTorch), "cpu" (a native kernel, compiled on first use), "triton" (on a GPU), "reference"
        (explicit N×M maps in float64: slow), or "auto": the fastest that works for these tensors. `polaformer env` shows
        which backends work here, and why others do not.

    Computed in float32 (float64 for float64 input) with autocast switched off, returned in v's dtype. power and scale may be
    wider than q, k and v, so that fp32 parameters work with bf16 activations. Finite q and k never give NaN, whatever their
    magnitude, as long as the sum of v over the keys can be represented. A query that meets no key mass in a stream (a zero
    query, no keys, no key of the needed sign) gets zeros there and passes no gradient. The derivative of |x|^p is taken as 0 at
    x = 0 and at a subnormal x. NaN in the input (outside the mask) shows as NaN in the output.
    """
    checks.check(Inputs(q, k, v, power, scale, mask, eps), backend)
    power = power if power.ndim == 2 else power.expand(q.shape[1], -1)
    scale = scale if scale is None or scale.ndim == 2 else scale.expand(q.shape[1], -1)
    if backend == "reference":
        return reference.polarity_attention(q, k, v, power, scale=scale, mask=mask, eps=eps)
    inputs = Inputs(q, k, v, power, scale, mask, float(eps))
    if must_use_plain_operations():
        return plain.attention(inputs)[0]
    if can_bypass_dispatcher(*inputs.tensors):
        return backends.choose(backend, q).forward(inputs)[0]
    return _forward(*inputs, backend)[0]


@torch.library.custom_op("polaformer::polarity_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, power: Tensor, scale: Tensor | None, mask: Tensor | None, eps: float, backend: str
) -> tuple[Tensor, Tensor]:
    inputs = Inputs(q, k, v, power, scale, mask, eps)
    checks.check_registered(inputs, backend)
    return backends.choose(backend, q).forward(inputs)


@_forward.register_fake
def _fake_forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_like_heads(q), q.new_empty((*q.shape[:3], 2), dtype=computing_dtype(q))


@torch.library.custom_op("polaformer::polarity_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, norms: Tensor, q: Tensor, k: Tensor, v: Tensor, power: Tensor, scale: Tensor | None, mask: Tensor | None,
    eps: float, backend: str,
) -> list[Tensor]:  # fmt: skip
    inputs = Inputs(q, k, v, power, scale, mask, eps)
    checks.check_registered(inputs, backend)
    checks.check_like(q, "grad", grad, q.shape, q.dtype)
    checks.check_like(q, "norms", norms, (*q.shape[:3], 2), computing_dtype(q))
    # A list, because the gradient of the scale may be missing and an operator cannot return None.
    return [gradient for gradient in backends.choose(backend, q).backward(grad, norms, inputs) if gradient is not None]


@_backward.register_fake
def _fake_backward(
    grad: Tensor, norms: Tensor, q: Tensor, k: Tensor, v: Tensor, power: Tensor, scale: Tensor | None, *_: Any
) -> list[Tensor]:
    parameters = [power] if scale is None else [power, scale]
    return [*map(empty_like_heads, (q, k, v)), *(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in parameters)]


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.eps, ctx.backend = inputs
    ctx.save_for_backward(output[1], *tensors)


def _first_derivative(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple:
    norms, *tensors = ctx.saved_tensors
    found = iter(_backward(grad, norms, *tensors, ctx.eps, ctx.backend))
    *differentiable, _ = tensors  # all but the mask
    return *(None if x is None else next(found) for x in differentiable), None, None, None


def _save_for_second_backward(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    grad, _, *tensors, ctx.eps, _ = inputs
    ctx.save_for_backward(grad, *tensors)
    ctx.set_materialize_grads(False)


def _second_derivative(ctx: Any, cotangents: list[Tensor | None]) -> tuple:
    """`norms` is a function of the other inputs here, so it gets no gradient."""
    grad, *tensors, mask = ctx.saved_tensors
    of_grad, *found = second_derivative(
        lambda q, k, v, power, scale: plain.attention(Inputs(q, k, v, power, scale, mask, ctx.eps))[0],
        grad,
        tensors,
        cotangents,
    )
    return of_grad, None, *found, None, None, None


_forward.register_autograd(_first_derivative, setup_context=_save_for_backward)
_backward.register_autograd(_second_derivative, setup_context=_save_for_second_backward)


@register_flop_formula(torch.ops.polaformer.polarity_attention)
def _forward_flops(q: torch.Size, k: torch.Size, *_: Any, **__: Any) -> int:
    """KᵀV, the two products with it, the two denominators; a multiply-add counts as two, as everywhere in PyTorch."""
    batch, heads, num_queries, width = q
    return 4 * batch * heads * width * (k[2] * width + num_queries * width + 2 * num_queries)


@register_flop_formula(torch.ops.polaformer.polarity_attention_backward)
def _backward_flops(grad: torch.Size, norms: torch.Size, q: torch.Size, k: torch.Size, *_: Any, **__: Any) -> int:
    """KᵀV again; two products per query and two per key; the denominators."""
    batch, heads, num_queries, width = q
    return 4 * batch * heads * width * (3 * k[2] * width + 2 * num_queries * width + 2 * num_queries)
