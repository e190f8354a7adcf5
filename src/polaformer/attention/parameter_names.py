"""Published parameter names and ours.

| published                                             | here                                    |
|-------------------------------------------------------|-----------------------------------------|
| qkvg (the authors' Swin), rows q, k, v, gate          | qkv and gate                            |
| qg and kv (the authors' PVT), rows q, gate and k, v   | qkv and gate                            |
| q and kv (softmax in PVT and PVTv2)                   | qkv                                     |
| power (1, H, 1, D), scale (1, 1, C)                   | core.power, core.scale, both (H, D)     |
| positional_encoding (1, n, C)                         | key_positions.rows (n, C)               |
| dwc                                                   | conv                                    |
| sr, norm                                              | key_reduction.conv, key_reduction.norm  |
| relative_position_bias_table                          | relative_positions.table                |
| relative_position_index                               | not stored: it follows from the window  |
"""

from typing import Any

import torch
from torch import Tensor, nn

StateDict = dict[str, Any]


def translate_published_names(layer: nn.Module, state: StateDict, prefix: str, *_: Any) -> None:
    """A hook before `load_state_dict`: renames, in place, what belongs to the layer at `prefix`; leaves the rest alone."""
    for kind in ("weight", "bias"):
        _fuse_projections(state, prefix, kind)
    _rename(state, f"{prefix}positional_encoding", f"{prefix}key_positions.rows", lambda table: table[0])
    _rename(state, f"{prefix}relative_position_bias_table", f"{prefix}relative_positions.table")
    state.pop(f"{prefix}relative_position_index", None)
    for published, ours in (("dwc", "conv"), ("sr", "key_reduction.conv"), ("norm", "key_reduction.norm")):
        for kind in ("weight", "bias"):
            _rename(state, f"{prefix}{published}.{kind}", f"{prefix}{ours}.{kind}")
    core_power = getattr(getattr(layer, "core", None), "power", None)
    if core_power is not None:
        for name in ("power", "scale"):
            _rename(state, f"{prefix}{name}", f"{prefix}core.{name}", lambda x: _as_heads(x, core_power.shape))


def _fuse_projections(state: StateDict, prefix: str, kind: str) -> None:
    """qkvg, or qg and kv, or q and kv, as qkv and gate; kind is "weight" or "bias"."""
    fused, query_gate, query, key_value = (f"{prefix}{name}.{kind}" for name in ("qkvg", "qg", "q", "kv"))
    ours, gate = f"{prefix}qkv.{kind}", f"{prefix}gate.{kind}"
    if fused in state:
        rows = state.pop(fused)
        width = len(rows) // 4
        state[ours], state[gate] = rows[: 3 * width], rows[3 * width :]
    elif query_gate in state and key_value in state:
        q, state[gate] = state.pop(query_gate).chunk(2)
        state[ours] = torch.cat([q, state.pop(key_value)])
    elif query in state and key_value in state:
        state[ours] = torch.cat([state.pop(query), state.pop(key_value)])


def _as_heads(x: Tensor, shape: torch.Size) -> Tensor:
    """x as (H, D); unchanged where it does not fit, so that load_state_dict reports both shapes."""
    return x.reshape(shape) if x.numel() == shape.numel() else x


def _rename(state: StateDict, published: str, ours: str, change: Any = lambda tensor: tensor) -> None:
    if isinstance(state.get(published), Tensor):
        state[ours] = change(state.pop(published))
