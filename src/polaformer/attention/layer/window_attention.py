"""Swin's softmax attention in shifted windows with relative positions, at any image size.

# B batch, N = H·W tokens, C channels, w side of a window, L = w·w tokens per window, n windows per image
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import isqrt

import torch
from torch import Tensor, nn

from polaformer.arguments import check_integer
from polaformer.attention.core import Bias, Mask, Size
from polaformer.attention.layer.attention_layer import AttentionLayer, Tokens
from polaformer.attention.layer.checks import check_sizes, check_width
from polaformer.attention.mechanisms.softmax import SoftmaxCore
from polaformer.ops.grid import Grid, Sizes
from polaformer.ops.windows import merge, pad_to_windows, partition, relative_index, shift_bias


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
    """Softmax attention within windows of w×w tokens; called as `layer(x, grid=(H, W), mask=None)`.

    shift: windows are shifted this far to the right and down, cyclically; tokens that are neighbours only by the cyclic shift
        do not attend to each other. An axis that fits into one window is not shifted.
    A grid that windows do not fill is padded on the right and below; padding and masked tokens are not keys.
    gate: "linear" or None; gate_init as in AttentionLayer. scale, dropout: of the softmax core.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window: int,
        *,
        shift: int = 0,
        gate: str | None = None,
        gate_init: str = "default",
        scale: float | None = None,
        dropout: float = 0.0,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
    ) -> None:
        check_width(dim, num_heads)
        core = SoftmaxCore(num_heads, dim // num_heads, scale=scale, dropout=dropout)
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
        return self._apply_per_shift(partial(self._attend, grid=grid), x, mask, [grid] if sizes is None else sizes)

    def maps(
        self, x: Tensor, grid: Size = None, mask: Mask = None, context: Tokens = None, *, sizes: Sizes = None, bias: Bias = None
    ) -> dict[str, Tensor]:
        """The map of every window of the padded and shifted grid, {"softmax": (B·n, heads, L, L)}."""
        grid = self._check_window_call(x, grid, mask, context, bias, sizes)
        window_maps = partial(self._window_maps, grid=grid)
        return {"softmax": self._apply_per_shift(window_maps, x, mask, [grid] if sizes is None else sizes).flatten(0, 1)}

    def _apply_per_shift(self, function: Callable[..., Tensor], x: Tensor, mask: Mask, sizes: Sequence[Grid]) -> Tensor:
        """Applies the function to x and mask of each group of samples with the same shift; returns results in sample order."""
        shifts = [self._shift(size) for size in sizes]
        if len(set(shifts)) <= 1:
            return function(x, mask, shift=shifts[0] if shifts else (0, 0))
        groups = [[i for i, one in enumerate(shifts) if one == shift] for shift in sorted(set(shifts))]
        parts = [function(x[group], None if mask is None else mask[group], shift=shifts[group[0]]) for group in groups]
        order = torch.tensor([i for group in groups for i in group], device=x.device)
        return torch.cat(parts)[order.argsort()]

    def _attend(self, x: Tensor, mask: Tensor | None, *, grid: Grid, shift: Grid) -> Tensor:
        """The output (B, N, C) for samples with the same shift."""
        windows, exists, bias = self._windows(x, mask, grid, shift)
        out = super().forward(windows, (self.window, self.window), exists, bias=bias)
        rows, columns = ((length + self.window - 1) // self.window for length in grid)
        image = merge(out, self.window, (rows * self.window, columns * self.window))  # (B, H', W', C)
        if any(shift):
            image = image.roll(shift, dims=(1, 2))
        return image[:, : grid[0], : grid[1]].flatten(1, 2)

    def _window_maps(self, x: Tensor, mask: Tensor | None, *, grid: Grid, shift: Grid) -> Tensor:
        """The maps (B, n, heads, L, L) for samples with the same shift."""
        windows, exists, bias = self._windows(x, mask, grid, shift)
        maps = super().maps(windows, (self.window, self.window), exists, bias=bias)["softmax"]
        return maps.unflatten(0, (x.shape[0], -1))

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
