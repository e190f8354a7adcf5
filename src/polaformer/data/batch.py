"""The base class of batches: what training needs of a batch, whatever it holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

_TENSOR, _DICT, _TUPLE = "tensor", "dict", "tuple"  # keys of an outline: the name of a tensor, or the items of a container
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch of samples. A task adds fields: tensors, numbers, strings, None, and nested lists, tuples and dicts of these.

    Keys of dicts must be strings, and named tuples are refused, so that a batch survives a round trip through a file.

    indices: the indices of the samples in their source (B,). bad: one line per unusable sample.
    """

    indices: Tensor
    bad: list[str]

    def __len__(self) -> int:
        return len(self.indices)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """The batch on a device, its floating-point tensors in `dtype` if given. `indices` stay where they are."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)

        return self._map_tensors(move, without=("indices",))

    def pin_memory(self) -> Self:
        """The batch in pinned memory; data loaders call this."""
        return self._map_tensors(Tensor.pin_memory)

    def flatten(self, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors by name, and the outline of the batch without them, ready for JSON; `unflatten` inverts it."""
        tensors: dict[str, Tensor] = {}
        batch = self._map_tensors(Tensor.detach)  # raises TypeError for values that cannot be stored
        outline = {one.name: _flatten(getattr(batch, one.name), f"{one.name}.{prefix}", tensors) for one in fields(batch)}
        return tensors, outline

    @classmethod
    def unflatten(cls, tensors: Mapping[str, Tensor], outline: Mapping[str, Any]) -> Self:
        """The batch from the result of `flatten`; raises KeyError or TypeError if something is missing."""
        return cls(**{name: _unflatten(value, tensors) for name, value in outline.items()})

    def _map_tensors(self, change: Callable[[Tensor], Tensor], without: tuple[str, ...] = ()) -> Self:
        """The batch with `change` applied to every tensor; raises TypeError if a field holds a value of another type."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        where = type(self).__name__
        changed = {name: _map_value(value, change, f"{where}.{name}") for name, value in values.items() if name not in without}
        return type(self)(**values | changed)


def _map_value(value: Any, change: Callable[[Tensor], Tensor], where: str) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _map_value(one, change, where) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_value(one, change, where) for one in value)
    if type(value) not in _PLAIN:
        what = "dict with keys that are not strings" if type(value) is dict else type(value).__name__
        raise TypeError(f"{where} holds a {what}; give tensors, numbers, strings, None, and lists, tuples and dicts of them")
    return value


def _flatten(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[name] = value.cpu().contiguous().clone()  # safetensors refuses tensors that share memory
        return {_TENSOR: name}
    if isinstance(value, dict):
        outlines = _flatten(list(value.values()), name, tensors)
        return {_DICT: dict(zip(value, outlines, strict=True))}
    if isinstance(value, list | tuple):
        outlines = [_flatten(one, f"{name}.{index}", tensors) for index, one in enumerate(value)]
        return {_TUPLE: outlines} if isinstance(value, tuple) else outlines
    return value


def _unflatten(outline: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(outline, list):
        return [_unflatten(one, tensors) for one in outline]
    if not isinstance(outline, dict):
        return outline
    if _TENSOR in outline:
        return tensors[outline[_TENSOR]]
    if _TUPLE in outline:
        return tuple(_unflatten(outline[_TUPLE], tensors))
    return {key: _unflatten(one, tensors) for key, one in outline[_DICT].items()}
