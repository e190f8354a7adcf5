"""The operator against the published form of itself, linear attention and softmax, at the same shapes, in one run.

To add a rival, add it to CONTENDERS: how to build it for a shape, and the slow form that says what it should compute.

# B batch, H heads, N queries and keys, D head width
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polaformer.attention import create
from polaformer.bench.agreement import Attention, Inputs, Shape, differences, random_inputs, worst
from polaformer.bench.measure import Timing, measure, slowdown
from polaformer.ops import reference
from polaformer.ops.polarity import polarity_attention

TOLERANCE = 1e-5  # of fp32 against float64; a right implementation stays near 1e-6
PUBLISHED_EPS = 1e-6
LONGEST_CHECKED = 4096  # several blocks of the operator; beyond it the backward pass of softmax takes too long to wait for


@dataclass(frozen=True)
class Contender:
    """An implementation to time, and what it should compute."""

    build: Callable[[Shape], Attention]
    truth: Attention  # on float64 inputs, by explicit N×M maps


@dataclass(frozen=True)
class Row:
    """What was measured of one contender at one shape."""

    error: float  # the worst relative difference from the truth, over the output and all gradients
    timing: Timing | None  # None where the error was too large
    speedup: float | None = None  # over the published form

    @property
    def correct(self) -> bool:
        """Whether it computes what it should."""
        return self.timing is not None

    def as_record(self) -> dict[str, Any]:
        """For JSON."""
        times = {} if self.timing is None else self.timing.as_record()
        return {"correct": self.correct, "error": self.error, "speedup": self.speedup} | times


def benchmark(
    shape: Shape,
    *,
    backward: bool = False,
    rounds: int = 15,
    seconds: float = 10.0,
    contenders: Mapping[str, Contender] | None = None,
    on_call: Callable[[str], None] | None = None,
) -> dict[str, Row]:
    """One row a contender, by name: correctness first, then the time of those that are correct, taken in turns.

    backward: time the forward and the backward pass together instead of the forward pass alone.
    rounds, seconds and on_call are those of `measure`.
    """
    contenders = CONTENDERS if contenders is None else contenders
    errors = {name: correctness(contender, shape) for name, contender in contenders.items()}
    inputs = random_inputs(shape)
    step = _forward_backward if backward else _forward
    # Written so that an error of NaN does not pass.
    calls = {name: step(contenders[name].build(shape), inputs) for name, error in errors.items() if error <= TOLERANCE}
    timings = measure(calls, rounds=rounds, seconds=seconds, on_call=on_call) if calls else {}
    return {name: _row(error, timings.get(name), timings.get(YARDSTICK)) for name, error in errors.items()}


def correctness(contender: Contender, shape: Shape) -> float:
    """The worst relative error, over output and gradients, of four queries at `shape`, cut to LONGEST_CHECKED tokens."""
    batch, heads, tokens, width = shape
    checked = (batch, heads, min(tokens, LONGEST_CHECKED), width)
    rows = sorted({index * (checked[2] - 1) // 3 for index in range(4)})
    return worst(differences(contender.build(checked), contender.truth, random_inputs(checked), rows))


def _row(error: float, timing: Timing | None, yardstick: Timing | None) -> Row:
    return Row(error, timing, slowdown(yardstick, timing) if timing and yardstick else None)


def _forward(attention: Attention, inputs: Inputs) -> Callable[[], object]:
    def call() -> Tensor:
        with torch.inference_mode():
            return attention(*inputs[:4])

    return call


def _forward_backward(attention: Attention, inputs: Inputs) -> Callable[[], object]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:4]]

    def call() -> object:
        return torch.autograd.grad(attention(*leaves), leaves, inputs.grad, allow_unused=True)

    return call


def _polarity(backend: str) -> Contender:
    def ours(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
        return polarity_attention(q, k, v, power, backend=backend)

    return Contender(lambda _: ours, reference.polarity_attention)


def _published() -> Contender:
    def truth(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
        return reference.polarity_attention(q, k, v, power, eps=PUBLISHED_EPS)

    def published(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
        return reference.published_polarity_attention(q, k, v, power, eps=PUBLISHED_EPS)

    return Contender(lambda _: published, truth)


def _linear() -> Contender:
    def build(shape: Shape) -> Attention:
        core = create("linear", num_heads=shape[1], head_dim=shape[3])
        return lambda q, k, v, _: core(q, k, v)

    def truth(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        scores = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
        return scores / scores.sum(dim=-1, keepdim=True) @ v

    return Contender(build, truth)


def _softmax() -> Contender:
    def fused(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def truth(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v

    return Contender(lambda _: fused, truth)


YARDSTICK = "polarity (published)"
CONTENDERS: dict[str, Contender] = {
    "polarity (torch)": _polarity("torch"),
    YARDSTICK: _published(),
    "linear (ELU + 1)": _linear(),
    "softmax (SDPA)": _softmax(),
}
