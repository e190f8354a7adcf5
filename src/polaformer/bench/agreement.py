"""How far an implementation is from the truth: its output and every gradient, against a slow form in float64.

# B batch, H heads, N queries and keys, D head width
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Shape = tuple[int, int, int, int]  # (B, H, N, D)
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v, power → output


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
    relative: float  # ‖x − truth‖ / ‖truth‖, Euclidean
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
    attention: Attention, truth: Attention, inputs: Inputs, rows: Sequence[int] | None = None, *, gradients: bool = True
) -> dict[str, Difference]:
    """How far `attention` on the inputs as they are is from `truth` on the same numbers in float64.

    By name: "output", and the gradients of "q", "k", "v" and "power" (zeros where a mechanism does not use its power), unless
    gradients is False.
    rows: queries to compare, all unless given. The attention still runs over all of them, but a gradient comes back to these
    alone, so that the truth, quadratic as it is, need only be told about these.
    """
    chosen = list(range(inputs.q.shape[2])) if rows is None else list(rows)
    grad = torch.zeros_like(inputs.grad)
    grad[:, :, chosen] = inputs.grad[:, :, chosen]
    exact = Inputs(*(x.double() for x in inputs))
    exact = exact._replace(q=exact.q[:, :, chosen], grad=exact.grad[:, :, chosen])
    names = ("output", *inputs._fields[:4]) if gradients else ("output",)
    compute = _output_and_gradients if gradients else _output
    found = compute(attention, inputs._replace(grad=grad))
    found[:2] = [x[:, :, chosen] for x in found[:2]]  # the output and the gradient of q
    return {name: _difference(x, y) for name, x, y in zip(names, found, compute(truth, exact), strict=True)}


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


def _difference(x: Tensor, truth: Tensor) -> Difference:
    x = x.double()
    distance, size = float((x - truth).norm()), float(truth.norm())
    relative = distance / size if size > 0 else (0.0 if distance == 0 else float("inf"))
    return Difference(
        largest=float((x - truth).abs().max()),
        relative=relative,
        nan_share=float(x.isnan().double().mean()),
        zero_share=float((x == 0).double().mean()),
    )
