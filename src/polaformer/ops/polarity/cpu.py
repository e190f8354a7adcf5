"""Polarity-aware attention by the native kernel, cpu_kernel.cpp: calls it with the addresses of tensors.

The kernel is compiled when it is first wanted; where it cannot be, `why_not` says why, and the plain path serves.

# B batch, H heads, N queries, M keys, D head width
"""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from polaformer.ops.head_strides import empty_like_heads
from polaformer.ops.native import library as native
from polaformer.ops.precision import computing_dtype

SOURCE = Path(__file__).with_name("cpu_kernel.cpp")
STORAGE = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
poison = False  # set by tests: the kernel's working memory is filled with NaN before use


class View(ctypes.Structure):
    """A tensor (B, H, T, D) whose last stride is 1; strides in elements."""

    _fields_ = [("data", ctypes.c_void_p), ("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("token", ctypes.c_int64)]


NUMBERS = ("batch", "heads", "queries", "keys", "width", "storage", "threads", "shifted", "poison")
TENSORS = ("q", "k", "v", "out", "grad", "grad_q", "grad_k", "grad_v")


class Problem(ctypes.Structure):
    """The fields of `Problem` in cpu_kernel.cpp, in its order; null for what a call does not need."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in NUMBERS),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("power", "log2_scale", "mask")),
        *((name, View) for name in TENSORS),
        *((name, ctypes.c_void_p) for name in ("norms", "grad_power", "grad_scale")),
    ]


def why_not() -> str | None:
    """Why the kernel cannot be used here, in one line; None if it can. Compiles it if that was not done before."""
    return _library()[1]


def options() -> list[str]:
    """What the kernel was built with beside the options of every build; nothing where there is no kernel."""
    library = _library()[0]
    return [] if library is None else native.options_of(library)


def has_threads() -> bool:
    """Whether the kernel's compiler knew OpenMP."""
    library = _library()[0]
    return library is not None and bool(library.has_threads())


def has_float16() -> bool:
    """Whether the kernel's compiler knew float16."""
    library = _library()[0]
    return library is not None and bool(library.has_float16())


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: Tensor,
    scale: Tensor | None,
    mask: Tensor | None,
    eps: float,
    *,
    shifted: bool = True,
) -> tuple[Tensor, Tensor]:
    """Eq. 6 before the gate (B, H, N, D) in v's dtype, and the denominators (B, H, N, 2) of its two streams.

    shifted: False computes the features as they stand, which overflows where the published form does: to measure what safety
    costs.
    """
    out, norms = empty_like_heads(q), q.new_empty((*q.shape[:3], 2), dtype=computing_dtype(q))
    views = {"q": readable(q), "k": readable(k), "v": readable(v), "out": out}
    _call("polarity_attention", views, power, scale, mask, norms, eps=eps, shifted=shifted)
    return out, norms


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: Tensor,
    scale: Tensor | None,
    norms: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v, power and scale; norms as `forward` returned them, eps included."""
    grad_q, grad_k, grad_v = empty_like_heads(q), empty_like_heads(k), empty_like_heads(v)
    views = {name: readable(x) for name, x in {"q": q, "k": k, "v": v, "grad": grad}.items()}
    views |= {"grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v}
    sums = power.new_empty((2, *power.shape), dtype=torch.float64)
    _call("polarity_attention_backward", views, power, scale, mask, norms.contiguous(), sums)
    grad_scale = None if scale is None else (sums[1] / scale.double()).to(scale.dtype)
    return grad_q, grad_k, grad_v, sums[0].to(power.dtype), grad_scale


def _call(
    name: str,
    views: dict[str, Tensor],
    power: Tensor,
    scale: Tensor | None,
    mask: Tensor | None,
    norms: Tensor,
    sums: Tensor | None = None,
    *,
    eps: float = 0.0,
    shifted: bool = True,
) -> None:
    """Fills in the problem and runs the kernel; what it points to lives until it returns."""
    library, reason = _library()
    if library is None:
        raise RuntimeError(f"the cpu backend does not work here: {reason}; use backend='torch'")
    q = views["q"]
    batch, heads, queries, width = q.shape
    exponents = power.double().contiguous()
    log2_scale = None if scale is None else scale.double().log2().contiguous()
    exists = None if mask is None else mask.contiguous()
    problem = Problem(
        batch=batch,
        heads=heads,
        queries=queries,
        keys=views["k"].shape[2],
        width=width,
        storage=STORAGE[q.dtype],
        threads=torch.get_num_threads(),
        shifted=shifted,
        poison=poison,
        eps=eps,
        power=exponents.data_ptr(),
        log2_scale=None if log2_scale is None else log2_scale.data_ptr(),
        mask=None if exists is None else exists.data_ptr(),
        norms=norms.data_ptr(),
        grad_power=None if sums is None else sums[0].data_ptr(),
        grad_scale=None if sums is None or scale is None else sums[1].data_ptr(),
        **{key: View(x.data_ptr(), *x.stride()[:3]) for key, x in views.items()},
    )
    if getattr(library, name)(ctypes.byref(problem)) != 0:
        raise MemoryError(f"{name}: no memory for the kernel's work on shape {tuple(q.shape)}")


def readable(x: Tensor) -> Tensor:
    """x, copied only if its rows are not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str | None]:
    """The kernel, or why there is none."""
    try:
        return native.load(SOURCE), None
    except native.BuildError as error:
        return None, str(error)
