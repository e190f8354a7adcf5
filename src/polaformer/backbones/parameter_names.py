"""Translation of published parameter names of models to ours; attention layers translate their own.

| published                                                         | here                                       |
|-------------------------------------------------------------------|--------------------------------------------|
| PVT, PVTv2: patch_embed{i}, block{i}.{j}, norm{i}, i from 1       | stages.{i-1}.patch_embed, .blocks.{j}, .norm |
| PVT: pos_embed{i} (1, N, C)                                       | stages.{i-1}.pos_embed.rows (N, C)         |
| PVTv2: mlp.dwconv.dwconv                                          | mlp.dwconv                                 |
| timm's PVTv2: patch_embed, stages.{i}.downsample                  | stages.0.patch_embed, stages.{i}.patch_embed |
| Swin: patch_embed, layers.{i}.blocks.{j}                          | stages.0.patch_embed, stages.{i}.blocks.{j} |
| Swin: layers.{i}.downsample                                       | stages.{i+1}.patch_embed                   |
| timm's Swin: layers.{i}.downsample, head.fc                       | stages.{i}.patch_embed, head               |
| Swin: attn_mask                                                   | not stored: it follows from the size       |
| Swin for dense tasks: norm{i}, i from 0                           | feature_norms.{i}                          |
| DeiT: pos_embed (1, P + N, C)                                     | pos_embed.rows (P + N, C)                  |

Those of mmdetection and mmsegmentation have a file of their own, `mmdetection_names.py`.
"""

import re
from typing import Any

from torch import Tensor, nn

from polaformer.weights.files import StateDict

Rules = tuple[tuple[str, str], ...]

_PVT: Rules = (
    (r"^pos_embed(\d+)$", r"stages.<\1>.pos_embed.rows"),
    (r"^patch_embed(\d+)\.", r"stages.<\1>.patch_embed."),
    (r"^block(\d+)\.", r"stages.<\1>.blocks."),
    (r"^norm(\d+)\.", r"stages.<\1>.norm."),
    (r"\.dwconv\.dwconv\.", r".dwconv."),
    (r"^patch_embed\.", r"stages.0.patch_embed."),
    (r"^(stages\.\d+)\.downsample\.", r"\1.patch_embed."),
)
_SWIN: Rules = (
    (r"^patch_embed\.", r"stages.0.patch_embed."),
    (r"^layers\.(\d+)\.blocks\.", r"stages.\1.blocks."),
    (r"^head\.fc\.", r"head."),
    (r"^norm(\d+)\.", r"feature_norms.\1."),
)
_DEIT: Rules = ((r"^pos_embed$", r"pos_embed.rows"),)


def translate_pvt(model: nn.Module, state: StateDict, prefix: str, *_: Any) -> None:
    """A pre-hook of `load_state_dict`: renames PVT's and PVTv2's parameters, the authors' and timm's, in place."""
    _rename(state, prefix, _PVT)


def translate_deit(model: nn.Module, state: StateDict, prefix: str, *_: Any) -> None:
    """A pre-hook of `load_state_dict`: renames DeiT's parameters in place."""
    _rename(state, prefix, _DEIT)


def translate_swin(model: nn.Module, state: StateDict, prefix: str, *_: Any) -> None:
    """A pre-hook of `load_state_dict`: renames Swin's parameters, the authors' and timm's, in place."""
    # The authors end a stage with its downsampling, timm begins the next one with it; the first stage shows which.
    step = 1 if any(key.startswith(f"{prefix}layers.0.downsample.") for key in state) else 0
    for key in [key for key in state if key.startswith(prefix)]:
        if key.endswith(".attn_mask"):
            del state[key]
        elif match := re.match(r"layers\.(\d+)\.downsample\.(.+)", key[len(prefix) :]):
            state[f"{prefix}stages.{int(match[1]) + step}.patch_embed.{match[2]}"] = state.pop(key)
    _rename(state, prefix, _SWIN)


def _rename(state: StateDict, prefix: str, rules: Rules) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        name = key[len(prefix) :]
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        name = re.sub(r"<(\d+)>", lambda match: str(int(match[1]) - 1), name)  # stages are counted from 0 here
        if name != key[len(prefix) :] and prefix + name not in state:
            state[prefix + name] = _as_rows(state.pop(key), name)


def _as_rows(tensor: Any, name: str) -> Any:
    """A published table (1, N, C) as rows (N, C)."""
    is_table = name.endswith(".rows") and isinstance(tensor, Tensor) and tensor.ndim == 3 and len(tensor) == 1
    return tensor[0] if is_table else tensor
