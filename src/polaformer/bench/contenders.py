"""What is compared: ours on each backend, the published form, linear attention and softmax; and what each should compute.

To add a rival, add it to CONTENDERS: how to build it for a shape, and the slow form that says what it should compute.

# B batch, H heads, N queries and keys, D head width
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from polaformer.analysis.agreement import Attention, Shape
from polaformer.attention import create
from polaformer.ops.polarity import backends, cpu, plain, reference
from polaformer.ops.polarity.inputs import Inputs
from polaformer.ops.polarity.operator import polarity_attention

PUBLISHED_EPS = 1e-6
# By N and D, per batch element and head: keysᵀ·values and queries times it, both 2D×D; the same with features as wide as the
# head; scores, and scores times values.
FLOPS = {"polarity": lambda n, d: 8 * n * d**2, "linear": lambda n, d: 4 * n * d**2, "softmax": lambda n, d: 4 * n**2 * d}
WIDTH = 32  # a head width that every backend supports


@dataclass(frozen=True)
class Contender:
    """An implementation to time, and what it should compute."""

    build: Callable[[Shape], Attention]
    reference: Attention  # on float64 inputs, by explicit N×M maps
    linear: Attention | None = None  # the reference in O(N), if there is such a form
    matmuls: str = "polarity"  # of a forward pass: a key of FLOPS
    holds_maps: bool = False  # N×M maps in memory, which therefore grows with N²
    backend: str | None = None  # of our operator; None for rivals
    is_compiled: bool = False  # its first call at a shape takes long and may fail
    is_safe: bool = True  # False: correct at ordinary magnitudes only, without a derivative; timed to see what safety costs

    def flops(self, shape: Shape) -> int:
        """Of a forward pass, dense matmuls alone."""
        return shape[0] * shape[1] * FLOPS[self.matmuls](shape[2], shape[3])

    @property
    def is_ours(self) -> bool:
        """Whether this is what `polarity_attention` computes for users."""
        return self.backend is not None and self.is_safe


def working(device: str = "cpu", *, backward: bool = True) -> tuple[dict[str, Contender], list[str]]:
    """The contenders that run on "cpu" or "cuda", by name, and a line for each of our backends that does not.

    backward: False also includes those without a derivative.
    """
    broken = {one.name: one.reason for one in backends.status() if not one.works}
    modules = backends.MODULES.items()
    ours = [name for name, module in modules if module.unsupported_reason(device, torch.float32, WIDTH) is None]
    there = {
        name: one
        for name, one in CONTENDERS.items()
        if (one.backend is None or one.backend in set(ours) - set(broken)) and (one.is_safe or not backward)
    }
    return there, [f"backend {name!r} does not work here: {broken[name]}" for name in ours if name in broken]


def polarity_in_linear_form(q: Tensor, k: Tensor, v: Tensor, power: Tensor, eps: float = 0.0) -> Tensor:
    """Eq. 6 in O(N), plain and in the dtype of its input; under autograd in a single block, differentiated by autograd."""
    block = None if torch.is_grad_enabled() else plain.block_size(q)
    return plain.attention(Inputs(q, k, v, power, eps=eps), block)[0]


def published(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
    """The authors' formulation with their eps."""
    return reference.published_polarity_attention(q, k, v, power, eps=PUBLISHED_EPS)


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.compile of the function for the shapes of its first call, as a whole or not at all."""
    # Whenever it compiles for a CPU, it warns of a missing CUDA runtime.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    torch.compiler.reset()  # after a number of shapes torch gives up compiling a function
    return torch.compile(function, dynamic=False, fullgraph=True)


@contextmanager
def noting_failure(name: str, notes: list[str]) -> Iterator[None]:
    """If what is inside cannot be compiled, ends it with a note in one line."""
    try:
        yield
    except RuntimeError as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        notes.append(f"{name} is left out: it could not be compiled ({reason})")


def softmax_by_maps(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    """Softmax attention with its N×M maps in memory."""
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v


def fused_softmax(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    """Softmax attention by PyTorch's fused kernel."""
    return F.scaled_dot_product_attention(q, k, v)


def _ours(backend: str, *, is_safe: bool = True) -> Contender:
    def unshifted(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
        return cpu.forward(Inputs(q, k, v, power), shifted=False)[0]

    attention = partial(polarity_attention, backend=backend) if is_safe else unshifted
    maps = reference.polarity_attention
    return Contender(lambda _: attention, maps, polarity_in_linear_form, backend=backend, is_safe=is_safe)


def _linear() -> Contender:
    def build(shape: Shape) -> Attention:
        core = create("linear", num_heads=shape[1], head_dim=shape[3])
        return lambda q, k, v, _: core(q, k, v)

    def by_maps(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        scores = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
        return scores / scores.sum(dim=-1, keepdim=True) @ v

    def in_linear_form(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        queries, keys = F.elu(q) + 1, F.elu(k) + 1
        return queries @ (keys.mT @ v) / (queries @ keys.sum(dim=-2, keepdim=True).mT)

    return Contender(build, by_maps, in_linear_form, "linear")


# One object each: the check of a linear form against its maps is cached by them.
PUBLISHED_MAPS = partial(reference.polarity_attention, eps=PUBLISHED_EPS)
PUBLISHED_LINEAR = partial(polarity_in_linear_form, eps=PUBLISHED_EPS)
BASELINE = "polarity (published)"
COMPILED = "published, torch.compile"
SAFE, UNSAFE = "polarity (cpu)", "polarity (cpu, unshifted)"
CONTENDERS: dict[str, Contender] = {
    "polarity (triton)": _ours("triton"),
    SAFE: _ours("cpu"),
    UNSAFE: _ours("cpu", is_safe=False),
    "polarity (torch)": _ours("torch"),
    BASELINE: Contender(lambda _: published, PUBLISHED_MAPS, PUBLISHED_LINEAR),
    COMPILED: Contender(lambda _: compiled(published), PUBLISHED_MAPS, PUBLISHED_LINEAR, is_compiled=True),
    "linear (ELU + 1)": _linear(),
    "softmax (SDPA)": Contender(lambda _: fused_softmax, softmax_by_maps, matmuls="softmax"),
}
# Compared for memory alone: not a form one would use for speed.
MATERIALISED = Contender(lambda _: softmax_by_maps, softmax_by_maps, matmuls="softmax", holds_maps=True)
FOR_MEMORY = {"softmax (materialised)": MATERIALISED}
