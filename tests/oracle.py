"""What most tests of the operator need: random inputs, all gradients at once, and errors against float64."""

import torch
from torch import Tensor

from polaformer.ops.polarity import reference


def random_inputs(batch=2, heads=3, queries=7, keys=5, width=6, dtype=torch.float64, power=None) -> list[Tensor]:
    """q, k, v and power, all requiring gradients; power uniform in 1..5 unless given."""
    shapes = [(batch, heads, queries, width), (batch, heads, keys, width), (batch, heads, keys, width)]
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    exponents = 1 + 4 * torch.rand(heads, width, dtype=torch.float64) if power is None else torch.full((heads, width), power)
    wide = dtype if dtype == torch.float64 else torch.float32
    return [
        q.to(dtype).requires_grad_(),
        k.to(dtype).requires_grad_(),
        v.to(dtype).requires_grad_(),
        exponents.to(wide).requires_grad_(),
    ]


def with_gradients(function, inputs: list[Tensor], cotangent: Tensor, **options) -> list[Tensor]:
    """The output and the gradients of all inputs."""
    out = function(*inputs, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, cotangent.to(out.dtype))]


def truth(inputs: list[Tensor], cotangent: Tensor, **options) -> list[Tensor]:
    """The same from the explicit N×M maps, everything in float64."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    return with_gradients(reference.polarity_attention, wide, cotangent.double(), **options)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """L2 error over L2 norm."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-300))


def relative_error_by_head(found: Tensor, wanted: Tensor) -> Tensor:
    """The same for each head apart: (1, H, T, D) or (H, D) to (H,)."""
    found, wanted = found.double(), wanted.double()
    if found.ndim == 4:
        found, wanted = found[0].flatten(1), wanted[0].flatten(1)
    return (found - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-300)
