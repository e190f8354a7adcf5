"""Fits a state dict to a model: translates names, resizes tables, lists what does not fit.

# N tokens, C channels
"""

from collections.abc import Collection, Iterable, Mapping
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polaformer.attention import AttentionLayer
from polaformer.attention.layer.parameter_names import translate_published_names
from polaformer.attention.layer.token_table import TokenTable, resize_rows
from polaformer.attention.layer.window_attention import RelativePositions
from polaformer.backbones.backbone import Backbone
from polaformer.ops.grid import Grid
from polaformer.weights.errors import Misfits
from polaformer.weights.files import StateDict, is_plain_tensor


class Fit(NamedTuple):
    """A state dict with the model's names and table sizes, and the tables that were resized."""

    state: StateDict
    resized: list[str]


def fit(state: Mapping[str, Any], model: nn.Module, grids: Mapping[str, Grid] | None = None) -> Fit:
    """Fits the state dict to the model as far as possible; neither the model nor the given dict is changed.

    Tables of another size are resized, as the authors do for fine-tuning at 384. Buffers that follow from sizes are dropped.
    grids: the (height, width) of tables in the state dict by module name; all other tables are treated as squares.
    """
    found = translated(state, model)
    return Fit(found, _resize_tables(found, model, grids or {}, own_names=state.keys()))


def fit_state_dict(state: StateDict, model: nn.Module) -> StateDict:
    """The state dict of `fit`, for timm, which then loads it strictly."""
    return fit(state, model).state


def misfits(state: StateDict, model: nn.Module) -> Misfits:
    """Everything that prevents the state dict from being loaded; three empty lists if nothing does."""
    wanted = model.state_dict()
    return Misfits(
        sorted(wanted.keys() - state.keys()),
        sorted(state.keys() - wanted.keys()),
        [problem for key in wanted if key in state for problem in _tensor_problems(key, state[key], wanted[key])],
    )


def table_grids(model: nn.Module) -> dict[str, Grid]:
    """The native (height, width) of every table of the model, by module name."""
    return {name: module.size for name, module in model.named_modules() if isinstance(module, TokenTable)}


def translated(state: Mapping[str, Any], model: nn.Module) -> StateDict:
    """A copy of the state dict with the model's names; tables keep their size."""
    found = dict(state)
    if isinstance(model, Backbone):
        type(model).translate(model, found, "")
    for name, module in model.named_modules():
        if isinstance(module, AttentionLayer):
            translate_published_names(module, found, f"{name}.")
    return found


def _resize_tables(state: StateDict, model: nn.Module, grids: Mapping[str, Grid], *, own_names: Collection[str]) -> list[str]:
    """Resizes the tables in `state` whose size is not the model's, in place; returns one line per resized table.

    A table under a published name is treated as a square if possible. One under our own name (`own_names`) with as many rows
    as the model's is treated as having the same grid.
    """
    resized = []
    for name, module in model.named_modules():
        if isinstance(module, TokenTable):
            key, prefix, new, mode, wanted = f"{name}.rows", module.num_prefix_tokens, module.size, module.mode, module.rows
        elif isinstance(module, RelativePositions):
            side = isqrt(len(module.table))
            key, prefix, new, mode, wanted = f"{name}.table", 0, (side, side), "bicubic", module.table
        else:
            continue
        rows = state.get(key)
        if not isinstance(rows, Tensor) or not is_plain_tensor(rows) or rows.ndim != 2 or rows.shape[1] != wanted.shape[1]:
            continue
        same_length = len(rows) == len(wanted)
        old = grids.get(name) or (new if same_length and key in own_names else _square_grid(len(rows) - prefix))
        old = new if old is None and same_length else old
        if old is not None and old != new and len(rows) == prefix + old[0] * old[1]:
            state[key] = torch.cat([rows[:prefix], resize_rows(rows[prefix:], old, new, mode)])
            resized.append(f"{key}: {old[0]}×{old[1]} → {new[0]}×{new[1]}")
    return resized


def _square_grid(num_rows: int) -> Grid | None:
    """The square grid with this number of cells, or None; files by others do not state the grids of tables."""
    side = isqrt(max(num_rows, 0))
    return (side, side) if side > 0 and side * side == num_rows else None


def _tensor_problems(key: str, given: Any, wanted: Tensor) -> Iterable[str]:
    if not isinstance(given, Tensor):
        yield f"{key} is a {type(given).__name__}, not a tensor"
    elif given.shape != wanted.shape:
        yield f"{key} has shape {tuple(given.shape)} in the file but {tuple(wanted.shape)} in the model"
    elif given.is_floating_point() != wanted.is_floating_point():
        yield f"{key} has dtype {given.dtype} in the file but {wanted.dtype} in the model"
