"""Polarity-aware attention by the native kernel, cpu_kernel.cpp, which gets the addresses of tensors.

The kernel is compiled on first use. Where that fails, `unavailable_reason` returns why, and the plain path serves.

# B batch, H heads, N queries, M keys, D head width
"""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from polaformer.ops.memory_layout import empty_like_heads, with_contiguous_rows
from polaformer.ops.native import compiler, tensors
from polaformer.ops.native.library import Kernel, find_kernel
from polaformer.ops.native.tensors import address
from polaformer.ops.polarity.inputs import Gradients, Inputs
from polaformer.ops.precision import computing_dtype

SOURCE = Path(__file__).with_name("cpu_kernel.cpp")


class TensorView(ctypes.Structure):
    """A tensor (B, H, T, D) whose last stride is 1; strides in elements."""

    _fields_ = [("data", ctypes.c_void_p), ("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("token", ctypes.c_int64)]


INTEGERS = ("batch", "heads", "queries", "keys", "width", "storage", "threads", "shifted", "poison")
VIEWS = ("q", "k", "v", "out", "grad", "grad_q", "grad_k", "grad_v")


class Problem(ctypes.Structure):
    """The fields of `Problem` in cpu_kernel.cpp, in its order; null for what a call does not need."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in INTEGERS),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("power", "log2_scale", "mask")),
        *((name, TensorView) for name in VIEWS),
        *((name, ctypes.c_void_p) for name in ("norms", "grad_power", "grad_scale")),
    ]


@functools.cache
def _kernel() -> Kernel:
    return find_kernel(SOURCE)


def describe() -> str:
    """What this backend is, and what its compiler did not support."""
    what = "a native kernel for this processor"
    if not set(options()) & set(compiler.FOR_THIS_PROCESSOR):
        what = "a native kernel for any processor, slow: its compiler could not build for this one"
    return what if has_threads() else f"{what}, on one thread: its compiler does not support OpenMP"


def unavailable_reason() -> str | None:
    """Why the kernel cannot be used on this machine, in one line; None if it can. Compiles it if needed."""
    return _kernel().reason


def unsupported_reason(device: str, dtype: torch.dtype, width: int) -> str | None:
    """Why the kernel cannot compute on such tensors, in one line; None if it can."""
    if device != "cpu":
        return f"it computes on the CPU but the tensors are on {device}"
    if dtype == torch.float16 and unavailable_reason() is None and not has_float16():
        return "its compiler does not support float16"
    return None


def options() -> list[str]:
    """The options, beyond those of every build, that the kernel was compiled with; empty without a kernel."""
    return _kernel().options()


def has_threads() -> bool:
    """Whether the kernel's compiler supported OpenMP."""
    return _kernel().has_threads()


def has_float16() -> bool:
    """Whether the kernel's compiler supported float16."""
    return _kernel().has_float16()


def forward(inputs: Inputs, *, shifted: bool = True) -> tuple[Tensor, Tensor]:
    """Eq. 6 before the gate (B, H, N, D) in v's dtype, and the denominators (B, H, N, 2) of its two streams.

    shifted: False computes the features without shifts, which overflows where the published form does: to measure what safety
    costs.
    """
    q = inputs.q
    out, norms = empty_like_heads(q), q.new_empty((*q.shape[:3], 2), dtype=computing_dtype(q))
    _call("polarity_attention", inputs, {"out": out}, norms, shifted=shifted)
    return out, norms


def backward(grad: Tensor, norms: Tensor, inputs: Inputs) -> Gradients:
    """The gradients of q, k, v, power and scale; norms as `forward` returned them, eps included."""
    q, k, v, power, scale, _, _ = inputs
    grad_q, grad_k, grad_v = empty_like_heads(q), empty_like_heads(k), empty_like_heads(v)
    views = {"grad": with_contiguous_rows(grad), "grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v}
    sums = power.new_empty((2, *power.shape), dtype=torch.float64)
    _call("polarity_attention_backward", inputs, views, norms.contiguous(), sums)
    grad_scale = None if scale is None else (sums[1] / scale.double()).to(scale.dtype)
    return grad_q, grad_k, grad_v, sums[0].to(power.dtype), grad_scale


def _call(
    name: str, inputs: Inputs, views: dict[str, Tensor], norms: Tensor, sums: Tensor | None = None, *, shifted: bool = True
) -> None:
    """Fills in the problem and runs the kernel; views: tensors (B, H, T, D) beside q, k and v."""
    library, reason = _kernel()
    if library is None:
        raise RuntimeError(f"the cpu backend does not work here: {reason}; use backend='torch'")
    q, k, v, power, scale, mask, eps = inputs
    views |= {"q": with_contiguous_rows(q), "k": with_contiguous_rows(k), "v": with_contiguous_rows(v)}
    batch, heads, queries, width = q.shape
    exponents = power.double().contiguous()
    log2_scale = None if scale is None else scale.double().log2().contiguous()
    exists = None if mask is None else mask.contiguous()
    problem = Problem(
        batch=batch,
        heads=heads,
        queries=queries,
        keys=k.shape[2],
        width=width,
        storage=tensors.STORAGE_CODES[q.dtype],
        threads=torch.get_num_threads(),
        shifted=shifted,
        poison=tensors.poison,
        eps=eps,
        power=address(exponents),
        log2_scale=address(log2_scale),
        mask=address(exists),
        norms=address(norms),
        grad_power=None if sums is None else address(sums[0]),
        grad_scale=None if sums is None or scale is None else address(sums[1]),
        **{key: TensorView(x.data_ptr(), *x.stride()[:3]) for key, x in views.items()},
    )
    tensors.run(library, name, problem, q)
