"""The attention maps that a model applies to images, captured in every layer during a forward pass.

# B batch, H heads, N queries, M keys, P prefix tokens, w side of a window, L = w·w tokens per window, n windows per image
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import isnan
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from polaformer.attention import AttentionLayer, WindowAttention
from polaformer.ops.entropy import positive_sequence_entropy
from polaformer.ops.grid import Grid
from polaformer.ops.windows import pad_to_windows, padding_needed, partition

T = TypeVar("T")


@dataclass(frozen=True)
class BlockMaps:
    """The maps of one attention layer by stream: "same" and "opposite" for pola, otherwise mostly the mechanism's name."""

    name: str  # of the module
    grid: Grid | None  # (height, width) of the queries after the prefix tokens
    key_grid: Grid | None  # (height, width) of the keys; None if unknown
    num_prefix_tokens: int
    maps: dict[str, Tensor]  # (B, H, N, M)
    entropy: dict[str, float]  # mean over the rows, in nats
    num_keys: int  # visible to a query: M, or the tokens of its window


@dataclass(frozen=True)
class BlockRow:
    """What a report shows of the maps of one layer: where one query of the first image attends, and the entropy of all rows."""

    name: str
    grid: Grid
    query: Grid  # (row, column) on the grid
    heatmaps: dict[str, Tensor]  # by stream, (height, width) of the keys' grid, mean over heads; empty without a grid
    entropy: dict[str, float]
    num_keys: int
    num_weights: int  # entries of all maps of the layer: the memory that they took


def attention_maps(model: nn.Module, images: Tensor) -> list[BlockMaps]:
    """The maps of every AttentionLayer for images (B, C, H, W), in execution order; the model is not changed.

    Maps of windows are assembled on the grid, with zeros between tokens of different windows. A model without any
    AttentionLayer returns an empty list. Rows that have no entropy (no key mass, or negative weights, as with polarity
    "subtract") are excluded from the mean, and a stream with only such rows is missing from `entropy`.
    """
    return visit_maps(model, images, lambda block: block)


def visit_maps(model: nn.Module, images: Tensor, visit: Callable[[BlockMaps], T], *, max_weights: int | None = None) -> list[T]:
    """The results of `visit` on the maps of each layer; only one layer's maps, of N² entries per head, are kept at a time.

    max_weights: layers whose map has more entries, B·H·N·M, are skipped.
    """
    found: list[T] = []
    names = {module: name for name, module in model.named_modules() if isinstance(module, AttentionLayer)}

    def capture(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = inspect.signature(layer.maps).bind(*args, **kwargs).arguments
        if max_weights is None or _num_weights(layer, **call) <= max_weights:
            devices = [like.device] if like.is_cuda else []
            with torch.random.fork_rng(devices):  # so that the layer itself, which runs next, draws the same numbers
                block = _block_maps(names[layer], layer, call)
            found.append(visit(block))

    like = next(model.parameters())
    with ExitStack() as undo, torch.no_grad():
        for module in model.modules():
            undo.callback(setattr, module, "training", module.training)
        for layer in names:
            undo.callback(layer.register_forward_pre_hook(capture, with_kwargs=True).remove)
        model.eval()(images.to(like.device, like.dtype))
    return found


def row_at(block: BlockMaps, position: tuple[float, float]) -> BlockRow:
    """The row of the query at a position of the first image, given as fractions in [0, 1] of its height and width."""
    height, width = block.grid or (1, 1)
    query = (min(int(position[0] * height), height - 1), min(int(position[1] * width), width - 1))
    heatmaps = {}
    if block.grid is not None and block.key_grid is not None:
        prefix = block.num_prefix_tokens
        token = prefix + query[0] * width + query[1]
        for stream, weights in block.maps.items():
            heatmaps[stream] = weights[0, :, token, prefix:].float().mean(dim=0).unflatten(0, block.key_grid).cpu()
    num_weights = sum(weights.numel() for weights in block.maps.values())
    return BlockRow(block.name, (height, width), query, heatmaps, block.entropy, block.num_keys, num_weights)


def _block_maps(name: str, layer: AttentionLayer, call: dict[str, Any]) -> BlockMaps:
    maps, grid = layer.maps(**call), call.get("grid")
    num_keys = next(iter(maps.values())).shape[-1]
    if isinstance(layer, WindowAttention):
        assert grid is not None
        maps = {stream: _assemble_windows(layer, weights, grid, call.get("sizes")) for stream, weights in maps.items()}
    entropy = {stream: _mean_entropy(weights) for stream, weights in maps.items()} if layer.core.facts.distributions else {}
    return BlockMaps(
        name=name,
        grid=grid,
        key_grid=_key_grid(layer, grid, next(iter(maps.values())).shape[-1]),
        num_prefix_tokens=layer.num_prefix_tokens,
        maps=maps,
        entropy={stream: mean for stream, mean in entropy.items() if not isnan(mean)},
        num_keys=num_keys,
    )


def _mean_entropy(weights: Tensor) -> float:
    """The mean over the rows that have an entropy; NaN if there are none."""
    return float(positive_sequence_entropy(weights, invalid="nan").float().nanmean())


def _key_grid(layer: AttentionLayer, grid: Grid | None, num_keys: int) -> Grid | None:
    if grid is None:
        return None
    found = grid if layer.key_reduction is None else layer.key_reduction.reduced_grid(grid)
    # The grid of a context of another length is unknown.
    return found if found[0] * found[1] + layer.num_prefix_tokens == num_keys else None


def _num_weights(layer: AttentionLayer, x: Tensor, context: Tensor | None = None, **_: Any) -> int:
    """The number of entries of one map, without building it; of windows on the grid, and of all channels if each has a map."""
    num_keys = (x if context is None else context).shape[1]
    ratio = 1 if layer.key_reduction is None else layer.key_reduction.ratio
    per_channel = layer.core.head_dim if layer.core.facts.num_maps is None else 1
    return per_channel * x.shape[0] * layer.num_heads * x.shape[1] * -(-num_keys // ratio**2)


def _assemble_windows(layer: WindowAttention, windows: Tensor, grid: Grid, sizes: Sequence[Grid] | None) -> Tensor:
    """Maps of windows (B·n, H, L, L) as maps of the grid (B, H, N, N)."""
    num_tokens = grid[0] * grid[1]
    rows, columns = ((length + padding_needed(length, layer.window)) // layer.window for length in grid)
    windows = windows.unflatten(0, (-1, rows * columns)).transpose(1, 2)  # (B, H, n, L, L)
    # One extra row and column, for the tokens that pad the windows.
    whole = windows.new_zeros(*windows.shape[:2], num_tokens + 1, num_tokens + 1)
    for sample, size in enumerate([grid] * len(windows) if sizes is None else sizes):
        indices = _token_indices(layer, grid, size).to(windows.device)  # (n, L)
        whole[sample][:, indices[:, :, None], indices[:, None, :]] = windows[sample]
    return whole[:, :, :num_tokens, :num_tokens]


def _token_indices(layer: WindowAttention, grid: Grid, size: Grid) -> Tensor:
    """The index on the grid of each token of each window, (n, L); −1 for padding."""
    tokens = torch.arange(1, grid[0] * grid[1] + 1).unflatten(0, grid)[None, :, :, None]
    back = [-layer.shift if length > layer.window else 0 for length in size]
    return partition(pad_to_windows(tokens, layer.window).roll(back, dims=(1, 2)), layer.window)[..., 0] - 1
