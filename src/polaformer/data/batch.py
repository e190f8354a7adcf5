"""Batches of any kind: what training asks of them, whatever they hold."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

_TENSOR, _DICT, _TUPLE = "tensor", "dict", "tuple"  # the key under which an outline names a tensor, or holds the others
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some samples. A task adds fields: tensors, numbers, strings, None, and lists, tuples and dicts of them, nested at will.

    Keys of dicts are strings, and named tuples are refused: a batch can be written to a file and come back as it was.

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
        whole = self._changed(Tensor.detach)  # raises TypeError for what no file can hold
        outline = {one.name: _outline(getattr(whole, one.name), f"{one.name}.{prefix}", tensors) for one in fields(whole)}
        return tensors, outline

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], outline: Mapping[str, Any]) -> Self:
        """The batch that was `stored`; raises KeyError or TypeError where something is missing."""
        return cls(**{name: _filled(value, tensors) for name, value in outline.items()})

    def _changed(self, change: Callable[[Tensor], Tensor], without: tuple[str, ...] = ()) -> Self:
        """The batch with every tensor changed; raises TypeError where a field holds something else than the class allows."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        where = type(self).__name__
        changed = {name: _mapped(value, change, f"{where}.{name}") for name, value in values.items() if name not in without}
        return type(self)(**values | changed)


def _mapped(value: Any, change: Callable[[Tensor], Tensor], where: str) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _mapped(one, change, where) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(one, change, where) for one in value)
    if type(value) not in _PLAIN:
        what = "dict with keys that are not strings" if type(value) is dict else type(value).__name__
        raise TypeError(f"{where} holds a {what}; give tensors, numbers, strings, None, and lists, tuples and dicts of them")
    return value


def _outline(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[name] = value.cpu().contiguous().clone()  # files hold no tensors that share memory
        return {_TENSOR: name}
    if isinstance(value, dict):
        outlines = _outline(list(value.values()), name, tensors)
        return {_DICT: dict(zip(value, outlines, strict=True))}
    if isinstance(value, list | tuple):
        outlines = [_outline(one, f"{name}.{place}", tensors) for place, one in enumerate(value)]
        return {_TUPLE: outlines} if isinstance(value, tuple) else outlines
    return value


def _filled(outline: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(outline, list):
        return [_filled(one, tensors) for one in outline]
    if not isinstance(outline, dict):
        return outline
    if _TENSOR in outline:
        return tensors[outline[_TENSOR]]
    if _TUPLE in outline:
        return tuple(_filled(outline[_TUPLE], tensors))
    return {key: _filled(one, tensors) for key, one in outline[_DICT].items()}
