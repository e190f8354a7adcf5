"""Polarity-aware linear attention, the public operator: checks, choice of backend, registration with PyTorch.

# B batch, H heads, N queries, M keys, D head width
"""

from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from polaformer.ops import linear, reference
from polaformer.ops.precision import computing_dtype

BACKENDS = ("auto", "torch", "reference")


def polarity_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: Tensor,
    *,
    mask: Tensor | None = None,
    eps: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Polarity-aware linear attention, Eq. 3-6 and 9 of the paper, in O((N + M)·D²).

    q (B, H, N, D), k and v (B, H, M, D), power (H, D) or (D,), every entry at least 1.
    Returns (B, H, N, D) before the gate: the first ceil(D/2) channels are the same-sign stream over that part of v, the rest
    the opposite-sign stream over the rest of v.

    With w_ti = Σ_d |q_td|^p_d |k_id|^p_d over the channels where q_t and k_i agree in sign (same) or differ (opposite):

        out_t = Σ_i w_ti v_i / (Σ_i w_ti + n·eps),   n the number of keys that exist

    mask: boolean (B, M), True where the key exists. This is the opposite of PyTorch's `key_padding_mask`. Masked keys and
        values influence nothing, even if they hold NaN or infinity, and get a zero gradient.
    eps: 0 is the paper's equation; 1e-6 reproduces the authors' code, which adds it to the mean over the keys.
    backend: "torch" (plain PyTorch), "reference" (explicit N×M maps in float64: slow), or "auto" (the fastest there is).

    Computed in float32 (float64 for float64 input) with autocast switched off, returned in v's dtype. power may be wider than
    q, k and v, so that an fp32 parameter serves bf16 activations. Finite q and k never give NaN, whatever their magnitude, as
    long as the sum of v over the keys can be represented. A query that meets no key mass in a stream (a zero query, no keys, no
    key of the needed sign) gets zeros there and passes no gradient; the derivative of |x|^p at x = 0 is taken as 0. NaN in the
    input (outside the mask) shows as NaN in the output.
    """
    _check(q, k, v, power, mask, eps, backend)
    power = power.expand(q.shape[1], -1)
    if backend == "reference":
        return reference.polarity_attention(q, k, v, power, mask=mask, eps=eps)
    if _plain_operations_wanted():
        return linear.forward(q, k, v, power, mask, eps)[0]
    return _forward(q, k, v, power, mask, float(eps))[0]


def _plain_operations_wanted() -> bool:
    """Whether the registered operator must not be used.

    An exported program holds plain ATen operations, so that it runs where this library is not installed; and PyTorch's
    function transforms and forward-mode derivatives do not see the derivative of a registered operator.
    """
    return (
        torch.compiler.is_exporting()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


@torch.library.custom_op("polaformer::polarity_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, power: Tensor, mask: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    out, norms = linear.forward(q, k, v, power, mask, eps, linear.block_size(q))
    return out.contiguous(), norms.contiguous()


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, power: Tensor, mask: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return v.new_empty(q.shape), q.new_empty((*q.shape[:3], 2), dtype=computing_dtype(q))


@torch.library.custom_op("polaformer::polarity_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, power: Tensor, norms: Tensor, mask: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q_grad, k_grad, v_grad, power_grad = linear.backward(grad, q, k, v, power, norms, mask, linear.block_size(q))
    return q_grad.contiguous(), k_grad.contiguous(), v_grad.contiguous(), power_grad.contiguous()


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, power: Tensor, norms: Tensor, mask: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), power.new_empty(power.shape)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, power, mask, eps = inputs
    ctx.save_for_backward(q, k, v, power, output[1], mask)
    ctx.eps = eps


def _first_derivative(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple:
    q, k, v, power, norms, mask = ctx.saved_tensors
    return *_backward(grad, q, k, v, power, norms, mask, ctx.eps), None, None


def _save_for_second_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    grad, q, k, v, power, _, mask, eps = inputs
    ctx.save_for_backward(grad, q, k, v, power, mask)
    ctx.set_materialize_grads(False)
    ctx.eps = eps


def _second_derivative(ctx: Any, *cotangents: Tensor | None) -> tuple:
    """Differentiates the plain path twice with autograd: rarely needed, so written for clarity.

    `norms` is a function of the inputs here, so it gets no gradient of its own.
    """
    *tensors, mask = ctx.saved_tensors
    third_wanted = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases, so that autograd stops here and a third derivative still finds its way.
        aliases = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors]
        grad, q, k, v, power = aliases
        out = linear.forward(q, k, v, power, mask, ctx.eps)[0]
        gradients = torch.autograd.grad(out, (q, k, v, power), grad, create_graph=True)
        pairs = [(g, c) for g, c in zip(gradients, cotangents, strict=True) if c is not None]
        second = torch.autograd.grad(
            [g for g, _ in pairs],
            aliases,
            [c for _, c in pairs],
            create_graph=third_wanted,
            allow_unused=True,
        )
    return *second, None, None, None


_forward.register_autograd(_first_derivative, setup_context=_save_for_backward)
_backward.register_autograd(_second_derivative, setup_context=_save_for_second_backward)


@register_flop_formula(torch.ops.polaformer.polarity_attention)
def _forward_flops(q: torch.Size, k: torch.Size, *_: Any, **__: Any) -> int:
    """KᵀV, the two products with it, the two denominators; a multiply-add counts as two, as everywhere in PyTorch."""
    batch, heads, num_queries, width = q
    return 4 * batch * heads * width * (k[2] * width + num_queries * width + 2 * num_queries)


@register_flop_formula(torch.ops.polaformer.polarity_attention_backward)
def _backward_flops(grad: torch.Size, q: torch.Size, k: torch.Size, *_: Any, **__: Any) -> int:
    """KᵀV again; two products a query and two a key; the denominators."""
    batch, heads, num_queries, width = q
    return 4 * batch * heads * width * (3 * k[2] * width + 2 * num_queries * width + 2 * num_queries)


def check_backend(where: str, backend: str) -> None:
    """Raises unless there is such a backend."""
    if backend not in BACKENDS:
        raise ValueError(f"{where}: backend is {backend!r}; choose one of {', '.join(BACKENDS)}")


def check_eps(where: str, eps: float) -> None:
    """Raises unless eps can be added to a mean of non-negative numbers."""
    if not isinstance(eps, int | float):
        raise TypeError(f"{where}: eps is a {type(eps).__name__}; give a number, 0 or for instance 1e-6")
    if not 0 <= eps < inf:
        raise ValueError(f"{where}: eps is {eps}; give 0 (the paper's equation) or a small positive number such as 1e-6")


def _check(q: Tensor, k: Tensor, v: Tensor, power: Tensor, mask: Tensor | None, eps: float, backend: str) -> None:
    """Raises before any work: TypeError for wrong kinds, ValueError for shapes, devices and names. Looks at no values."""
    where = "polarity_attention"
    check_backend(where, backend)
    named = {"q": q, "k": k, "v": v, "power": power} | ({} if mask is None else {"mask": mask})
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{where}: {name} is a {type(tensor).__name__}; give a torch.Tensor")
    for name in ("q", "k", "v", "power"):
        if not named[name].is_floating_point():
            raise TypeError(
                f"{where}: {name} has dtype {named[name].dtype}; give a floating-point tensor, for instance {name}.float()"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"{where}: q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; give them one dtype")
    if power.dtype not in (q.dtype, torch.float32, torch.float64) or power.dtype.itemsize < q.dtype.itemsize:
        raise TypeError(
            f"{where}: power has dtype {power.dtype}, which cannot hold {q.dtype}; give power in q's dtype or a wider one"
        )
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"{where}: mask has dtype {mask.dtype}; give a boolean mask that is True where the key exists")
    devices = {name: str(tensor.device) for name, tensor in named.items()}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{where}: the tensors are on different devices ({listed}); move them to one")
    _check_shapes(q, k, v, power, mask)
    check_eps(where, eps)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, power: Tensor, mask: Tensor | None) -> None:
    where = "polarity_attention"
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        if tensor.ndim != 4:
            raise ValueError(f"{where}: {name} has shape {tuple(tensor.shape)}; give 4 axes (batch, heads, tokens, head width)")
    batch, heads, _, width = q.shape
    if width < 2:
        raise ValueError(f"{where}: q has head width {width}; give at least 2, one channel for each polarity of v")
    if (k.shape[0], k.shape[1], k.shape[3]) != (batch, heads, width):
        raise ValueError(
            f"{where}: k has shape {tuple(k.shape)} but q has shape {tuple(q.shape)}; "
            "batch, heads and head width must agree, only the number of tokens may differ"
        )
    if v.shape != k.shape:
        raise ValueError(f"{where}: v has shape {tuple(v.shape)} but k has shape {tuple(k.shape)}; give them one shape")
    if power.shape not in ((heads, width), (width,)):
        raise ValueError(
            f"{where}: power has shape {tuple(power.shape)} but q has {heads} heads of width {width}; "
            f"give power of shape ({heads}, {width}) or ({width},)"
        )
    if mask is not None and mask.shape != (batch, k.shape[2]):
        raise ValueError(
            f"{where}: mask has shape {tuple(mask.shape)} but there are {batch} samples of {k.shape[2]} keys; "
            f"give mask of shape ({batch}, {k.shape[2]})"
        )
