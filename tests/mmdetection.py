"""Small models with the names and the arithmetic of mmdetection's PVT, PVTv2 and Swin, and checkpoints as mmengine writes them.

mmdetection itself cannot be installed beside a recent PyTorch. Its parts that matter here are few: nn.MultiheadAttention with
packed projections, MLPs of 1×1 convolutions, positions as the first block, nn.Unfold in patch merging.

# B batch, N tokens, C channels, H height, W width, L tokens of a window
"""

import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Size = tuple[int, int]


def as_image(x: Tensor, size: Size) -> Tensor:
    return x.transpose(1, 2).unflatten(2, size)


def as_tokens(image: Tensor) -> Tensor:
    return image.flatten(2).transpose(1, 2)


class Patches(nn.Module):
    def __init__(self, in_chans: int, dim: int, kernel: int, stride: int, eps: float) -> None:
        super().__init__()
        self.projection = nn.Conv2d(in_chans, dim, kernel, stride, padding=kernel // 2 if kernel > stride else 0)
        self.norm = nn.LayerNorm(dim, eps=eps)

    def forward(self, image: Tensor) -> tuple[Tensor, Size]:
        x = self.projection(image)
        return self.norm(as_tokens(x)), tuple(x.shape[2:])


class Positions(nn.Module):
    def __init__(self, side: int, dim: int) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(1, side * side, dim))
        self.side = side

    def forward(self, x: Tensor, size: Size) -> Tensor:
        table = as_image(self.pos_embed, (self.side, self.side))
        return x + as_tokens(F.interpolate(table, size=size, mode="bilinear"))


class ReducedAttention(nn.Module):
    def __init__(self, dim: int, heads: int, ratio: int, eps: float) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads)
        self.ratio = ratio
        if ratio > 1:
            self.sr = nn.Conv2d(dim, dim, ratio, ratio)
            self.norm = nn.LayerNorm(dim, eps=eps)

    def forward(self, x: Tensor, size: Size) -> Tensor:
        keys = self.norm(as_tokens(self.sr(as_image(x, size)))) if self.ratio > 1 else x
        return self.attn(*(one.transpose(0, 1) for one in (x, keys, keys)))[0].transpose(0, 1)


class ConvolutionalFeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int, depthwise: bool) -> None:
        super().__init__()
        between = [nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)] if depthwise else []
        rest = [nn.GELU(), nn.Dropout(0.0), nn.Conv2d(hidden, dim, 1), nn.Dropout(0.0)]
        self.layers = nn.Sequential(nn.Conv2d(dim, hidden, 1), *between, *rest)

    def forward(self, x: Tensor, size: Size) -> Tensor:
        return as_tokens(self.layers(as_image(x, size)))


