"""The implementations of polarity attention behind one name, and which of them serves where.

Each is a module with the same three functions: `why_not()`, None where it works, else the reason in one line;
`forward(q, k, v, power, scale, mask, eps)`, the output (B, H, N, D) and its denominators (B, H, N, 2), which nobody but the
same module's `backward(grad, q, k, v, power, scale, norms, mask)` reads; that gives the gradients of q, k, v, power and scale.
"""

import functools
import warnings
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from polaformer.ops.native import library as native
from polaformer.ops.polarity import cpu, triton
from polaformer.ops.polarity import plain_backend as plain

BACKENDS = ("auto", "torch", "cpu", "triton", "reference")
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


class Backend(Protocol):
    """What a module must have to be one."""

    def why_not(self) -> str | None:
        """Why it cannot be used on this machine; None if it can."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, power: Tensor, scale: Tensor | None, mask: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The output and its denominators."""
        ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        power: Tensor,
        scale: Tensor | None,
        norms: Tensor,
        mask: Tensor | None,
    ) -> Gradients:
        """The gradients of q, k, v, power and scale."""
        ...


class Status(NamedTuple):
    """Whether a backend works on this machine, and what it is or why it does not."""

    name: str
    works: bool
    reason: str


MODULES: dict[str, Backend] = {"torch": plain, "cpu": cpu, "triton": triton}
WHAT = {
    "torch": "plain PyTorch, everywhere",
    "cpu": "a native kernel for this processor",
    "triton": "fused kernels for GPUs",
    "reference": "explicit maps in float64: slow, the truth for tests",
}


def choose(name: str, q: Tensor) -> Backend:
    """The module that computes on tensors like q (B, H, N, D); raises ValueError if the one asked for cannot."""
    if name == "auto":
        return MODULES[_fastest(q.device.type, q.dtype, q.shape[3])]
    reason = _why_not_for(name, q.device.type, q.dtype, q.shape[3])
    if reason is not None:
        raise ValueError(f"polarity_attention: backend {name!r} cannot be used: {reason}; use 'auto' or 'torch'")
    return MODULES[name]


def status() -> tuple[Status, ...]:
    """What `polaformer env` shows."""
    found = []
    for name, what in WHAT.items():
        reason = MODULES[name].why_not() if name in MODULES else None
        if name == "cpu" and reason is None:
            what = _what_kernel(what)
        found.append(Status(name, reason is None, what if reason is None else reason))
    return tuple(found)


def _what_kernel(what: str) -> str:
    """With what its compiler did not know."""
    if not set(cpu.options()) & set(native.FOR_THIS_PROCESSOR):
        what = "a native kernel for any processor, slow: its compiler did not know how to build for this one"
    return what if cpu.has_threads() else f"{what}, on one thread: its compiler knew no OpenMP"


@functools.cache
def _fastest(device: str, dtype: torch.dtype, width: int) -> str:
    """The backend that "auto" stands for; one line says so where a kernel should serve and cannot."""
    if device == "cpu":
        reason = _why_not_for("cpu", device, dtype, width)
        if reason is None:
            return "cpu"
        _tell_that_the_plain_path_serves(reason)
    if device == "cuda":
        reason = _why_not_for("triton", device, dtype, width)
        if reason is None:
            return "triton"
        _tell_that_the_plain_path_serves(reason)
    return "torch"


@functools.cache
def _tell_that_the_plain_path_serves(reason: str) -> None:
    """Once, however many kinds of tensors there are."""
    warnings.warn(f"polaformer: plain PyTorch computes polarity attention, slower: {reason}", stacklevel=2)


def _why_not_for(name: str, device: str, dtype: torch.dtype, width: int) -> str | None:
    """Why the backend cannot compute on such tensors; None if it can."""
    if name == "cpu" and device != "cpu":
        return f"it computes on the CPU but the tensors are on {device}"
    if name == "cpu" and dtype == torch.float16 and cpu.why_not() is None and not cpu.has_float16():
        return "its compiler knows no float16"
    if name == "triton" and (dtype == torch.float64 or width > triton.MAX_WIDTH):
        return f"it knows neither float64 nor heads wider than {triton.MAX_WIDTH}"
    return MODULES[name].why_not()
