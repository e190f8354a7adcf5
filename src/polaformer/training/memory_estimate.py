"""What a training will need, estimated without running it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polaformer.training.settings import Settings


class Estimate(NamedTuple):
    """Bytes on each device: the weights with what the optimiser keeps for them, and what is kept for the backward pass."""

    weights: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.activations


def estimate(model: nn.Module, forward: Callable[[nn.Module], Any], settings: Settings) -> Estimate:
    """For a forward pass of what one process works on at once; the model is on the meta device, and nothing is computed.

    Weights, gradients and two averages of Adam, and one more for EMA; tensors that autograd keeps, each counted once, half as
    large in half precision. Buffers that live only for a moment come on top.
    """
    weights = sum(parameter.numel() for parameter in model.parameters())
    bytes_each = 8 if settings.precision == "fp64" else 4
    copies = 4 + (settings.ema_decay is not None)
    kept = _kept_for_backward(model, forward)
    halved = settings.precision in ("bf16", "fp16")
    return Estimate(weights * bytes_each * copies, kept // 2 if halved else kept * (bytes_each // 4))


def _kept_for_backward(model: nn.Module, forward: Callable[[nn.Module], Any]) -> int:
    """Bytes of the tensors that autograd keeps in a forward pass, in float32, without the weights."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    seen: dict[int, int] = {}
    alive: list[Any] = []  # as long as they live, no other tensor has their number

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward(model.train())
    alive.append(output)
    return sum(seen.values())
