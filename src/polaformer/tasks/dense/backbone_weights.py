"""Pretrained weights for the backbone of a detector or segmenter (`--backbone CHECKPOINT`).

Reads our weights files, runs and checkpoints, of classification or of dense tasks; the authors', timm's and the original
repositories' files; and mmdetection's and mmsegmentation's, whose backbones are PVT, PVTv2 and Swin with softmax attention.
Only the backbone is loaded, all of it or nothing. Optional are the final norm and the norms of the features, which not every
file has: those that are not in the file keep their values.

mmdetection's PVT has ε = 1e-6 in the norms after patches and after key reduction, where the original and ours have 1e-5; its
features differ from ours in about the fifth digit.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from polaformer.backbones import create_model
from polaformer.backbones.config import BackboneConfig
from polaformer.backbones.fitting import fit, misfits
from polaformer.backbones.loading import check_has_memory, misfit_message, model_name, stored_grids, unwrapped
from polaformer.backbones.mmdetection_names import from_mmdetection
from polaformer.backbones.recognition import model_of_file
from polaformer.backbones.registry import MODELS, softmax_twin
from polaformer.ops.grid import Grid
from polaformer.training.run import weights_file
from polaformer.weights.errors import Misfits, WeightsError
from polaformer.weights.files import StateDict, check_finite, extract_state_dict, read_metadata, read_state_dict

HEAD = "head."
OPTIONAL = (HEAD, "norm.", "feature_norms.")  # not needed for features, or not in every file
_BACKBONE = re.compile(r"(?:\w+\.)*backbone\.")
_OF_MECHANISMS = ("attention_options", "reductions")  # arguments that other mechanisms may not take


@dataclass(frozen=True)
class LoadedBackbone:
    """What `load_backbone` did; as text, one line for the user."""

    path: Path  # of the weights file
    names: str  # whose names the parameters have in the file
    num_loaded: int
    resized: list[str]  # a line per resized table
    kept: list[str]  # norms that the file lacks: they keep their values
    left_out: dict[str, int]  # how many parameters of the file were not used, by the first part of their name

    def __str__(self) -> str:
        parts = [f"{self.num_loaded} parameters with {self.names} names from {self.path}"]
        if self.resized:
            parts.append(f"{len(self.resized)} tables resized")
        if self.kept:
            parts.append(f"not in the file: {', '.join(dict.fromkeys(name.partition('.')[0] for name in self.kept))}")
        if self.left_out:
            parts.append("left out: " + ", ".join(f"{name} ({count})" for name, count in self.left_out.items()))
        return "; ".join(parts)


class _Fitted(NamedTuple):
    """A file's backbone with the names and table sizes of a model, complete but for `problems`."""

    state: StateDict  # includes `kept`
    resized: list[str]
    kept: list[str]
    unused: list[str]
    problems: Misfits


class _Source(NamedTuple):
    """The backbone in a file."""

    path: Path
    prefix: str  # of its names in the file
    names: str
    state: StateDict
    grids: dict[str, Grid]
    left_out: list[str]


def load_backbone(backbone: nn.Module, path: str | PathLike[str]) -> LoadedBackbone:
    """Loads the backbone of a weights file, a run or a checkpoint, or raises WeightsError or DataError and changes nothing."""
    model = unwrapped(backbone)
    check_has_memory(model)
    source = _read(Path(path))
    fitted = _fitted(source, model)
    if any(fitted.problems):
        raise WeightsError(_misfit_lines(source, model, fitted), fitted.problems)
    check_finite(source.path, fitted.state)
    model.load_state_dict(fitted.state, strict=True)
    left_out = dict(Counter(key.partition(".")[0] for key in [*source.left_out, *fitted.unused]))
    num_loaded = len(fitted.state) - len(fitted.kept)
    kept = [key for key in fitted.kept if not key.startswith(HEAD)]
    return LoadedBackbone(source.path, source.names, num_loaded, fitted.resized, kept, left_out)


def _read(path: Path) -> _Source:
    """The parameters of the backbone in a file, with names that `fit` translates."""
    file = weights_file(path)
    whole = read_state_dict(file)
    prefix = _prefix(file, whole)
    left_out = [key for key in whole if not key.startswith(prefix)]
    state = extract_state_dict({key.removeprefix(prefix): whole[key] for key in whole if key.startswith(prefix)}, str(file))
    grids = {name.removeprefix(prefix): grid for name, grid in stored_grids(file).items() if name.startswith(prefix)}
    left_out += _drop_class_token(state)
    translated = from_mmdetection(state)
    if translated is not None:
        return _Source(file, prefix, "mmdetection's", translated, grids, left_out)
    is_ours = any(re.match(r"stages\.0\.blocks\.\d+\.attn\.proj\.", key) for key in state)
    is_ours = is_ours and any(key.startswith("stages.0.patch_embed.") for key in state)  # unlike timm's PVTv2
    return _Source(file, prefix, "our" if is_ours else "published", state, grids, left_out)


