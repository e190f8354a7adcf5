"""What is compared: ours on each backend, the published form, linear attention, softmax; and what each should compute.

To add a rival, add it to CONTENDERS: how to build it for a shape, and the slow form that says what it should compute.

# B batch, H heads, N queries and keys, D head width
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from polaformer.attention import create
from polaformer.bench.agreement import Attention, Shape
from polaformer.ops.polarity import backends, cpu, plain, reference
from polaformer.ops.polarity.inputs import Inputs
from polaformer.ops.polarity.operator import polarity_attention

PUBLISHED_EPS = 1e-6
DEVICES = {"torch": ("cpu", "cuda"), "cpu": ("cpu",), "triton": ("cuda",)}  # of our backends; "reference" is the truth itself


def polarity_flops(shape: Shape) -> int:
    """Keysᵀ·values, 2D×D, and queries times it, 2D×D: 8·D² for a token and head, as dense products."""
    return 8 * shape[0] * shape[1] * shape[2] * shape[3] ** 2


def linear_flops(shape: Shape) -> int:
    """The same with features as wide as the head."""
    return 4 * shape[0] * shape[1] * shape[2] * shape[3] ** 2


def softmax_flops(shape: Shape) -> int:
    """Scores, and scores times values."""
    return 4 * shape[0] * shape[1] * shape[2] ** 2 * shape[3]


@dataclass(frozen=True)
class Contender:
    """An implementation to time, and what it should compute."""

    build: Callable[[Shape], Attention]
    truth: Attention  # on float64 inputs, by explicit N×M maps
    linear: Attention | None = None  # the same in O(N), where there is such a form
    flops: Callable[[Shape], int] = polarity_flops  # of a forward pass, products of matrices alone
    backend: str | None = None  # of our operator; None for rivals
    is_compiled: bool = False  # its first call at a shape takes long and may fail
    is_safe: bool = True  # False: right at ordinary magnitudes alone, without a derivative; timed to see what safety costs

    @property
    def is_ours(self) -> bool:
        """Whether this is what `polarity_attention` computes for users."""
        return self.backend is not None and self.is_safe


def working(device: str = "cpu", *, backward: bool = True) -> tuple[dict[str, Contender], list[str]]:
    """The contenders that run on "cpu" or "cuda", by name, and a line for each backend of ours that does not.

    backward: False also gives those that have no derivative.
    """
    broken = {one.name: one.reason for one in backends.status() if not one.works}
    there = {
        name: contender
        for name, contender in CONTENDERS.items()
        if contender.backend is None or (device in DEVICES[contender.backend] and contender.backend not in broken)
    }
    left_out = [name for name, devices in DEVICES.items() if device in devices and name in broken]
    notes = [f"backend {name!r} does not work here: {broken[name]}" for name in left_out]
    return {name: one for name, one in there.items() if one.is_safe or not backward}, notes


def polarity_in_linear_form(q: Tensor, k: Tensor, v: Tensor, power: Tensor, eps: float = 0.0) -> Tensor:
    """Eq. 6 in O(N), plain and in the dtype of its input; in one block if autograd looks on, whose derivative is its own."""
    block = None if torch.is_grad_enabled() else plain.block_size(q)
    return plain.attention(Inputs(q, k, v, power, eps=eps), block)[0]


def _polarity(backend: str) -> Contender:
    def ours(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
        return polarity_attention(q, k, v, power, backend=backend)

    return Contender(lambda _: ours, reference.polarity_attention, polarity_in_linear_form, backend=backend)


def _unshifted() -> Contender:
    def unsafe(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
        return cpu.forward(Inputs(q, k, v, power), shifted=False)[0]

    return Contender(lambda _: unsafe, reference.polarity_attention, polarity_in_linear_form, backend="cpu", is_safe=False)


def published(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
    """The authors' formulation with their eps."""
    return reference.published_polarity_attention(q, k, v, power, eps=PUBLISHED_EPS)


published_maps = partial(reference.polarity_attention, eps=PUBLISHED_EPS)
published_in_linear_form = partial(polarity_in_linear_form, eps=PUBLISHED_EPS)


def _published(*, is_compiled: bool = False) -> Contender:
    build = (lambda _: compiled(published)) if is_compiled else lambda _: published
    return Contender(build, published_maps, published_in_linear_form, is_compiled=is_compiled)


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.compile of the function for the shapes of its first call, as a whole or not at all."""
    # It warns of a missing CUDA runtime whenever it compiles for a CPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    torch.compiler.reset()  # after a number of shapes torch gives up compiling a function
    return torch.compile(function, dynamic=False, fullgraph=True)


def _linear() -> Contender:
    def build(shape: Shape) -> Attention:
        core = create("linear", num_heads=shape[1], head_dim=shape[3])
        return lambda q, k, v, _: core(q, k, v)

    def truth(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        scores = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
        return scores / scores.sum(dim=-1, keepdim=True) @ v

    def in_linear_form(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        queries, keys = F.elu(q) + 1, F.elu(k) + 1
        return queries @ (keys.mT @ v) / (queries @ keys.sum(dim=-2, keepdim=True).mT)

    return Contender(build, truth, in_linear_form, linear_flops)


def softmax_by_maps(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    """Softmax attention with its N×M maps in memory."""
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v


def _softmax() -> Contender:
    def fused(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    return Contender(lambda _: fused, softmax_by_maps, flops=softmax_flops)


YARDSTICK = "polarity (published)"
COMPILED = "published, torch.compile"
SAFE, UNSAFE = "polarity (cpu)", "polarity (cpu, unshifted)"
CONTENDERS: dict[str, Contender] = {
    "polarity (triton)": _polarity("triton"),
    SAFE: _polarity("cpu"),
    UNSAFE: _unshifted(),
    "polarity (torch)": _polarity("torch"),
    YARDSTICK: _published(),
    COMPILED: _published(is_compiled=True),
    "linear (ELU + 1)": _linear(),
    "softmax (SDPA)": _softmax(),
}
# What is compared for memory alone: its time is that of another age.
MATERIALISED = "softmax (materialised)"
FOR_MEMORY: dict[str, Contender] = {MATERIALISED: Contender(lambda _: softmax_by_maps, softmax_by_maps, flops=softmax_flops)}
