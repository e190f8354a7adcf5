"""The tail of the attention layer: (attended + depthwise convolution of the values) ⊙ gate, on tokens.

On a CPU a native kernel does all of it in one pass over tokens as they lie (cpu_convolution.cpp); elsewhere, and where there
is no compiler, it is written with PyTorch's convolution. The layer's option `backend` chooses the operator's implementation
and not this one: a layer with backend="torch" uses this kernel too, unless POLAFORMER_NATIVE=0 switches all native code off.

# B batch, P prefix tokens, H·W cells of the grid, C = heads · D channels, k kernel
"""

import ctypes
import functools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from polaformer.ops.dispatch import nobody_looks, plain_operations_wanted
from polaformer.ops.grid import Grid
from polaformer.ops.native import library as native
from polaformer.ops.polarity import cpu
from polaformer.ops.precision import computing_dtype

SOURCE = Path(__file__).with_name("cpu_convolution.cpp")
FIELDS = ("attended", "values", "gate", "out", "grad", "grad_attended", "grad_values", "grad_gate")
SIZES = ("batch", "height", "width", "prefix", "channels", "head_width", "kernel_height", "kernel_width", "storage", "threads")


class Tokens(ctypes.Structure):
    """A tensor (B, T, C) whose last stride is 1; strides in elements."""

    _fields_ = [("data", ctypes.c_void_p), ("batch", ctypes.c_int64), ("token", ctypes.c_int64)]


class Convolution(ctypes.Structure):
    """The fields of `Convolution` in cpu_convolution.cpp, in its order; null for what a call does not need."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in (*SIZES, "poison")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, Tokens) for name in FIELDS),
        ("grad_weight", ctypes.c_void_p),
    ]


def gated_convolution(
    attended: Tensor, values: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, grid: Grid
) -> Tensor:
    """(attended + convolution of the values) ⊙ gate, (B, P + H·W, C), in the dtype of `attended`.

    attended (B, P + H·W, C); values (B, H·W, C), row by row on the grid (H, W); weight (D, 1, k, k) and bias (D,) of a
    depthwise convolution with zeros around the grid, k odd, the same for every head; gate: broadcastable to `attended`, or
    None for 1. The first P tokens are not convolved. Summed in float32 at least by the kernel.
    """
    _check(attended, values, weight, bias, grid)
    if gate is not None and gate.shape != attended.shape:
        _check_gate(gate, attended)
    if plain_operations_wanted() or not _is_for_kernel((attended, values, gate), (weight, bias)):
        return _plain_any((attended, values, weight, bias, gate), grid)
    gate = None if gate is None else gate.expand(attended.shape)
    if nobody_looks(attended, values, weight, bias, gate):
        return _convolve(attended, values, weight, bias, gate, grid)
    return _forward(attended, values, weight, bias, gate, *grid)


def _is_for_kernel(tokens: Sequence[Tensor | None], parameters: Sequence[Tensor | None]) -> bool:
    """Whether a kernel may take such tensors: on the CPU, tokens of one dtype. Asks no library, so that it can be traced."""
    dtypes = {x.dtype for x in tokens if x is not None}
    on_cpu = all(x.device.type == "cpu" for x in (*tokens, *parameters) if x is not None)
    return on_cpu and len(dtypes) == 1 and dtypes <= cpu.STORAGE.keys()


def _has_kernel(dtype: torch.dtype) -> bool:
    """Whether this machine's kernel knows the dtype."""
    return _library() is not None and (dtype != torch.float16 or cpu.has_float16())


