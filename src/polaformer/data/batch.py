"""Batches of any kind: what training asks of them, whatever they hold."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

_TENSOR = "tensor"  # the key under which an outline names a tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some samples. A task adds fields: tensors, and lists, tuples and dicts of them, nested at will, and plain values.

    indices: the places of the samples in their source (B,). bad: a line for every sample that could not be used.
    """

    indices: Tensor
    bad: list[str]

    def __len__(self) -> int:
        return len(self.indices)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """The batch on a device; its floating-point tensors in `dtype`, where one is given. `indices` stay where they are."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)

        return self._changed(move, without=("indices",))

    def pin_memory(self) -> Self:
        """The batch in memory that a GPU reads quickly; data loaders call it."""
        return self._changed(Tensor.pin_memory)

    def stored(self, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors by name, and an outline of the batch for JSON that says which stands where: for `restored`."""
        tensors: dict[str, Tensor] = {}
        outline = {one.name: _outline(getattr(self, one.name), f"{one.name}.{prefix}", tensors) for one in fields(self)}
        json.dumps(outline)  # raises TypeError here, not after the file was begun
        return tensors, outline

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], outline: Mapping[str, Any]) -> Self:
        """The batch that was `stored`; raises KeyError or TypeError where something is missing."""
        return cls(**{name: _filled(value, tensors) for name, value in outline.items()})

    def _changed(self, change: Callable[[Tensor], Tensor], without: tuple[str, ...] = ()) -> Self:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return type(self)(**{name: value if name in without else _mapped(value, change) for name, value in values.items()})


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(one, change) for key, one in value.items()}
    return type(value)(_mapped(one, change) for one in value) if isinstance(value, list | tuple) else value


def _outline(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().contiguous().clone()  # files hold no tensors that share memory
        return {_TENSOR: name}
    if isinstance(value, dict):
        return {"dict": {key: _outline(one, f"{name}.{key}", tensors) for key, one in value.items()}}
    if isinstance(value, list | tuple):
        return [_outline(one, f"{name}.{place}", tensors) for place, one in enumerate(value)]
    return value


def _filled(outline: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(outline, list):
        return [_filled(one, tensors) for one in outline]
    if isinstance(outline, dict):
        inner = outline.get("dict", {})
        return tensors[outline[_TENSOR]] if _TENSOR in outline else {key: _filled(one, tensors) for key, one in inner.items()}
    return outline
