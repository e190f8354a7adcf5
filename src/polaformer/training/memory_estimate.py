"""The memory that training and inference will need, estimated without running them."""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


def estimate_inference(model: nn.Module, forward: Callable[[nn.Module], Any], precision: str = "fp32") -> int:
    """The bytes for the weights and for the tensors of one `forward` that are alive at the same time, at most.

    On the meta device, nothing is computed. Temporary buffers within operators come on top.
    """
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    with torch.inference_mode(), _Alive() as alive:
        forward(model.eval())
    return weights + (alive.peak // 2 if precision in ("bf16", "fp16") else alive.peak)


class _Alive(TorchDispatchMode):
    """Counts the bytes of the results of operators as long as they are in use. peak: the most at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}  # by storage
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in given:  # a view is not counted
                self._add(one.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += self.sizes[key]
            self.peak = max(self.peak, self.now)
            finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.now -= self.sizes.pop(key)