def _prefix(path: Path, state: Mapping[str, Any]) -> str:
    """The prefix of the backbone's parameters in the file of a detector or segmenter; "" in others."""
    found = list(dict.fromkeys(match[0] for key in state if (match := _BACKBONE.match(key))))
    prefix = max(found, key=len, default="")
    if any(not prefix.startswith(other) for other in found):
        raise WeightsError(f"{path} holds {len(found)} backbones ({', '.join(found)}); give a file with one")
    return prefix


def _drop_class_token(state: StateDict) -> list[str]:
    """Removes the class token of the original PVT, and its row of the last table, which is the first; returns its name."""
    tables = [key for key in state if re.fullmatch(r"pos_embed\d+", key)]
    for key in tables:
        num_rows = state[key].shape[1] if state[key].ndim == 3 else 0
        if not _is_square(num_rows) and _is_square(num_rows - 1):
            state[key] = state[key][:, 1:]
    return ["cls_token"] if tables and state.pop("cls_token", None) is not None else []


def _is_square(number: int) -> bool:
    return number > 0 and isqrt(number) ** 2 == number


def _fitted(source: _Source, model: nn.Module) -> _Fitted:
    state, resized = fit(source.state, model, source.grids)
    wanted = model.state_dict()
    unused = [key for key in state if key.startswith(HEAD) or (key.startswith(OPTIONAL) and key not in wanted)]
    for key in unused:
        del state[key]
    kept = [key for key in wanted if key.startswith(OPTIONAL) and key not in state]
    state |= {key: wanted[key] for key in kept}
    return _Fitted(state, resized, kept, unused, misfits(state, model))


def _misfit_lines(source: _Source, model: nn.Module, fitted: _Fitted) -> list[str]:
    """The lines of the error: what the file holds instead, if it is recognised; otherwise all that does not fit."""
    path, wanted = source.path, model_name(model)
    if _fits_softmax_twin(source, model):
        twin, mechanisms = softmax_twin(wanted), ", ".join(dict.fromkeys(getattr(model, "attention", ())))
        choice = twin if twin in MODELS else "attention=softmax"
        return [
            f"{path} is for softmax attention, but the attention of {wanted} here is {mechanisms}; nothing was loaded. "
            f"Choose the softmax twin ({choice}), or give weights that were trained with {mechanisms}"
        ]
    found = _model_in(source)
    if found is not None and found != wanted:
        return [f"{path} holds {found}, not {wanted}; nothing was loaded. Choose that model, or give another file"]
    if not (fitted.state.keys() - {*fitted.kept}) & model.state_dict().keys():
        return [
            f"{path} holds no backbone for {wanted}; nothing was loaded. None of its {len(source.state)} parameters "
            f"({', '.join(list(source.state)[:3])}, …) is one of the model's; give weights of that model, alone or in a "
            "detector or segmenter"
        ]
    return misfit_message(str(path), model, fitted.problems)


def _fits_softmax_twin(source: _Source, model: nn.Module) -> bool:
    """Whether the file fits the same model with softmax attention in all stages, unlike its own."""
    arguments = {key: value for key, value in getattr(model, "built_from", {}).items() if key not in _OF_MECHANISMS}
    if not arguments:
        return False
    with torch.device("meta"):
        twin = create_model(**arguments | {"attention": "softmax"})
    return twin.attention != getattr(model, "attention", ()) and not any(_fitted(source, twin).problems)


def _model_in(source: _Source) -> str | None:
    """The name of the model in a file: stored in it if it is ours, otherwise that of the first model which it fits."""
    if not source.prefix and "model" in read_metadata(source.path):
        return str((model_of_file(source.path, source.state) or {}).get("name"))
    widths = sorted(value.numel() for key, value in source.state.items() if key.endswith(".norm1.weight"))
    fits = list[tuple[int, str]]()
    for name in (name for name, variant in MODELS.items() if sorted(_widths(variant.config)) == widths):
        with torch.device("meta"):
            model = create_model(name, num_classes=0)
        fitted = _fitted(source, model)
        if not any(fitted.problems):
            fits.append((len(fitted.resized), name))
    return min(fits)[1] if fits else None


def _widths(config: BackboneConfig) -> list[int]:
    """The channels of each block."""
    return [dim for dim, depth in zip(config.per_stage("dims"), config.per_stage("depths"), strict=True) for _ in range(depth)]
