"""The second derivative of the registered operators, by autograd through their plain form."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def second_derivative(
    forward: Callable[..., Tensor], grad: Tensor, tensors: Sequence[Tensor | None], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients with respect to grad and tensors, given the cotangents of the gradients of forward(*tensors) under `grad`.

    Absent tensors (None) get None; cotangents has an entry for each of the others, None for zero. Differentiates `forward`
    twice with autograd: this is rarely needed, so it is written for clarity.
    """
    needs_third = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases, so that autograd stops here and a third derivative can still be taken.
        aliases = [
            None if t is None else t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in (grad, *tensors)
        ]
        given = [t for t in aliases if t is not None]
        gradients = torch.autograd.grad(forward(*aliases[1:]), given[1:], given[0], create_graph=True)
        pairs = [(g, c) for g, c in zip(gradients, cotangents, strict=True) if c is not None and g.requires_grad]
        outputs, weights = [g for g, _ in pairs], [c for _, c in pairs]
        second = iter(torch.autograd.grad(outputs, given, weights, create_graph=needs_third, allow_unused=True))
    return [None if t is None else next(second) for t in aliases]
