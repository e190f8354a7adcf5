"""How far an implementation is from the truth: its output and every gradient, against a slow form in float64.

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

# Of what cancels. Rounding to fp32 leaves some 1e-7 of it, which must stay far below the tolerance of 1e-5; the usual gradient,
# in which little cancels, is well above the floor, so that it changes nothing there.
FLOOR = 0.3


class Inputs(NamedTuple):
    """What an attention is given, and the gradient that comes back to its output."""

    q: Tensor  # (B, H, N, D)
    k: Tensor  # (B, H, N, D)
    v: Tensor  # (B, H, N, D)
    power: Tensor  # (H, D)
    grad: Tensor  # (B, H, N, D)


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from the truth; NaN in it makes both numbers NaN."""

    largest: float  # max |x − truth|
    relative: float  # ‖x − truth‖ / ‖truth‖, Euclidean; where the truth all but cancels, against a share of what cancels
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
) -> Inputs:
    """Normal q, k, v and incoming gradient, q and k times magnitude; powers uniform in 1..5, as with α = 4, unless given.

    With unequal powers and an extreme magnitude one channel decides everything: the true gradient of q is then a small
    difference of large numbers, and a relative error says little. Give one power for all to compare magnitudes.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(4))
    powers = 1 + 4 * torch.rand(shape[1], shape[3], generator=generator, dtype=dtype)
    powers = powers if power is None else torch.full_like(powers, power)
    # The same numbers on every device: they are drawn on the CPU.
    return Inputs(*(x.to(device) for x in (q * magnitude, k * magnitude, v, powers, grad)))


def differences(
    attention: Attention, truth: Attention, inputs: Inputs, *, gradients: bool = True, piece: int | None = None
) -> dict[str, Difference]:
    """How far `attention` on the inputs as they are is from `truth` on the same numbers in float64.

    By name: "output", and the gradients of "q", "k", "v" and "power" (zeros where a mechanism does not use its power), unless
    gradients is False.
    piece: queries that the truth takes at a time, all unless given, so that its maps need less memory: queries do not know of
    each other, and the gradients of what they share add up.
    """
    exact = Inputs(*(x.double() for x in inputs))
    names = ("output", *inputs._fields[:4]) if gradients else ("output",)
    compute = _output_and_gradients if gradients else _output
    found = zip(names, compute(attention, inputs), _in_pieces(compute, truth, exact, piece), strict=True)
    terms = _terms(exact)
    return {name: difference(x, y, floor=FLOOR * terms[name]) for name, x, y in found}


def _terms(inputs: Inputs) -> dict[str, float]:
    """The norms that the output and the gradients have when the terms of their sums do not cancel, roughly.

    Each row of the output is a mean of values over M keys, in which independent terms leave 1/√M. A gradient of q or k is one
    of differences of values, in units of 1/q or 1/k; with a single key it is exactly 0, and what is computed is rounding.
    """
    q, k, v, _, grad = inputs
    value, mean = float(v.norm(dim=-1).square().mean().sqrt()), max(1, k.shape[2]) ** -0.5
    slope = float(grad.norm()) * mean
    through = {name: slope * value * float(x.norm(dim=-1).pow(-2).mean().sqrt()) for name, x in {"q": q, "k": k}.items()}
    return {"output": value * mean * q[..., 0].numel() ** 0.5, **through, "v": slope, "power": slope * value}


def worst(found: dict[str, Difference]) -> float:
    """The largest relative difference; NaN if any of them is."""
    relative = torch.tensor([difference.relative for difference in found.values()])
    return float(relative.max())  # unlike Python's max, this lets NaN win


def _output(attention: Attention, inputs: Inputs) -> list[Tensor]:
    with torch.no_grad():
        return [attention(*inputs[:4])]


def _output_and_gradients(attention: Attention, inputs: Inputs) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:4]]
    output = attention(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, inputs.grad, materialize_grads=True)]


def _in_pieces(compute: Callable[..., list[Tensor]], truth: Attention, exact: Inputs, piece: int | None) -> list[Tensor]:
    parts = list(zip(*(x.split(piece or max(1, x.shape[2]), dim=2) for x in (exact.q, exact.grad)), strict=True))
    outputs: list[Tensor] = []
    of_queries: list[Tensor] = []
    shared: list[Tensor] = []
    for q, grad in parts:
        output, *gradients = compute(truth, exact._replace(q=q, grad=grad))
        outputs.append(output)
        of_queries += gradients[:1]
        shared = [a + b for a, b in zip(shared, gradients[1:], strict=True)] if shared else gradients[1:]
    return [torch.cat(x, dim=2) for x in (outputs, of_queries) if x] + shared


def difference(x: Tensor, truth: Tensor, floor: float = 0.0) -> Difference:
    """How far x is from the truth, which is in float64; floor: the least norm that the distance is divided by."""
    x = x.double()
    distance, size = float((x - truth).norm()), max(float(truth.norm()), floor if isfinite(floor) else 0.0)
    relative = distance / size if size > 0 else (0.0 if distance == 0 else float("inf"))
    return Difference(
        largest=float((x - truth).abs().max()),
        relative=relative,
        nan_share=float(x.isnan().double().mean()),
        zero_share=float((x == 0).double().mean()),
    )
