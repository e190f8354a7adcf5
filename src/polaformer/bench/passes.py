"""One pass over an attention, as it is timed and as its memory is measured.

# B batch, H heads, N queries and keys, D head width
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polaformer.bench.agreement import Attention, Inputs


@dataclass(frozen=True)
class Pass:
    """A call without arguments: forward alone, with no gradient in mind, or forward and backward."""

    attention: Attention
    inputs: Inputs
    backward: bool
    parameters: tuple[Tensor, ...] = ()  # whose gradients are computed beside those of the inputs

    def __call__(self) -> object:
        """The output, or the gradients of all inputs and parameters; None of what the output does not depend on."""
        if not self.backward:
            return self.output()
        leaves, output = self.recorded()
        return torch.autograd.grad(output, leaves, self.inputs.grad, allow_unused=True)

    def output(self) -> Tensor:
        """What is computed on the way."""
        if self.backward:
            return self.recorded()[1].detach()
        with torch.inference_mode():
            return self.attention(*self.inputs[:4])

    def recorded(self) -> tuple[list[Tensor], Tensor]:
        """The inputs as leaves, then the parameters; and the output with what its derivative needs."""
        leaves = [x.detach().requires_grad_() for x in self.inputs[:4]]
        return [*leaves, *self.parameters], self.attention(*leaves)
