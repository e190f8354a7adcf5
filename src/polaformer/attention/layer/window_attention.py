"""Swin's softmax attention in shifted windows with relative positions, at any image size.

# B batch, N = H·W tokens, C channels, w side of a window, L = w·w tokens per window, n windows per image
"""

from collections.abc import Sequence
from math import isqrt

import torch
from torch import Tensor, nn

from polaformer.arguments import check_integer
from polaformer.attention.core import Bias, Core, Mask, Size
from polaformer.attention.layer.attention_layer import AttentionLayer, Tokens
from polaformer.attention.layer.checks import check_core, check_sizes, check_width
from polaformer.attention.mechanisms.softmax import SoftmaxCore
from polaformer.ops.grid import Grid, Sizes
from polaformer.ops.windows import merge, pad_to_windows, partition, relative_index, shift_bias

Groups = list[tuple[Grid, list[int] | None]]  # shifts, and the samples that have them; None: all


class RelativePositions(nn.Module):
    """A learnable bias of the scores per head and per offset between two tokens of a window."""

    index: Tensor

    def __init__(self, window: int, num_heads: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty((2 * window - 1) ** 2, num_heads))
        nn.init.trunc_normal_(self.table, std=0.02)
        self.register_buffer("index", relative_index(window), persistent=False)
        self.register_load_state_dict_post_hook(_rebuild_index)

    def forward(self) -> Tensor:
        """(heads, L, L)."""
        return self.table[self.index].permute(2, 0, 1)


def _rebuild_index(module: RelativePositions, _: object) -> None:
    """Runs after parameters were loaded: `to_empty` leaves buffers uninitialised."""
    side = isqrt(len(module.index))
    module.index = relative_index(side).to(module.index.device)


