"""Translation of mmdetection's and mmsegmentation's parameter names of PVT, PVTv2 and Swin, with softmax attention, to ours.

| there                                                        | here                                                    |
|--------------------------------------------------------------|---------------------------------------------------------|
| Swin: patch_embed.projection                                 | stages.0.patch_embed.proj                               |
| Swin: stages.{i}.blocks.{j}.attn.w_msa                       | stages.{i}.blocks.{j}.attn                              |
| Swin: ffn.layers.0.0, ffn.layers.1                           | mlp.fc1, mlp.fc2                                        |
| Swin: stages.{i}.downsample, channels in nn.Unfold's order   | stages.{i+1}.patch_embed, channels in the authors' order |
| Swin: norm{i}                                                | feature_norms.{i}                                       |
| PVT: layers.{i}.0.projection, layers.{i}.0.norm              | stages.{i}.patch_embed.proj, .norm                      |
| PVT: layers.{i}.1.0.pos_embed (1, N, C)                      | stages.{i}.pos_embed.rows (N, C)                        |
| PVT: layers.{i}.1.{j+1}; PVTv2: layers.{i}.1.{j}             | stages.{i}.blocks.{j}                                   |
| PVTv2: layers.{i}.2                                          | stages.{i}.norm                                         |
| attn.attn.in_proj_weight and _bias, attn.attn.out_proj       | attn.qkv, attn.proj                                     |
| PVT: ffn.layers.0, .3; PVTv2: .0, .1, .4; 1×1 convolutions   | mlp.fc1, mlp.fc2; mlp.fc1, mlp.dwconv, mlp.fc2          |

Attention layers translate the rest themselves (sr, norm, tables).

# C channels, R and D: rows and columns of a 2×2 square
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from polaformer.weights.files import StateDict

_SWIN = (
    (r"^patch_embed\.projection\.", "stages.0.patch_embed.proj."),
    (r"^patch_embed\.", "stages.0.patch_embed."),
    (r"\.attn\.w_msa\.", ".attn."),
    (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
    (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
    (r"^norm(\d+)\.", r"feature_norms.\1."),
)
_PVT = (
    (r"^layers\.(\d+)\.0\.projection\.", r"stages.\1.patch_embed.proj."),
    (r"^layers\.(\d+)\.0\.", r"stages.\1.patch_embed."),
    (r"^layers\.(\d+)\.1\.0\.pos_embed$", r"stages.\1.pos_embed.rows"),
    (r"^layers\.(\d+)\.1\.", r"stages.\1.blocks."),
    (r"^layers\.(\d+)\.2\.", r"stages.\1.norm."),
    (r"\.attn\.attn\.in_proj_(weight|bias)$", r".attn.qkv.\1"),
    (r"\.attn\.attn\.out_proj\.", ".attn.proj."),
    (r"\.ffn\.layers\.0\.", ".mlp.fc1."),
    (r"\.ffn\.layers\.1\.", ".mlp.dwconv."),
    (r"\.ffn\.layers\.[34]\.", ".mlp.fc2."),
)


def from_mmdetection(state: Mapping[str, Any]) -> StateDict | None:
    """The backbone's state dict with our names; None if the names are not mmdetection's.

    A name is kept if its translation is taken, and is then reported as unexpected.
    """
    if any(".attn.w_msa." in key for key in state):
        translate: Callable[[str, Any], tuple[str, Any]] = _swin_parameter
    elif any(re.match(r"layers\.\d+\.1\.\d+\.attn\.attn\.", key) for key in state):
        has_positions = any(key.endswith(".1.0.pos_embed") for key in state)
        translate = partial(_pvt_parameter, has_positions=has_positions)
    else:
        return None
    found: StateDict = {}
    for key, value in state.items():
        name, translated = translate(key, value)
        found |= {key: value} if name in found else {name: translated}
    return found


def _swin_parameter(key: str, value: Any) -> tuple[str, Any]:
    if match := re.match(r"stages\.(\d+)\.downsample\.(.+)", key):
        return f"stages.{int(match[1]) + 1}.patch_embed.{match[2]}", _in_published_order(value)
    return _renamed(key, _SWIN), value


def _pvt_parameter(key: str, value: Any, has_positions: bool) -> tuple[str, Any]:
    name = _renamed(key, _PVT)
    if has_positions:  # in front of the blocks, counted as one of them
        name = re.sub(r"(?<=\.blocks\.)\d+", lambda match: str(int(match[0]) - 1), name)
    if name.endswith(".pos_embed.rows") and isinstance(value, Tensor) and value.ndim == 3 and len(value) == 1:
        return name, value[0]
    if re.search(r"\.mlp\.fc[12]\.weight$", name) and isinstance(value, Tensor) and value.shape[2:] == (1, 1):
        return name, value.flatten(1)
    return name, value


def _renamed(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _in_published_order(parameter: Any) -> Any:
    """The input channels of patch merging, the last dimension, from nn.Unfold's order (C, R, D) to the authors' (D, R, C)."""
    if not isinstance(parameter, Tensor) or parameter.ndim == 0 or parameter.shape[-1] % 4:
        return parameter
    return parameter.unflatten(-1, (-1, 2, 2)).transpose(-3, -1).flatten(-3)
