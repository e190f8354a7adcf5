"""How far an attention is from a reference in float64: every row of its output and of every gradient.

# B batch, H heads, N queries and keys, D head width
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

Shape = tuple[int, int, int, int]  # (B, H, N, D)
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v, power → output

# Share of the norm of the terms that cancel. Rounding to fp32 leaves about 1e-7 of that norm, which must stay far below the
# tolerance. An ordinary gradient, in which little cancels, is well above the floor and unaffected by it.
FLOOR = 0.3


class CallInputs(NamedTuple):
    """The inputs of an attention, and the gradient of its output."""

    q: Tensor  # (B, H, N, D)
    k: Tensor  # (B, H, N, D)
    v: Tensor  # (B, H, N, D)
    power: Tensor  # (H, D)
    grad: Tensor  # (B, H, N, D)


@dataclass(frozen=True)
class Pass:
    """A call without arguments, to be compared, timed or measured: forward in inference mode, or forward and backward."""

    attention: Attention
    inputs: CallInputs
    backward: bool
    parameters: tuple[Tensor, ...] = ()  # whose gradients are computed besides those of the inputs

    def __call__(self) -> object:
        """The output, or the gradients of all inputs and parameters; None for those that the output does not depend on."""
        if not self.backward:
            return self.output()
        leaves, output = self.recorded()
        return torch.autograd.grad(output, leaves, self.inputs.grad, allow_unused=True)

    def output(self) -> Tensor:
        """The output of the forward pass."""
        if self.backward:
            return self.recorded()[1].detach()
        with torch.inference_mode():
            return self.attention(*self.inputs[:4])

    def recorded(self) -> tuple[list[Tensor], Tensor]:
        """The inputs as leaves followed by the parameters, and the output with its autograd graph."""
        leaves = [x.detach().requires_grad_() for x in self.inputs[:4]]
        return [*leaves, *self.parameters], self.attention(*leaves)


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from the reference; a NaN in it makes the first two numbers NaN."""

    largest: float  # max |x − reference|
    relative: float  # ‖x − reference‖ / ‖reference‖, Euclidean; relative to a floor where the reference nearly cancels
    nan_share: float  # of the entries of x
    zero_share: float


def random_inputs(
    shape: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    magnitude: float = 1.0,
    power: float | None = None,
    device: str = "cpu",
) -> CallInputs:
    """Normal q, k, v and output gradient, q and k times magnitude; powers uniform in 1..5, as with α = 4, unless given.

    With unequal powers and an extreme magnitude a single channel dominates: the exact gradient of q is then a small difference
    of large numbers, and its relative error means little. To compare magnitudes, give one power for all channels.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(4))
    powers = 1 + 4 * torch.rand(shape[1], shape[3], generator=generator, dtype=dtype)
    powers = powers if power is None else torch.full_like(powers, power)
    # Drawn on the CPU, so that every device gets the same numbers.
    return CallInputs(*(x.to(device) for x in (q * magnitude, k * magnitude, v, powers, grad)))


def differences(
    attention: Attention, reference: Attention, inputs: CallInputs, *, gradients: bool = True, piece: int | None = None
) -> dict[str, Difference]:
    """How far `attention` on the inputs is from `reference` on the same numbers in float64.

    Keys: "output" and, if gradients are wanted, "q", "k", "v" and "power" (zeros for a mechanism that does not use its power).
    piece: the number of queries that the reference processes at a time, by default all; fewer need less memory. Queries are
    independent, and the gradients of what they share add up.
    """
    exact = CallInputs(*(x.double() for x in inputs))
    per_query: list[list[Tensor]] = []  # output and gradient of q
    shared: list[Tensor] = []  # gradients of k, v and power: sums over queries
    for q, grad in zip(*(x.split(piece or max(1, x.shape[2]), dim=2) for x in (exact.q, exact.grad)), strict=True):
        part = _output_and_gradients(reference, exact._replace(q=q, grad=grad), gradients)
        per_query.append(part[:2])
        shared = [a + b for a, b in zip(shared, part[2:], strict=True)] if shared else part[2:]
    expected = [torch.cat(x, dim=2) for x in zip(*per_query, strict=True)] + shared
    pairs = zip(_output_and_gradients(attention, inputs, gradients), expected, strict=True)
    norms = _norms_of_terms(exact).items()
    return {name: difference(*pair, floor=FLOOR * norm) for (name, norm), pair in zip(norms, pairs, strict=False)}


def difference(x: Tensor, reference: Tensor, floor: float = 0.0) -> Difference:
    """How far x is from the reference, which is in float64; floor: the smallest norm that the distance is divided by."""
    x = x.double()
    distance, size = float((x - reference).norm()), max(float(reference.norm()), floor if isfinite(floor) else 0.0)
    relative = distance / size if size > 0 else (0.0 if distance == 0 else float("inf"))
    shares = (float(mask.double().mean()) for mask in (x.isnan(), x == 0))
    return Difference(float((x - reference).abs().max()), relative, *shares)


def worst(found: dict[str, Difference]) -> float:
    """The largest relative difference; NaN if any of them is."""
    return largest(*(one.relative for one in found.values()))


def largest(*errors: float) -> float:
    """The largest error; NaN if any is, unlike Python's max."""
    return float(torch.tensor(errors).max())


def _norms_of_terms(inputs: CallInputs) -> dict[str, float]:
    """The approximate norms of the output and the gradients if the terms of their sums did not cancel.

    Each row of the output is a mean of values over M keys, in which independent terms leave 1/√M. A gradient of q or k is a
    mean of differences of values, in units of 1/q or 1/k. With a single key it is exactly 0, and the computed one is rounding.
    """
    q, k, v, _, grad = inputs
    value, mean = float(v.norm(dim=-1).square().mean().sqrt()), max(1, k.shape[2]) ** -0.5
    slope = float(grad.norm()) * mean
    through = {name: slope * value * float(x.norm(dim=-1).pow(-2).mean().sqrt()) for name, x in {"q": q, "k": k}.items()}
    return {"output": value * mean * q[..., 0].numel() ** 0.5, **through, "v": slope, "power": slope * value}


def _output_and_gradients(attention: Attention, inputs: CallInputs, gradients: bool) -> list[Tensor]:
    """The output alone, or followed by the gradients of q, k, v and power."""
    one = Pass(attention, inputs, gradients)
    if not gradients:
        return [one.output()]
    leaves, output = one.recorded()
    return [output.detach(), *torch.autograd.grad(output, leaves, inputs.grad, materialize_grads=True)]
