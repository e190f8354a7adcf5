"""The gated convolution by the native kernel, cpu_convolution.cpp, which gets the addresses of tensors."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from polaformer.ops.gated_convolution import plain
from polaformer.ops.gated_convolution.inputs import ConvolutionInputs
from polaformer.ops.memory_layout import with_contiguous_rows
from polaformer.ops.native import tensors
from polaformer.ops.native.library import Kernel, find_kernel, warn_of_plain_path
from polaformer.ops.native.tensors import address
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


def unavailable_reason() -> str | None:
    """Why the kernel cannot be used on this machine, in one line; None if it can. Compiles it if needed."""
    return _kernel().reason


def options() -> list[str]:
    """The options, beyond those of every build, that the kernel was compiled with; empty without a kernel."""
    return _kernel().options()


def has_float16() -> bool:
    """Whether the kernel's compiler supported float16."""
    return _kernel().has_float16()


def unsupported_reason(inputs: ConvolutionInputs, grad: Tensor | None = None) -> str | None:
    """Why the kernel cannot compute on tensors of these devices and dtypes; None if it can.

    Loads no library, so that it can be traced.
    """
    tokens = [x for x in (inputs.attended, inputs.values, inputs.gate, grad) if x is not None]
    dtypes = {x.dtype for x in tokens}
    on_cpu = all(x.device.type == "cpu" for x in (*tokens, inputs.weight, inputs.bias) if x is not None)
    if on_cpu and len(dtypes) == 1 and dtypes <= tensors.STORAGE_CODES.keys():
        return None
    named = {"attended": inputs.attended, "values": inputs.values, "gate": inputs.gate, "grad": grad, "weight": inputs.weight}
    kinds = [f"{name} {x.dtype} on {x.device}" for name, x in named.items() if x is not None]
    allowed = ", ".join(str(dtype) for dtype in tensors.STORAGE_CODES)
    return f"got {', '.join(kinds)}; give tensors on the CPU, all tokens in one of {allowed}"


def fallback_reason(inputs: ConvolutionInputs) -> str | None:
    """Why there is no kernel for these tensors here, in one line; None if there is. Warns once if there is none at all."""
    if 0 in inputs.grid:
        return "the grid is empty"
    if inputs.values.dtype == torch.float16 and _missing_kernel() is None and not has_float16():
        return "its compiler does not support float16"
    return _missing_kernel()


@functools.cache
def _kernel() -> Kernel:
    return find_kernel(SOURCE)


@functools.cache
def _missing_kernel() -> str | None:
    """`unavailable_reason`; warns of it."""
    reason = unavailable_reason()
    if reason is not None:
        warn_of_plain_path("the layer's convolution and gate", reason)
    return reason


def forward(inputs: ConvolutionInputs) -> Tensor:
    """(attended + convolution of the values) ⊙ gate, dense."""
    out = inputs.attended.new_empty(inputs.attended.shape)
    _call("gated_convolution", inputs, {"out": out})
    return out


def backward(grad: Tensor, inputs: ConvolutionInputs) -> list[Tensor]:
    """The gradients of attended, values and weight, then of bias and gate if given, dense."""
    attended, values, weight, bias, gate, _ = inputs
    grad_attended, grad_values, grad_gate = (x.new_empty(x.shape) for x in (attended, values, attended))
    sums = weight.new_empty((weight.shape[0], weight.shape[2] * weight.shape[3] + 1), dtype=torch.float64)
    more = {"grad": grad, "grad_values": grad_values}
    if gate is not None:
        more |= {"grad_attended": grad_attended, "grad_gate": grad_gate}
    _call("gated_convolution_backward", inputs, more, sums)
    gradients = [
        plain.dense_copy(grad) if gate is None else grad_attended,
        grad_values,
        sums[:, :-1].reshape(weight.shape).to(weight.dtype, copy=True),
    ]
    gradients += [] if bias is None else [sums[:, -1].to(bias.dtype, copy=True)]
    return gradients + ([] if gate is None else [grad_gate])


def _call(name: str, inputs: ConvolutionInputs, more: dict[str, Tensor], sums: Tensor | None = None) -> None:
    """Fills in the problem and runs the kernel; more: tensors (B, T, C) beside attended, values and gate."""
    attended, values, weight, bias, gate, grid = inputs
    batch, num_tokens, channels = attended.shape
    head_width, _, kernel_height, kernel_width = weight.shape
    dtype = computing_dtype(values)
    weight, bias = weight.to(dtype).contiguous(), None if bias is None else bias.to(dtype).contiguous()
    tokens = {"attended": attended, "values": values, "gate": gate, **more}
    readable = {key: with_contiguous_rows(x) for key, x in tokens.items() if x is not None}
    problem = Convolution(
        batch=batch,
        height=grid[0],
        width=grid[1],
        prefix=num_tokens - values.shape[1],
        channels=channels,
        head_width=head_width,
        kernel_height=kernel_height,
        kernel_width=kernel_width,
        storage=tensors.STORAGE_CODES[attended.dtype],
        threads=torch.get_num_threads(),
        poison=tensors.poison,
        weight=address(weight),
        bias=address(bias),
        grad_weight=address(sums),
        **{key: Tokens(x.data_ptr(), *x.stride()[:2]) for key, x in readable.items()},
    )
    tensors.run(_kernel().library, name, problem, attended)
