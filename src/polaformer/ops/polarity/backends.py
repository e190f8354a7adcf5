"""The implementations of polarity attention behind one name, and which of them serves where.

Each is a module with the functions of `Backend`. The denominators that its `forward` returns are read by its own `backward`
only.
"""

import functools
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from polaformer.ops.allocator import keep_freed_memory
from polaformer.ops.native.library import warn_of_plain_path
from polaformer.ops.polarity import cpu, plain, triton
from polaformer.ops.polarity.inputs import Gradients, Inputs

BACKENDS = ("auto", "torch", "cpu", "triton", "reference")


class Backend(Protocol):
    """The functions that a backend module has."""

    def describe(self) -> str:
        """What it is, in one line; called only where it can be used."""
        ...

    def unavailable_reason(self) -> str | None:
        """Why it cannot be used on this machine, in one line; None if it can."""
        ...

    def unsupported_reason(self, device: str, dtype: torch.dtype, width: int) -> str | None:
        """Why it cannot compute on tensors of this device type, dtype and head width, in one line; None if it can."""
        ...

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The output (B, H, N, D) and its denominators (B, H, N, 2)."""
        ...

    def backward(self, grad: Tensor, norms: Tensor, inputs: Inputs) -> Gradients:
        """The gradients, given that of the output and the denominators, which include eps."""
        ...


class Status(NamedTuple):
    """Whether a backend works on this machine, and what it is or why it does not."""

    name: str
    works: bool
    reason: str


MODULES: dict[str, Backend] = {"torch": plain, "cpu": cpu, "triton": triton}
FASTEST = {"cpu": "cpu", "cuda": "triton"}  # by device type, where it works; the plain path serves all others


def choose(name: str, q: Tensor) -> Backend:
    """The module that computes on tensors like q (B, H, N, D); raises ValueError if the requested one cannot."""
    keep_freed_memory()
    if name == "auto":
        return MODULES[_fastest(q.device.type, q.dtype, q.shape[3])]
    reason = _refusal_reason(name, q.device.type, q.dtype, q.shape[3])
    if reason is not None:
        raise ValueError(f"polarity_attention: backend {name!r} cannot be used: {reason}; use 'auto' or 'torch'")
    return MODULES[name]


def status() -> tuple[Status, ...]:
    """What `polaformer env` shows: one row per backend."""
    reasons = {name: module.unavailable_reason() for name, module in MODULES.items()}
    rows = (Status(name, reason is None, reason or MODULES[name].describe()) for name, reason in reasons.items())
    return (*rows, Status("reference", True, "explicit maps in float64: slow, what the others are tested against"))


@functools.cache
def _fastest(device: str, dtype: torch.dtype, width: int) -> str:
    """The backend that "auto" stands for; warns where the plain path stands in for a kernel."""
    name = FASTEST.get(device, "torch")
    reason = _refusal_reason(name, device, dtype, width)
    if reason is None:
        return name
    warn_of_plain_path("polarity attention", reason)
    return "torch"


def _refusal_reason(name: str, device: str, dtype: torch.dtype, width: int) -> str | None:
    """Why the backend cannot compute on such tensors here; None if it can."""
    return MODULES[name].unsupported_reason(device, dtype, width) or MODULES[name].unavailable_reason()
