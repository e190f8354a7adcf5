"""Checks of the layer, before any work: settings must fit each other, and calls the settings."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polaformer.arguments import check_choice, check_integer, check_number
from polaformer.attention.core import Core, Facts
from polaformer.attention.layer.gate import GATE_BIAS_INITS, GATE_INITS, GATES
from polaformer.attention.layer.value_convolution import CONVOLUTIONS
from polaformer.ops.grid import Grid

WHERE = "attention layer"


def check_width(dim: int, num_heads: int) -> None:
    """Raises unless the number of heads divides dim."""
    if check_integer(WHERE, "dim", dim) % check_integer(WHERE, "num_heads", num_heads):
        raise ValueError(f"attention layer: dim {dim} is not divisible by {num_heads} heads; give a multiple of {num_heads}")


def check_core(core: Core, dim: int, num_heads: int) -> None:
    """Raises unless the core has the layer's heads."""
    if not isinstance(core, nn.Module) or not hasattr(core, "weights"):
        raise TypeError(f"attention layer: core is a {type(core).__name__}; create one by polaformer.attention.create")
    if not (hasattr(core, "facts") and isinstance(core.facts, Facts)):
        raise TypeError(
            f"attention layer: core {type(core).__name__} does not declare its facts; give its class an attribute "
            'facts = polaformer.attention.core.Facts("linear" or "quadratic", …)'
        )
    if (core.num_heads, core.head_dim) != (num_heads, dim // num_heads):
        raise ValueError(
            f"attention layer: the core has {core.num_heads} heads of width {core.head_dim}, but dim {dim} and {num_heads} "
            f"heads give width {dim // num_heads}; create it with num_heads={num_heads}, head_dim={dim // num_heads}"
        )


def check_kernel(kernel_size: Any) -> Grid:
    """The kernel as (height, width); raises unless both are odd."""
    pair = (kernel_size, kernel_size) if not isinstance(kernel_size, tuple | list) else tuple(kernel_size)
    odd = [isinstance(size, int) and size > 0 and size % 2 == 1 for size in pair]
    if odd != [True, True]:
        raise ValueError(f"attention layer: kernel_size is {kernel_size!r}; give an odd number, or two: (height, width)")
    return pair[0], pair[1]


def check_key_positions(key_positions: Any) -> int | Grid | None:
    """A number of tokens, a (height, width), or None; raises for anything else."""
    if key_positions is None:
        return None
    if not isinstance(key_positions, tuple | list):
        return check_integer(WHERE, "key_positions", key_positions)
    if len(key_positions) != 2:
        raise ValueError(
            f"attention layer: key_positions is {key_positions}; give (height, width), or the number of tokens of a sequence"
        )
    height, width = (check_integer(WHERE, "key_positions' height or width", size) for size in key_positions)
    return height, width


def check_options(
    conv: str | None,
    kernel: Grid,
    gate: str | None,
    gate_init: str,
    key_positions: int | Grid | None,
    reduction: int,
    num_prefix_tokens: int,
    proj_drop: float,
) -> None:
    """Raises for settings that are unknown or do not fit each other."""
    check_choice(WHERE, "conv", conv, CONVOLUTIONS)
    if conv == "sequence" and kernel[0] != kernel[1] and kernel[0] != 1:
        raise ValueError(f"attention layer: kernel_size is {kernel}, but conv 'sequence' has one dimension; give an odd number")
    check_choice(WHERE, "gate", gate, GATES)
    check_choice(WHERE, "gate_init", gate_init, GATE_INITS)
    check_integer(WHERE, "reduction", reduction)
    check_integer(WHERE, "num_prefix_tokens", num_prefix_tokens, least=0)
    check_number(WHERE, "proj_drop", proj_drop, below=1.0)
    if gate == "matrix" and key_positions is None:
        raise ValueError("attention layer: gate 'matrix' has one row per token; give their number as key_positions")
    if conv == "sequence" and reduction > 1:
        raise ValueError("attention layer: conv 'sequence' needs one value per token, but reduction leaves fewer; use only one")
    if isinstance(key_positions, int) and (reduction > 1 or conv == "deformable"):
        raise ValueError(
            "attention layer: key_positions is a number, for sequences, but reduction and deformable convolution need a grid; "
            "give key_positions=(height, width)"
        )


def check_gate_bias(gate: str | None, gate_bias_init: str, qkv_bias: bool) -> None:
    """Raises for an initialisation of a bias that does not exist."""
    check_choice(WHERE, "gate_bias_init", gate_bias_init, GATE_BIAS_INITS)
    if gate_bias_init != "default" and (gate != "linear" or not qkv_bias):
        raise ValueError(f"attention layer: gate_bias_init is {gate_bias_init!r}, but it needs gate 'linear' and qkv_bias")


def check_tokens(name: str, label: str, tokens: Any, dim: int, like: Tensor) -> None:
    """Raises unless `tokens` is (batch, tokens, dim), with the dtype (except in autocast) and device of `like`, a parameter."""
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{name}: {label} is a {type(tokens).__name__}; give a torch.Tensor")
    if tokens.ndim != 3 or tokens.shape[-1] != dim:
        raise ValueError(f"{name}: {label} has shape {tuple(tokens.shape)}; give (batch, tokens, {dim})")
    if not tokens.is_floating_point():
        raise TypeError(f"{name}: {label} has dtype {tokens.dtype}; give a floating-point tensor")
    if tokens.dtype != like.dtype and not torch.is_autocast_enabled(tokens.device.type):
        raise TypeError(f"{name}: {label} has dtype {tokens.dtype} but the layer {like.dtype}; convert one, or use autocast")
    if tokens.device != like.device:
        raise ValueError(f"{name}: {label} is on {tokens.device} but the layer on {like.device}; move one to the other")


def check_mask(name: str, mask: Any, source: Tensor) -> None:
    """Raises unless `mask` is a boolean (batch, tokens) for the source of keys."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name}: mask is a {type(mask).__name__}; give a boolean torch.Tensor, True where the token exists")
    if mask.dtype != torch.bool:
        raise TypeError(f"{name}: mask has dtype {mask.dtype}; give a boolean mask, True where the token exists")
    if mask.shape != source.shape[:2]:
        raise ValueError(
            f"{name}: mask has shape {tuple(mask.shape)} but keys come from {tuple(source.shape[:2])} tokens; "
            f"give mask of shape {tuple(source.shape[:2])}"
        )
    if mask.device != source.device:
        raise ValueError(f"{name}: mask is on {mask.device} but the tokens on {source.device}; move one to the other")


def check_grid(name: str, grid: Any, num_tokens: int, num_prefix: int) -> Grid:
    """The grid as (height, width); raises unless the tokens after the prefix fill it."""
    # No conversion to int here: while compiling or exporting, sizes are symbols.
    pair = isinstance(grid, tuple | list) and len(grid) == 2 and not any(isinstance(size, float) for size in grid)
    if not pair or grid[0] < 1 or grid[1] < 1:
        raise ValueError(f"{name}: grid is {grid!r}; give (height, width) of the tokens, two positive integers")
    if num_tokens != num_prefix + grid[0] * grid[1]:
        raise ValueError(
            f"{name}: x has {num_tokens} tokens but grid {tuple(grid)} with {num_prefix} prefix tokens has "
            f"{num_prefix + grid[0] * grid[1]}; give grid=(height, width) of the tokens"
        )
    return grid[0], grid[1]


def check_sizes(name: str, sizes: Sequence[Grid], batch: int, grid: Grid | None, *, same_length: bool) -> None:
    """Raises unless `sizes` has one (height, width) within the grid per sample."""
    if grid is None or not same_length:
        raise ValueError(f"{name}: sizes need a grid; give grid=(height, width), and no context of another length")
    if len(sizes) != batch:
        raise ValueError(f"{name}: sizes has {len(sizes)} entries for {batch} samples; give one (height, width) per sample")
    for size in sizes:
        if not (1 <= size[0] <= grid[0] and 1 <= size[1] <= grid[1]):
            raise ValueError(f"{name}: sizes has {tuple(size)}, outside the grid {tuple(grid)}; give (1, 1) to the grid's size")
