"""Polarity-aware linear attention, the public operator: checks, choice of backend, registration with PyTorch.

# B batch, H heads, N queries, M keys, D head width
"""

from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from polaformer.ops.dispatch import nobody_looks, plain_operations_wanted
from polaformer.ops.head_strides import empty_like_heads
from polaformer.ops.polarity import backends, reference
from polaformer.ops.polarity import plain as linear
from polaformer.ops.polarity.backends import BACKENDS
from polaformer.ops.precision import DTYPES, computing_dtype


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
    mask: boolean (B, M), True where the key exists. This is the opposite of PyTorch's `key_padding_mask`. Masked keys and
        values influence nothing, even if they hold NaN or infinity, and get a zero gradient.
    eps: 0 is the paper's equation; 1e-6 reproduces the authors' code, which adds it to the mean over the keys.
    backend: "torch" (plain PyTorch), "cpu" (a native kernel, compiled on first use), "triton" (on a GPU), "reference"
        (explicit N×M maps in float64: slow), or "auto": the fastest that works for these tensors. `polaformer env` shows
        which work here, and why others do not.

    Computed in float32 (float64 for float64 input) with autocast switched off, returned in v's dtype. power and scale may be
    wider than q, k and v, so that fp32 parameters serve bf16 activations. Finite q and k never give NaN, whatever their
    magnitude, as long as the sum of v over the keys can be represented. A query that meets no key mass in a stream (a zero
    query, no keys, no key of the needed sign) gets zeros there and passes no gradient; the derivative of |x|^p at x = 0 is
    taken as 0, and so is that of a subnormal x. NaN in the input (outside the mask) shows as NaN in the output.
    """
    _check(q, k, v, power, scale, mask, eps, backend)
    power = power.expand(q.shape[1], -1)
    scale = None if scale is None else scale.expand(q.shape[1], -1)
    if backend == "reference":
        return reference.polarity_attention(q, k, v, power, scale=scale, mask=mask, eps=eps)
    if plain_operations_wanted():
        return linear.forward(q, k, v, power, mask, eps, scale=scale)[0]
    if nobody_looks(q, k, v, power, scale, mask):
        return backends.choose(backend, q).forward(q, k, v, power, scale, mask, float(eps))[0]
    return _forward(q, k, v, power, scale, mask, float(eps), backend)[0]


@torch.library.custom_op("polaformer::polarity_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: Tensor,
    scale: Tensor | None,
    mask: Tensor | None,
    eps: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    _check_registered(q, k, v, power, scale, mask, eps, backend)
    return backends.choose(backend, q).forward(q, k, v, power, scale, mask, eps)


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: Tensor,
    scale: Tensor | None,
    mask: Tensor | None,
    eps: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return empty_like_heads(q), q.new_empty((*q.shape[:3], 2), dtype=computing_dtype(q))


@torch.library.custom_op("polaformer::polarity_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: Tensor,
    scale: Tensor | None,
    norms: Tensor,
    mask: Tensor | None,
    eps: float,
    backend: str,
) -> list[Tensor]:
    _check_registered(q, k, v, power, scale, mask, eps, backend)
    _check_like(q, "grad", grad, q.shape, q.dtype)
    _check_like(q, "norms", norms, (*q.shape[:3], 2), computing_dtype(q))
    # A list, as the scale may be none: an operator's result cannot be.
    gradients = backends.choose(backend, q).backward(grad, q, k, v, power, scale, norms, mask)
    return [gradient for gradient in gradients if gradient is not None]


@_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: Tensor,
    scale: Tensor | None,
    norms: Tensor,
    mask: Tensor | None,
    eps: float,
    backend: str,
) -> list[Tensor]:
    parameters = [power] if scale is None else [power, scale]
    return [*map(empty_like_heads, (q, k, v)), *(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in parameters)]


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, power, scale, mask, ctx.eps, ctx.backend = inputs
    ctx.save_for_backward(q, k, v, power, scale, output[1], mask)


def _first_derivative(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple:
    q, k, v, power, scale, norms, mask = ctx.saved_tensors
    gradients = _backward(grad, q, k, v, power, scale, norms, mask, ctx.eps, ctx.backend)
    return *gradients[:4], None if scale is None else gradients[4], None, None, None


def _save_for_second_backward(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    grad, q, k, v, power, scale, _, mask, ctx.eps, _ = inputs
    ctx.save_for_backward(grad, q, k, v, power, scale, mask)
    ctx.set_materialize_grads(False)


def _second_derivative(ctx: Any, cotangents: list[Tensor | None]) -> tuple:
    """Differentiates the plain path twice with autograd: rarely needed, so written for clarity.

    `norms` is a function of the inputs here, so it gets no gradient of its own.
    """
    *tensors, scale, mask = ctx.saved_tensors
    third_wanted = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases, so that autograd stops here and a third derivative still finds its way.
        tensors = tensors if scale is None else [*tensors, scale]
        aliases = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors]
        grad, q, k, v, power = aliases[:5]
        out = linear.forward(q, k, v, power, mask, ctx.eps, scale=None if scale is None else aliases[5])[0]
        gradients = torch.autograd.grad(out, aliases[1:], grad, create_graph=True)
        pairs = [(g, c) for g, c in zip(gradients, cotangents, strict=True) if c is not None]
        second = torch.autograd.grad(
            [g for g, _ in pairs],
            aliases,
            [c for _, c in pairs],
            create_graph=third_wanted,
            allow_unused=True,
        )
    return *second[:5], None if scale is None else second[5], None, None, None, None


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


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: Tensor,
    scale: Tensor | None,
    mask: Tensor | None,
    eps: float,
    backend: str,
) -> None:
    """Raises before any work: TypeError for wrong kinds, ValueError for shapes, devices and names. Looks at no values."""
    where = "polarity_attention"
    check_backend(where, backend)
    optional = {name: tensor for name, tensor in {"scale": scale, "mask": mask}.items() if tensor is not None}
    named = {"q": q, "k": k, "v": v, "power": power} | optional
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{where}: {name} is a {type(tensor).__name__}; give a torch.Tensor")
    for name, tensor in named.items():
        if name != "mask" and not tensor.is_floating_point():
            raise TypeError(
                f"{where}: {name} has dtype {tensor.dtype}; give a floating-point tensor, for instance {name}.float()"
            )
    if q.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"{where}: q has dtype {q.dtype}; give q, k and v in one of {allowed}, for instance q.bfloat16()")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"{where}: q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; give them one dtype")
    for name, tensor in named.items():
        if name in ("power", "scale") and (
            tensor.dtype not in (q.dtype, torch.float32, torch.float64) or tensor.dtype.itemsize < q.dtype.itemsize
        ):
            raise TypeError(
                f"{where}: {name} has dtype {tensor.dtype}, which cannot hold {q.dtype}; "
                f"give {name} in q's dtype or a wider one"
            )
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"{where}: mask has dtype {mask.dtype}; give a boolean mask that is True where the key exists")
    if any(tensor.device != q.device for tensor in named.values()):
        listed = ", ".join(f"{name} on {tensor.device}" for name, tensor in named.items())
        raise ValueError(f"{where}: the tensors are on different devices ({listed}); move them to one")
    _check_shapes(q, k, v, power, scale, mask)
    check_eps(where, eps)


def _check_registered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: Tensor,
    scale: Tensor | None,
    mask: Tensor | None,
    eps: float,
    backend: str,
) -> None:
    """Raises also for what `polarity_attention` brings into shape: anybody can call a registered operator."""
    _check(q, k, v, power, scale, mask, eps, backend)
    for name, parameter in (("power", power), ("scale", scale)):
        if parameter is not None:
            _check_like(q, name, parameter, (q.shape[1], q.shape[3]), parameter.dtype)


def _check_like(q: Tensor, name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    where = "polarity_attention"
    if x.shape != shape:
        raise ValueError(f"{where}: {name} has shape {tuple(x.shape)} but belongs to q; give {tuple(shape)}")
    if x.dtype != dtype:
        raise TypeError(f"{where}: {name} has dtype {x.dtype} but belongs to q; give {dtype}")
    if x.device != q.device:
        raise ValueError(f"{where}: {name} is on {x.device} but q on {q.device}; move them to one device")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, power: Tensor, scale: Tensor | None, mask: Tensor | None) -> None:
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
    for name, parameter in {"power": power, "scale": scale}.items():
        if parameter is not None and parameter.shape not in ((heads, width), (width,)):
            raise ValueError(
                f"{where}: {name} has shape {tuple(parameter.shape)} but q has {heads} heads of width {width}; "
                f"give {name} of shape ({heads}, {width}) or ({width},)"
            )
    if mask is not None and mask.shape != (batch, k.shape[2]):
        raise ValueError(
            f"{where}: mask has shape {tuple(mask.shape)} but there are {batch} samples of {k.shape[2]} keys; "
            f"give mask of shape ({batch}, {k.shape[2]})"
        )