class WindowAttention(AttentionLayer):
    """Attention within windows of w×w tokens; called as `layer(x, grid=(H, W), mask=None)`.

    shift: windows are shifted this far to the right and down, cyclically; tokens that are neighbours only by the cyclic shift
        do not attend to each other. An axis that fits into one window is not shifted.
    A grid that windows do not fill is padded on the right and below; padding and masked tokens are not keys.
    core: softmax attention by default, with the given scale and dropout; another core must support a bias.
    gate: "linear" or None; gate_init as in AttentionLayer.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window: int,
        *,
        core: Core | None = None,
        shift: int = 0,
        gate: str | None = None,
        gate_init: str = "default",
        scale: float | None = None,
        dropout: float = 0.0,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
    ) -> None:
        check_width(dim, num_heads)
        if core is None:
            core = SoftmaxCore(num_heads, dim // num_heads, scale=scale, dropout=dropout)
        elif scale is not None or dropout:
            raise TypeError("WindowAttention: scale and dropout are for softmax without a core; give them to the core")
        check_core(core, dim, num_heads)
        if not core.facts.takes_bias:
            raise ValueError(
                f"WindowAttention: {type(core).__name__} supports no bias, which relative positions need; use softmax"
            )
        super().__init__(dim, num_heads, core, gate=gate, gate_init=gate_init, qkv_bias=qkv_bias, proj_drop=proj_drop)
        self.window = check_integer("WindowAttention", "window", window)
        self.shift = check_integer("WindowAttention", "shift", shift, least=0)
        if shift >= window:
            raise ValueError(f"WindowAttention: shift is {shift} but windows are {window} wide; give a smaller shift")
        self.relative_positions = RelativePositions(window, num_heads)

    def forward(
        self, x: Tensor, grid: Size = None, mask: Mask = None, context: Tokens = None, *, sizes: Sizes = None, bias: Bias = None
    ) -> Tensor:
        """x (B, N, C) to (B, N, C). A context or a bias is refused.

        sizes: in a batch of images of different sizes, each is shifted as it would be alone.
        """
        grid = self._check_window_call(x, grid, mask, context, bias, sizes)
        groups = self._groups_by_shift([grid] if sizes is None else sizes)
        return _in_sample_order(groups, [self._attend(*_select(group, x, mask), grid, shift) for shift, group in groups])

    def maps(
        self, x: Tensor, grid: Size = None, mask: Mask = None, context: Tokens = None, *, sizes: Sizes = None, bias: Bias = None
    ) -> dict[str, Tensor]:
        """The maps of every window of the padded and shifted grid, by name, each (B·n, heads, L, L)."""
        grid = self._check_window_call(x, grid, mask, context, bias, sizes)
        groups = self._groups_by_shift([grid] if sizes is None else sizes)
        maps = [self._window_maps(*_select(group, x, mask), grid, shift) for shift, group in groups]
        return {name: _in_sample_order(groups, [one[name] for one in maps]).flatten(0, 1) for name in maps[0]}

    def _groups_by_shift(self, sizes: Sequence[Grid]) -> Groups:
        """The samples with the same shift; one size stands for all samples."""
        shifts = [self._shift(size) for size in sizes]
        if len(set(shifts)) <= 1:
            return [(shifts[0] if shifts else (0, 0), None)]
        return [(shift, [i for i, one in enumerate(shifts) if one == shift]) for shift in sorted(set(shifts))]

    def _attend(self, x: Tensor, mask: Tensor | None, grid: Grid, shift: Grid) -> Tensor:
        """The output (B, N, C) for samples with the same shift."""
        windows, exists, bias = self._windows(x, mask, grid, shift)
        out = super().forward(windows, (self.window, self.window), exists, bias=bias)
        rows, columns = ((length + self.window - 1) // self.window for length in grid)
        image = merge(out, self.window, (rows * self.window, columns * self.window))  # (B, H', W', C)
        if any(shift):
            image = image.roll(shift, dims=(1, 2))
        return image[:, : grid[0], : grid[1]].flatten(1, 2)

    def _window_maps(self, x: Tensor, mask: Tensor | None, grid: Grid, shift: Grid) -> dict[str, Tensor]:
        """The maps, each (B, n, heads, L, L), for samples with the same shift."""
        windows, exists, bias = self._windows(x, mask, grid, shift)
        maps = super().maps(windows, (self.window, self.window), exists, bias=bias)
        return {name: one.unflatten(0, (x.shape[0], -1)) for name, one in maps.items()}

    def _windows(self, x: Tensor, mask: Tensor | None, grid: Grid, shift: Grid) -> tuple[Tensor, Tensor | None, Tensor]:
        """Windows (B·n, L, C), which of their tokens exist (B·n, L), None if all, and the bias, (B·n or 1, heads, L, L)."""
        window = self.window
        image = pad_to_windows(x.unflatten(1, grid), window)
        exists = None
        if mask is not None or image.shape[1:3] != grid:
            mask = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
            exists = pad_to_windows(mask.unflatten(1, grid)[..., None], window)
        bias = self.relative_positions()[None]
        if any(shift):
            back = (-shift[0], -shift[1])
            image = image.roll(back, dims=(1, 2))
            exists = None if exists is None else exists.roll(back, dims=(1, 2))
            separation = shift_bias((image.shape[1], image.shape[2]), window, shift, x.device).to(bias.dtype)
            bias = (bias + separation[:, None]).repeat(x.shape[0], 1, 1, 1)
        return partition(image, window), None if exists is None else partition(exists, window)[..., 0], bias

    def _shift(self, size: Grid) -> Grid:
        return (self.shift if size[0] > self.window else 0), (self.shift if size[1] > self.window else 0)

    def _check_window_call(self, x: Tensor, grid: Size, mask: Mask, context: Tokens, bias: Bias, sizes: Sizes) -> Grid:
        if context is not None or bias is not None:
            raise ValueError("WindowAttention: a context or a bias is not supported in windows; use AttentionLayer")
        if grid is None:
            raise ValueError("WindowAttention: windows need a grid; give grid=(height, width)")
        if sizes is not None:
            check_sizes("WindowAttention", sizes, x.shape[0], grid, same_length=True)
        return self._check_call(x, x, grid, mask)


def _select(group: list[int] | None, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The tokens and the mask of a group of samples."""
    return (x, mask) if group is None else (x[group], None if mask is None else mask[group])


def _in_sample_order(groups: Groups, results: list[Tensor]) -> Tensor:
    """The results of all groups as one batch."""
    if len(results) == 1:
        return results[0]
    order = torch.tensor([i for _, group in groups for i in group or ()], device=results[0].device)
    return torch.cat(results)[order.argsort()]