def _check(attended: Tensor, values: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid) -> None:
    """Raises ValueError before any work for shapes that do not belong together: the kernel would read beyond the tensors."""
    where, (height, width) = "gated_convolution", grid
    if attended.ndim != 3 or values.ndim != 3 or attended.shape[0] != values.shape[0] or attended.shape[2] != values.shape[2]:
        raise ValueError(
            f"{where}: attended has shape {tuple(attended.shape)} and values {tuple(values.shape)}; "
            "give both 3 axes (batch, tokens, channels), of one batch and as many channels"
        )
    if height < 0 or width < 0 or height * width != values.shape[1]:
        raise ValueError(
            f"{where}: the grid is {height}×{width} but values has {values.shape[1]} tokens; "
            "give the (height, width) whose product is that number"
        )
    if attended.shape[1] < values.shape[1]:
        raise ValueError(
            f"{where}: attended has {attended.shape[1]} tokens but values has {values.shape[1]}; "
            "give at least as many, those of the prefix first"
        )
    if weight.ndim != 4 or weight.shape[1] != 1 or weight.shape[2] % 2 == 0 or weight.shape[3] % 2 == 0:
        raise ValueError(f"{where}: weight has shape {tuple(weight.shape)}; give (head width, 1, k, k) with odd kernel sizes")
    if weight.shape[0] == 0 or attended.shape[2] % weight.shape[0] != 0:
        raise ValueError(
            f"{where}: weight is for heads of width {weight.shape[0]} but there are {attended.shape[2]} channels; "
            "give a width that divides them"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{where}: bias has shape {tuple(bias.shape)}; give ({weight.shape[0]},), or None")


def _check_gate(gate: Tensor, attended: Tensor) -> None:
    sizes = zip(reversed(gate.shape), reversed(attended.shape), strict=False)
    if gate.ndim > attended.ndim or any(size not in (1, wanted) for size, wanted in sizes):
        raise ValueError(
            f"gated_convolution: gate has shape {tuple(gate.shape)} but attended has {tuple(attended.shape)}; "
            "give one that can be broadcast to it"
        )


def plain(attended: Tensor, values: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, grid: Grid) -> Tensor:
    """The same in PyTorch's own operations."""
    prefix, width = attended.shape[1] - values.shape[1], weight.shape[0]
    if 0 in grid:  # which PyTorch's convolution refuses; as empty, and with the same derivatives
        tokens = values * weight.sum() + (0.0 if bias is None else bias.sum())
    else:
        images = F.conv2d(_images(values, grid, width), weight, bias, padding=_padding(weight), groups=width)
        tokens = _tokens(images, values)
    out = attended + (F.pad(tokens, (0, 0, prefix, 0)) if prefix else tokens)
    return out if gate is None else out * gate


def _images(tokens: Tensor, grid: Grid, width: int) -> Tensor:
    """(B, H·W, heads · width) to (B · heads, width, H, W)."""
    return tokens.unflatten(1, grid).unflatten(-1, (tokens.shape[2] // width, width)).permute(0, 3, 4, 1, 2).flatten(0, 1)


def _tokens(images: Tensor, like: Tensor) -> Tensor:
    """(B · heads, D, H, W) to (B, H·W, heads · D), the shape of `like`."""
    return (
        images.unflatten(0, (like.shape[0], like.shape[2] // images.shape[1])).permute(0, 3, 4, 1, 2).flatten(3).flatten(1, 2)
    )


def _padding(weight: Tensor) -> tuple[int, int]:
    return int(weight.shape[2]) // 2, int(weight.shape[3]) // 2


def _convolve(
    attended: Tensor,
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    grid: Grid,
) -> Tensor:
    if 0 in grid or not _has_kernel(attended.dtype):
        return _plain_any((attended, values, weight, bias, gate), grid).contiguous()
    out = attended.new_empty(attended.shape)
    _call("gated_convolution", weight, bias, grid, attended=attended, values=values, gate=gate, out=out)
    return out


@torch.library.custom_op("polaformer::gated_convolution", mutates_args=())
def _forward(
    attended: Tensor,
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    height: int,
    width: int,
) -> Tensor:
    _check_registered(attended, values, weight, bias, (height, width), gate=gate)
    return _convolve(attended, values, weight, bias, gate, (height, width))


@_forward.register_fake
def _(
    attended: Tensor,
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    height: int,
    width: int,
) -> Tensor:
    return attended.new_empty(attended.shape)


@torch.library.custom_op("polaformer::gated_convolution_backward", mutates_args=())
def _backward(
    grad: Tensor,
    attended: Tensor,
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    height: int,
    width: int,
) -> list[Tensor]:
    """Of attended, values, weight, then of bias and gate where there are such."""
    _check_registered(attended, values, weight, bias, (height, width), gate=gate, grad=grad)
    if height * width == 0 or not _has_kernel(attended.dtype):
        return _plain_gradients(grad, (attended, values, weight, bias, gate), (height, width))
    grad_attended, grad_values, grad_gate = (x.new_empty(x.shape) for x in (attended, values, attended))
    sums = weight.new_empty((weight.shape[0], weight.shape[2] * weight.shape[3] + 1), dtype=torch.float64)
    tensors = {"attended": attended, "values": values, "gate": gate, "grad": grad, "grad_values": grad_values}
    if gate is not None:
        tensors |= {"grad_attended": grad_attended, "grad_gate": grad_gate}
    _call("gated_convolution_backward", weight, bias, (height, width), sums, **tensors)
    found = [
        _dense_copy(grad) if gate is None else grad_attended,
        grad_values,
        sums[:, :-1].reshape(weight.shape).to(weight.dtype, copy=True),
    ]
    return found + ([] if bias is None else [sums[:, -1].to(bias.dtype, copy=True)]) + ([] if gate is None else [grad_gate])


@_backward.register_fake
def _(
    grad: Tensor,
    attended: Tensor,
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    height: int,
    width: int,
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (attended, values, weight, bias, gate) if x is not None]


def _check_registered(
    attended: Tensor, values: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid, **like_attended: Tensor | None
) -> None:
    """Raises also for what `gated_convolution` brings into shape: anybody can call a registered operator."""
    _check(attended, values, weight, bias, grid)
    for name, x in like_attended.items():
        if x is not None and x.shape != attended.shape:
            raise ValueError(
                f"gated_convolution: {name} has shape {tuple(x.shape)} but attended has {tuple(attended.shape)}; "
                "give them one shape"
            )
    tokens = {"attended": attended, "values": values, **like_attended}
    if not _is_for_kernel(list(tokens.values()), (weight, bias)):
        kinds = [f"{name} {x.dtype} on {x.device}" for name, x in {**tokens, "weight": weight}.items() if x is not None]
        allowed = ", ".join(str(dtype) for dtype in cpu.STORAGE)
        raise TypeError(f"gated_convolution: got {', '.join(kinds)}; give tensors on the CPU, all tokens in one of {allowed}")


def _plain_gradients(grad: Tensor, tensors: Sequence[Tensor | None], grid: Grid) -> list[Tensor]:
    """What autograd would find for the plain form, which a registered operator cannot ask it."""
    attended, values, weight, bias, gate = cast(tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], tensors)
    prefix, width = attended.shape[1] - values.shape[1], weight.shape[0]
    slope = _dense_copy(grad if gate is None else grad * gate)
    if 0 in grid:
        zeros = [x.new_zeros(x.shape) for x in (values, weight, bias) if x is not None]
        return [slope, *zeros, *([] if gate is None else [_dense_copy(grad * attended)])]
    cells = _images(slope[:, prefix:], grid, width)
    wanted, bias_sizes = [True, True, bias is not None], None if bias is None else [width]
    geometry = ([1, 1], _padding(weight), [1, 1], False, [0, 0], width)
    images = _images(values, grid, width)
    found = torch.ops.aten.convolution_backward(cells, images, weight.to(values.dtype), bias_sizes, *geometry, wanted)
    gradients = [slope, _tokens(found[0], values).contiguous(), found[1].to(weight.dtype)]
    gradients += [] if bias is None else [found[2].to(bias.dtype)]
    return gradients + ([] if gate is None else [_dense_copy(grad * _plain_any((attended, values, weight, bias, None), grid))])


def _dense_copy(x: Tensor) -> Tensor:
    """A copy whose strides are those of a new tensor, as the registration promises."""
    return x.clone(memory_format=torch.contiguous_format)


def _plain_any(tensors: Sequence[Tensor | None], grid: Grid) -> Tensor:
    """The plain form of attended, values, weight, bias and gate, the parameters in the dtype of the values."""
    attended, values, weight, bias, gate = cast(tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], tensors)
    return plain(attended, values, weight.to(values.dtype), None if bias is None else bias.to(values.dtype), gate, grid)


def _save_for_backward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.height, ctx.width = inputs
    ctx.save_for_backward(*tensors)


def _first_derivative(ctx: Any, grad: Tensor) -> tuple:
    tensors = ctx.saved_tensors  # once: with gradient checkpointing it is computed again, and given once
    found = iter(_backward(grad, *tensors, ctx.height, ctx.width))
    return *(None if x is None else next(found) for x in tensors), None, None


def _save_for_second_backward(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    *tensors, ctx.height, ctx.width = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _second_derivative(ctx: Any, cotangents: list[Tensor | None]) -> tuple:
    """Differentiates the plain form twice with autograd: rarely needed, so written for clarity."""
    third_wanted = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [
            None if t is None else t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in ctx.saved_tensors
        ]
        grad, *tensors = aliases
        out = _plain_any(tensors, (ctx.height, ctx.width))
        gradients = torch.autograd.grad(out, [t for t in tensors if t is not None], grad, create_graph=True)
        pairs = [(g, c) for g, c in zip(gradients, cotangents, strict=True) if c is not None and g.requires_grad]
        second = iter(
            torch.autograd.grad(
                [g for g, _ in pairs],
                [t for t in aliases if t is not None],
                [c for _, c in pairs],
                create_graph=third_wanted,
                allow_unused=True,
            )
        )
    return *(None if t is None else next(second) for t in aliases), None, None


_forward.register_autograd(_first_derivative, setup_context=_save_for_backward)
_backward.register_autograd(_second_derivative, setup_context=_save_for_second_backward)


@register_flop_formula(torch.ops.polaformer.gated_convolution)
def _forward_flops(attended: torch.Size, values: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    """What PyTorch counts for the convolution."""
    return 2 * values[0] * values[1] * values[2] * weight[2] * weight[3]


@register_flop_formula(torch.ops.polaformer.gated_convolution_backward)
def _backward_flops(
    grad: torch.Size, attended: torch.Size, values: torch.Size, weight: torch.Size, bias: Any, gate: Any, *_: Any, **__: Any
) -> int:
    """The gradients of values and weight, and the convolution once more for the gradient of the gate."""
    return (2 if gate is None else 3) * _forward_flops(attended, values, weight)


def _call(
    name: str, weight: Tensor, bias: Tensor | None, grid: Grid, sums: Tensor | None = None, **tensors: Tensor | None
) -> None:
    """Fills in the problem and runs the kernel; what it points to lives until it returns."""
    library = _library()
    assert library is not None
    dtype = computing_dtype(cast(Tensor, tensors["values"]))
    weight = weight.to(dtype).contiguous()
    bias = None if bias is None else bias.to(dtype).contiguous()
    there = {key: cpu.readable(x) for key, x in tensors.items() if x is not None}
    attended, values = there["attended"], there["values"]
    problem = Convolution(
        batch=attended.shape[0],
        height=grid[0],
        width=grid[1],
        prefix=attended.shape[1] - values.shape[1],
        channels=attended.shape[2],
        head_width=weight.shape[0],
        kernel_height=weight.shape[2],
        kernel_width=weight.shape[3],
        storage=cpu.STORAGE[attended.dtype],
        threads=torch.get_num_threads(),
        poison=cpu.poison,
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        grad_weight=None if sums is None else sums.data_ptr(),
        **{key: Tokens(x.data_ptr(), *x.stride()[:2]) for key, x in there.items()},
    )
    if getattr(library, name)(ctypes.byref(problem)) != 0:
        raise MemoryError(f"{name}: no memory for the kernel's work on shape {tuple(attended.shape)}")


def why_not() -> str | None:
    """Why the kernel cannot be used here, in one line; None if it can. Compiles it if that was not done before."""
    return _loaded()[1]


def options() -> list[str]:
    """What the kernel was built with beside the options of every build; nothing where there is no kernel."""
    library = _loaded()[0]
    return [] if library is None else native.options_of(library)


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    """The kernel, or why there is none."""
    reason = cpu.why_not()
    if reason is not None:
        return None, reason
    try:
        return native.load(SOURCE), None
    except native.BuildError as error:
        return None, str(error)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The kernel, or None where there is none, which is told once: here, or by the operator whose kernel is missing too."""
    library, reason = _loaded()
    if reason is not None and cpu.why_not() is None:
        warnings.warn(f"polaformer: plain PyTorch computes the layer's convolution and gate, slower: {reason}", stacklevel=2)
    return library