class PVTLayer(nn.Module):
    def __init__(self, dim: int, heads: int, ratio: int, hidden: int, depthwise: bool, eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = ReducedAttention(dim, heads, ratio, eps)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.ffn = ConvolutionalFeedForward(dim, hidden, depthwise)

    def forward(self, x: Tensor, size: Size) -> Tensor:
        x = x + self.attn(self.norm1(x), size)
        return x + self.ffn(self.norm2(x), size)


class PVT(nn.Module):
    """mmdet's PyramidVisionTransformer, or with `v2` its PyramidVisionTransformerV2; one ε for all norms."""

    def __init__(self, options: dict[str, Any], img_size: int = 64, *, v2: bool = False, eps: float = 1e-6) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        dims, in_chans, side = options["dims"], 3, img_size
        for i, (dim, depth, heads) in enumerate(zip(dims, options["depths"], options["num_heads"], strict=True)):
            stride = 4 if i == 0 else 2
            side //= stride
            kernel = 2 * stride - 1 if v2 else stride
            blocks = [] if v2 else [Positions(side, dim)]
            blocks += [PVTLayer(dim, heads, 8 >> i, options["mlp_ratios"] * dim, v2, eps) for _ in range(depth)]
            norm = nn.LayerNorm(dim, eps=eps) if v2 else nn.Identity()
            self.layers.append(nn.ModuleList([Patches(in_chans, dim, kernel, stride, eps), nn.ModuleList(blocks), norm]))
            in_chans = dim

    def forward(self, image: Tensor) -> list[Tensor]:
        features = []
        for patches, blocks, norm in self.layers:
            x, size = patches(image)
            for block in blocks:
                x = block(x, size)
            image = as_image(norm(x), size)
            features.append(image)
        return features


class WindowAttention(nn.Module):
    def __init__(self, dim: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads = heads
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        rows, columns = torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
        places = ((2 * window - 1) * rows + columns).flatten()
        self.register_buffer("relative_position_index", places[:, None] - places[None, :] + 2 * window * (window - 1))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, separation: Tensor | None) -> Tensor:
        """x (B, n, L, C), separation (n, L, L)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)
        bias = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)
        bias = bias if separation is None else bias + separation[:, None]
        scores = q @ k.mT / q.shape[-1] ** 0.5 + bias
        return self.proj((scores.softmax(dim=-1) @ v).transpose(2, 3).flatten(3))


class ShiftedWindows(nn.Module):
    def __init__(self, dim: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.w_msa, self.window, self.shift = WindowAttention(dim, heads, window), window, shift

    def forward(self, x: Tensor, size: Size) -> Tensor:
        """For a size that windows divide."""
        image = x.unflatten(1, size).roll((-self.shift, -self.shift), (1, 2))
        separation = None
        if self.shift:
            parts = [torch.tensor([0] * (n - self.window) + [1] * (self.window - self.shift) + [2] * self.shift) for n in size]
            regions = self._windows((3 * parts[0][:, None] + parts[1])[None, ..., None])[0, ..., 0]  # (n, L)
            separation = torch.where(regions[:, None] == regions[:, :, None], 0.0, -100.0)
        windows = self.w_msa(self._windows(image), separation)
        rows, columns = (n // self.window for n in size)
        image = (
            windows.unflatten(2, (self.window, -1)).unflatten(1, (rows, columns)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        )
        return image.roll((self.shift, self.shift), (1, 2)).flatten(1, 2)

    def _windows(self, image: Tensor) -> Tensor:
        """(B, H, W, C) to (B, n, L, C)."""
        cut = image.unflatten(2, (-1, self.window)).unflatten(1, (-1, self.window))
        return cut.transpose(2, 3).flatten(3, 4).flatten(1, 2)


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        first = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(0.0))
        self.layers = nn.Sequential(first, nn.Linear(hidden, dim), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class SwinBlock(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int, window: int, shift: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.ffn = ShiftedWindows(dim, heads, window, shift), FeedForward(dim, hidden)

    def forward(self, x: Tensor, size: Size) -> Tensor:
        x = x + self.attn(self.norm1(x), size)
        return x + self.ffn(self.norm2(x))


class Merging(nn.Module):
    """Patch merging by nn.Unfold, which puts the four tokens of a channel side by side."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.sampler = nn.Unfold(2, stride=2)
        self.norm, self.reduction = nn.LayerNorm(4 * dim), nn.Linear(4 * dim, out, bias=False)

    def forward(self, x: Tensor, size: Size) -> Tensor:
        return self.reduction(self.norm(self.sampler(as_image(x, size)).mT))


class SwinStage(nn.Module):
    def __init__(self, blocks: list[SwinBlock], downsample: Merging | None) -> None:
        super().__init__()
        self.blocks, self.downsample = nn.ModuleList(blocks), downsample


class Swin(nn.Module):
    """mmdet's SwinTransformer."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        dims, window, heads = options["dims"], options["windows"], options["num_heads"]
        self.patch_embed = Patches(3, dims[0], 4, 4, 1e-5)
        self.stages = nn.ModuleList()
        for i, (dim, depth) in enumerate(zip(dims, options["depths"], strict=True)):
            shifts = [window // 2 if j % 2 else 0 for j in range(depth)]
            blocks = [SwinBlock(dim, heads, options["mlp_ratios"] * dim, window, shift) for shift in shifts]
            self.stages.append(SwinStage(blocks, Merging(dim, dims[i + 1]) if i + 1 < len(dims) else None))
            setattr(self, f"norm{i}", nn.LayerNorm(dim))

    def forward(self, image: Tensor) -> list[Tensor]:
        x, size = self.patch_embed(image)
        features = []
        for i, stage in enumerate(self.stages):
            for block in stage.blocks:
                x = block(x, size)
            features.append(as_image(getattr(self, f"norm{i}")(x), size))
            if stage.downsample is not None:
                x, size = stage.downsample(x, size), (size[0] // 2, size[1] // 2)
        return features


def detector_state(backbone: nn.Module) -> dict[str, Tensor]:
    """The state dict of a detector around the backbone."""
    heads = {"neck.lateral_convs.0.conv.weight": torch.ones(2, 2, 1, 1), "bbox_head.retina_cls.bias": torch.ones(9)}
    return {f"backbone.{key}": value for key, value in backbone.state_dict().items()} | heads


def history_class(module: str, name: str) -> Any:
    """A class that is pickled as mmengine's HistoryBuffer: with its statistics, which are methods, and two arrays."""

    def __init__(self: Any, length: int) -> None:
        self.max_length = 1000000
        self._log_history, self._count_history = np.linspace(0, 1, length), np.ones(length, dtype=np.int64)

    def mean(self: Any) -> None: ...

    def __getstate__(self: Any) -> dict[str, Any]:
        return self.__dict__ | {"statistics_methods": {"mean": found.mean}}

    mean.__module__, mean.__qualname__ = module, f"{name}.mean"
    found: Any = type(name, (), {"__init__": __init__, "mean": mean, "__getstate__": __getstate__, "__module__": module})
    return found


def write_checkpoint(path: Path, state: dict[str, Tensor], *, name: str = "HistoryBuffer", **options: Any) -> None:
    """As mmengine's runner writes it; afterwards mmengine cannot be imported, as where it is not installed."""
    module = types.ModuleType("mmengine.logging.history_buffer")
    history = history_class(module.__name__, name)
    setattr(module, name, history)
    scalars = OrderedDict((one, history(length)) for one, length in (("train/loss", 5), ("train/lr", 0), ("time", 5)))
    info = OrderedDict(epoch=12, cfg="model = dict(…)", best=np.float64(0.4), last_ckpt=None, seeds=np.arange(3))
    whole = {
        "meta": {"epoch": 12, "dataset_meta": {"classes": ("cat", "dog"), "palette": [(1, 2, 3)]}, "seed": None},
        "state_dict": OrderedDict(state),
        "message_hub": {"log_scalars": scalars, "runtime_info": info, "resumed_keys": OrderedDict({"train/loss": True})},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1e-4, "params": [0]}]},
        "param_schedulers": [{"end": 500, "verbose": False}],
    }
    with pytest.MonkeyPatch.context() as patch:
        for full_name in ("mmengine", "mmengine.logging"):
            patch.setitem(sys.modules, full_name, types.ModuleType(full_name))
        patch.setitem(sys.modules, module.__name__, module)
        torch.save(whole, path, **options)
