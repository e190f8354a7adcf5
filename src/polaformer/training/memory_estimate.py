"""The memory that training will need, estimated without running it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polaformer.training.settings import Settings


class MemoryEstimate(NamedTuple):
    """Bytes per device: weights with gradients, optimiser state and EMA; activations saved for the backward pass."""

    weights: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of both."""
        return self.weights + self.activations

    def as_record(self) -> dict[str, int]:
        """The entries of `--dry-run`, in megabytes."""
        sizes = {"weights": self.weights, "activations": self.activations, "each_process": self.total}
        return {f"memory_of_{name}_MB": round(size / 1e6) for name, size in sizes.items()}


def estimate_memory(model: nn.Module, forward: Callable[[nn.Module], Any], settings: Settings) -> MemoryEstimate:
    """The memory for one `forward` of the part that a process works on at once; on the meta device, nothing is computed.

    Counts weights, gradients, Adam's two moments and the EMA, and the tensors that autograd saves, each once, half as large in
    half precision. Temporary buffers come on top.
    """
    weights = sum(parameter.numel() for parameter in model.parameters())
    bytes_each = 8 if settings.precision == "fp64" else 4
    copies = 4 + (settings.ema_decay is not None)
    saved = _saved_for_backward(model, forward)
    halved = settings.precision in ("bf16", "fp16")
    return MemoryEstimate(weights * bytes_each * copies, saved // 2 if halved else saved * (bytes_each // 4))


def _saved_for_backward(model: nn.Module, forward: Callable[[nn.Module], Any]) -> int:
    """Bytes of the tensors that autograd saves in a forward pass, in float32, without the weights."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    seen: dict[int, int] = {}
    alive: list[Any] = []  # references, so that no other storage gets the same address

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        output = forward(model.train())
    alive.append(output)
    return sum(seen.values())
