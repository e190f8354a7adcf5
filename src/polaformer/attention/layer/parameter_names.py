"""Translation of published parameter names to ours.

| published                                             | here                                    |
|-------------------------------------------------------|-----------------------------------------|
| qkvg (the authors' Swin), rows q, k, v, gate          | qkv and gate                            |
| qg and kv (the authors' PVT), rows q, gate and k, v   | qkv and gate                            |
| q and kv (softmax in PVT and PVTv2)                   | qkv                                     |
| power (1, H, 1, D), scale (1, 1, C)                   | core.power, core.scale, both (H, D)     |
| positional_encoding (1, n, C)                         | key_positions.rows (n, C)               |
| dwc, dconv (linear-angular)                           | conv                                    |
| sr, norm                                              | key_reduction.conv, key_reduction.norm  |
| relative_position_bias_table                          | relative_positions.table                |
| relative_position_index                               | not stored: it follows from the window  |
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from polaformer.weights.files import StateDict


def translate_published_names(layer: Any, state: StateDict, prefix: str, *_: Any) -> None:
    """A pre-hook of `load_state_dict`: renames the published parameters of the layer at `prefix`, in place."""
    for kind in ("weight", "bias"):
        _fuse_projections(state, prefix, kind, getattr(layer.qkv, kind))
    _rename(state, f"{prefix}positional_encoding", f"{prefix}key_positions.rows", _as_rows)
    _rename(state, f"{prefix}relative_position_bias_table", f"{prefix}relative_positions.table")
    state.pop(f"{prefix}relative_position_index", None)
    for published, ours in (("dwc", "conv"), ("dconv", "conv"), ("sr", "key_reduction.conv"), ("norm", "key_reduction.norm")):
        for kind in ("weight", "bias"):
            _rename(state, f"{prefix}{published}.{kind}", f"{prefix}{ours}.{kind}")
    for name, parameter in layer.core.named_parameters():
        if name in ("power", "scale"):
            _rename(state, f"{prefix}{name}", f"{prefix}core.{name}", partial(_as_heads, shape=parameter.shape))


def _fuse_projections(state: StateDict, prefix: str, kind: str, wanted: Tensor | None) -> None:
    """Turns qkvg, or qg and kv, or q and kv, into qkv and gate; kind: "weight" or "bias"; wanted: the layer's qkv of that kind.

    Tensors that do not fit together, or that also exist under our names, are left alone and reported as unexpected.
    """
    fused, query_gate, query, key_value = (f"{prefix}{name}.{kind}" for name in ("qkvg", "qg", "q", "kv"))
    ours, gate = f"{prefix}qkv.{kind}", f"{prefix}gate.{kind}"
    if ours in state:
        return
    if fused in state and _have_matching_rows(state[fused]) and gate not in state:
        rows = state.pop(fused)
        width = len(rows) // 4
        state[ours], state[gate] = rows[: 3 * width], rows[3 * width :]
    elif query_gate in state and _have_matching_rows(state[query_gate], state.get(key_value)) and gate not in state:
        q, state[gate] = state.pop(query_gate).tensor_split(2)
        state[ours] = _joined(q, state.pop(key_value), wanted)
    elif query in state and _have_matching_rows(state[query], state.get(key_value)):
        state[ours] = _joined(state.pop(query), state.pop(key_value), wanted)


def _joined(first: Tensor, second: Tensor, wanted: Tensor | None) -> Tensor:
    """The rows of both; if the result does not have the layer's shape, an empty tensor on the meta device.

    A wrong shape is then reported as such, and a file of a few bytes cannot make us allocate what it claims to hold.
    """
    shape = torch.Size([len(first) + len(second), *first.shape[1:]])
    if wanted is None or wanted.shape != shape:
        return torch.empty(shape, dtype=first.dtype, device="meta")
    return torch.cat([first, second])


def _have_matching_rows(*tensors: Any) -> bool:
    """Whether all are tensors whose rows have the same shape and dtype."""
    if not all(isinstance(tensor, Tensor) and tensor.ndim > 0 for tensor in tensors):
        return False
    return all(tensor.shape[1:] == tensors[0].shape[1:] and tensor.dtype == tensors[0].dtype for tensor in tensors)


def _as_heads(x: Tensor, shape: torch.Size) -> Tensor:
    """x as (H, D); unchanged if it does not fit, so that load_state_dict reports both shapes."""
    return x.reshape(shape) if x.numel() == shape.numel() else x


def _as_rows(table: Tensor) -> Tensor:
    """A table (1, N, C) as rows (N, C); unchanged if it has another shape."""
    return table[0] if table.ndim == 3 and len(table) == 1 else table


def _rename(state: StateDict, published: str, ours: str, change: Any = lambda tensor: tensor) -> None:
    if isinstance(state.get(published), Tensor) and ours not in state:
        state[ours] = change(state.pop(published))
