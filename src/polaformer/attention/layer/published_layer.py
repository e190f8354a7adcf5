"""Our models computed step by step as the authors' code computes them, with the same parameters.

Softmax in windows: scores, bias, softmax and matmul, one after the other. Polarity attention: separate projections, add the key
table, divide q and k, split heads by a copy, four powers, concatenations, four matmuls and two divisions, concatenation, merge
heads by a copy, the convolution on a permuted copy, sum, gate, projection.

# B batch, N tokens of x, n tokens that keys come from, C = num_heads · D channels, P prefix tokens
"""

import copy
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.attention.core import Bias, Mask, Size, masked_softmax
from polaformer.attention.layer.attention_layer import PolaAttention
from polaformer.attention.layer.gate import LinearGate
from polaformer.attention.layer.window_attention import WindowAttention
from polaformer.attention.mechanisms.softmax import SoftmaxCore
from polaformer.ops.grid import Grid
from polaformer.ops.polarity import reference


def as_published(model: nn.Module) -> nn.Module:
    """A copy of the model, with the same parameter names and values, in which every attention computes as published.

    Raises ValueError for a layer that the authors' code does not have (another polarity, gate, convolution or core in windows).
    """
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, PolaAttention):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, PublishedLayer(layer))
        elif isinstance(layer, WindowAttention):
            core = cast(SoftmaxCore, layer.core)
            if not core.facts.in_windows:
                raise ValueError(f"as_published: windows of {type(core).__name__} are not published; use softmax in windows")
            layer.core = PublishedSoftmax(core.num_heads, core.head_dim, scale=core.scale)
    return model


class PublishedSoftmax(SoftmaxCore):
    """Softmax attention by its explicit map, as in the authors' windows."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = None, bias: Bias = None, grid: Size = None, cross: bool = False
    ) -> Tensor:
        """Returns (B, H, N, D) in v's dtype."""
        scores = q @ k.mT * self.scale
        if bias is not None:
            scores = scores + bias.to(q.dtype)
        return masked_softmax(scores, None if mask is None else mask[:, None, None, :]) @ v


class PublishedLayer(nn.Module):
    """The parts of a PolaAttention, combined by the authors' steps; takes whole images only."""

    def __init__(self, layer: PolaAttention) -> None:
        super().__init__()
        known = {
            f"polarity {layer.core.polarity!r}": layer.core.polarity == "both",
            f"a gate of kind {type(layer.gate).__name__}": layer.gate is None or isinstance(layer.gate, LinearGate),
            f"a convolution of kind {type(layer.conv).__name__}": layer.conv is None or isinstance(layer.conv, nn.Conv2d),
        }
        for what in (what for what, is_known in known.items() if not is_known):
            raise ValueError(f"as_published: a layer has {what}, which the authors' code does not have; use the defaults")
        self.num_heads, self.num_prefix_tokens, self.dim = layer.num_heads, layer.num_prefix_tokens, layer.dim
        self.core, self.qkv, self.proj, self.proj_drop = layer.core, layer.qkv, layer.proj, layer.proj_drop
        self.conv, self.key_reduction = layer.conv, layer.key_reduction
        self.key_positions, self.gate = layer.key_positions, layer.gate

    def forward(self, x: Tensor, grid: Grid, mask: Tensor | None = None, *, sizes: object = None) -> Tensor:
        """x (B, N, C) to (B, N, C)."""
        if mask is not None or sizes is not None:
            raise ValueError("PublishedLayer: the authors' layer takes no mask; give images of one size")
        q, k, v, gate = self._projected(x, grid)
        if self.key_positions is not None:
            k = k + self.key_positions(grid if self.key_reduction is None else self.key_reduction.reduced_grid(grid))
        if self.core.scale is not None:
            scale = F.softplus(self.core.scale).flatten()  # (C,)
            q, k = q / scale, k / scale
        power = 1 + self.core.alpha * torch.sigmoid(self.core.power)
        # (B, heads, N, D), copied
        q, k, v = (one.unflatten(2, (self.num_heads, -1)).transpose(1, 2).contiguous() for one in (q, k, v))
        out = reference.published_polarity_attention(q, k, v, power, eps=self.core.eps)
        out = out.transpose(1, 2).reshape(x.shape)
        if self.conv is not None:
            out = out + self._convolved(v, grid)
        return self.proj_drop(self.proj(out if gate is None else out * gate))

    def _projected(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q (B, N, C), k and v (B, n, C), gate (B, N, C)."""
        gate = None if self.gate is None else self.gate(x, grid)
        if self.key_reduction is None:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            return q, k, v, gate
        weight, bias, dim = self.qkv.weight, self.qkv.bias, self.dim
        prefix, cells = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        source = self.key_reduction(cells, grid, None)[0]
        source = torch.cat([prefix, source], dim=1) if self.num_prefix_tokens else source
        q = F.linear(x, weight[:dim], None if bias is None else bias[:dim])
        k, v = F.linear(source, weight[dim:], None if bias is None else bias[dim:]).chunk(2, dim=-1)
        return q, k, v, gate

    def _convolved(self, v: Tensor, grid: Grid) -> Tensor:
        """v (B, heads, n, D) to the convolution branch (B, N, C), zero for prefix tokens."""
        assert self.conv is not None
        batch, height, width = v.shape[0], *grid
        cells = v[:, :, self.num_prefix_tokens :]
        if self.key_reduction is not None:
            cells = F.interpolate(cells.flatten(0, 1).mT, size=height * width, mode="linear").mT
        images = cells.reshape(batch * self.num_heads, height, width, -1).permute(0, 3, 1, 2)  # (B·heads, D, H, W)
        out = self.conv(images).reshape(batch, self.dim, height * width).permute(0, 2, 1)
        return F.pad(out, (0, 0, self.num_prefix_tokens, 0)) if self.num_prefix_tokens else out
