"""Published names: our models' parameters as the authors' code names them, and the rule that fills golden files."""

import re
import zlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from polaformer.attention import AttentionLayer
from polaformer.backbones import PVT, PVTv2, Swin


def draw(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers as the golden files draw them, float64."""
    return torch.from_numpy(np.random.RandomState(seed).standard_normal(shape))


def rule(name: str, shape: tuple[int, ...]) -> Tensor:
    """The golden files' parameter of a published name, float32."""
    values, last = draw(zlib.crc32(name.encode()), shape), name.rpartition(".")[2]
    if last == "weight":
        values = values * np.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 1 + 0.1 * values
    else:
        values = values * {"power": 1.0, "scale": 0.5}.get(last, 0.1)
    return values.float()


def published_groups(model: nn.Module, of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
    """`of` each parameter (itself, or its gradient) under the published names, fused and shaped as they are published."""
    layers = {f"{name}.": layer for name, layer in model.named_modules() if isinstance(layer, AttentionLayer)}
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        value = of(parameter)
        if value is None:
            continue
        prefix = next((prefix for prefix in layers if name.startswith(prefix)), "")
        for inner, part in _in_layer(name[len(prefix) :], value, layers.get(prefix), isinstance(model, Swin)):
            key = _published_name(model, prefix, inner)
            found[key] = torch.cat([found[key], part]) if key in found else part
    return found


def _in_layer(name: str, value: Tensor, layer: AttentionLayer | None, is_swin: bool) -> list[tuple[str, Tensor]]:
    if layer is None:
        return [(name, value[None] if name.endswith("pos_embed.rows") else value)]
    kind = name.rpartition(".")[2]
    gated = layer.gate is not None
    if name.startswith(("qkv.", "gate.")) and is_swin:
        return [(f"qkvg.{kind}" if gated else f"qkv.{kind}", value)]
    if name.startswith("qkv."):
        return [(f"qg.{kind}" if gated else f"q.{kind}", value[: layer.dim]), (f"kv.{kind}", value[layer.dim :])]
    if name.startswith("gate."):
        return [(f"qg.{kind}", value)]
    renamed = {
        "core.power": "power",
        "core.scale": "scale",
        "key_positions.rows": "positional_encoding",
        "relative_positions.table": "relative_position_bias_table",
    }
    shapes = {"core.power": (1, layer.num_heads, 1, -1), "core.scale": (1, 1, -1), "key_positions.rows": (1, *value.shape)}
    short = re.sub(r"^key_reduction\.norm", "norm", re.sub(r"^key_reduction\.conv", "sr", re.sub(r"^conv\.", "dwc.", name)))
    return [(renamed.get(name, short), value.reshape(shapes.get(name, value.shape)))]


def _published_name(model: nn.Module, prefix: str, inner: str) -> str:
    name = prefix + inner
    if isinstance(model, PVT | PVTv2):
        name = name.replace("pos_embed.rows", "pos_embed").replace("mlp.dwconv.", "mlp.dwconv.dwconv.")
        number = re.match(r"stages\.(\d+)\.(\w+)", name)
        if number:
            part = "block" if number[2] == "blocks" else number[2]
            name = f"{part}{int(number[1]) + 1}{name[number.end() :]}"
    elif isinstance(model, Swin):
        name = re.sub(r"^stages\.0\.patch_embed", "patch_embed", name)
        name = re.sub(r"^stages\.(\d+)\.patch_embed", lambda m: f"layers.{int(m[1]) - 1}.downsample", name)
        name = re.sub(r"^stages\.", "layers.", name)
    return name


def published_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters under the published names, filled by the rule of the golden files."""
    return {name: rule(name, tuple(value.shape)) for name, value in published_groups(model, lambda p: p.detach()).items()}
