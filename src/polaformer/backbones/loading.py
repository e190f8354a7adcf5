"""Loading and saving the weights of models: a file is loaded completely or not at all."""

import json
import re
from collections.abc import Mapping
from os import PathLike
from typing import Any, NamedTuple

from timm.models._features import FeatureGetterNet
from torch import nn

from polaformer.backbones.fitting import fit, misfits, table_grids
from polaformer.ops.grid import Grid
from polaformer.weights.errors import Misfits, WeightsError
from polaformer.weights.files import StateDict, extract_state_dict, read_metadata, read_state_dict, write_safetensors

_PRUNED = re.compile(r"(stages|blocks)\.\d+\.|norm\.|feature_norms\.")  # what `prune_intermediate_layers` may have dropped


class Loaded(NamedTuple):
    """The result of `load_weights`: the tables that it resized, and the parameters of the file that it left out."""

    resized: list[str]
    left_out: list[str]


def load_weights(model: nn.Module, source: str | PathLike[str] | Mapping[str, Any], *, reset_head: bool = False) -> Loaded:
    """Loads the parameters of a file or state dict into the model, or raises WeightsError and changes nothing.

    The names may be ours, the authors' or timm's. The file must have all parameters of the model, with their shapes, and no
    others. Position tables are resized to the model's size. Buffers that follow from sizes are neither needed nor used. If the
    model has no classifier, that of the file is left out. reset_head: leave out the file's classifier and keep the model's,
    for other classes.
    """
    inner = unwrapped(model)
    check_has_memory(inner)
    if isinstance(source, Mapping):
        origin, found = "the state dict", fit(extract_state_dict(source), inner)
    else:
        origin, found = str(source), fit(read_state_dict(source), inner, stored_grids(source))
    left_out = _drop_unused(found.state, inner, reset_head)
    problems = misfits(found.state, inner)
    if any(problems):
        raise WeightsError(misfit_message(origin, inner, problems), problems)
    inner.load_state_dict(found.state, strict=True)
    return Loaded(found.resized, left_out)


def save_weights(model: nn.Module, path: str | PathLike[str], *, metadata: Mapping[str, str] | None = None) -> None:
    """Writes the model's parameters, and how it was built, as safetensors; the file is written completely or not at all.

    A model that was pruned to features is written as it is, and the file does not state how it was built.
    """
    tensors = {key: tensor.detach().contiguous() for key, tensor in unwrapped(model).state_dict().items()}
    write_safetensors(tensors, path, dict(metadata or {}) | model_metadata(model))


def model_metadata(model: nn.Module) -> dict[str, str]:
    """The metadata of a model's weights file: how the model was built, and the grids of its tables."""
    inner = unwrapped(model)
    metadata = {"grids": json.dumps(table_grids(inner), sort_keys=True)}
    if getattr(inner, "built_from", None) and not getattr(inner, "pruned", False):
        metadata["model"] = json.dumps(inner.built_from, sort_keys=True, default=_as_json)
    return metadata


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside timm's feature wrapper, DistributedDataParallel, DataParallel or torch.compile."""
    if isinstance(model, FeatureGetterNet):
        return unwrapped(model.model)
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return unwrapped(model.module)
    compiled = getattr(model, "_orig_mod", None)
    return unwrapped(compiled) if isinstance(compiled, nn.Module) else model


def _drop_unused(state: StateDict, model: nn.Module, reset_head: bool) -> list[str]:
    """Removes parameters that the model does not use and adds those that keep the model's values; returns the removed names."""
    wanted = model.state_dict()
    no_head, pruned = getattr(model, "num_classes", None) == 0, getattr(model, "pruned", False)
    removed = [
        key
        for key in state
        if (key.startswith("head.") and (reset_head or no_head)) or (pruned and key not in wanted and _PRUNED.match(key))
    ]
    for key in removed:
        del state[key]
    for key in wanted.keys() - state.keys():
        if (reset_head and key.startswith("head.")) or key.startswith("feature_norms."):
            state[key] = wanted[key]
    return removed


def stored_grids(path: str | PathLike[str]) -> dict[str, Grid]:
    """The (height, width) of tables, which our own files store; {} for others."""
    try:
        grids = json.loads(read_metadata(path).get("grids", "{}"))
        found = {str(name): (int(height), int(width)) for name, (height, width) in grids.items()}
        if not all(side > 0 for grid in found.values() for side in grid):
            raise ValueError("a side is not positive")
        return found
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise WeightsError(f"{path} is damaged: its list of table sizes is invalid ({error})") from error


def check_has_memory(model: nn.Module) -> None:
    """Raises WeightsError for a model on the meta device, which would ignore whatever is loaded."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise WeightsError("the model is on the meta device and has no memory; call model.to_empty(device=...) first")


def misfit_message(origin: str, model: nn.Module, problems: Misfits) -> list[str]:
    """The lines of the error for what does not fit."""
    lines = [f"{origin} does not fit {model_name(model)}, and nothing was loaded:"]
    for kind, found in zip(("missing in the file", "unexpected in the file", "different"), problems, strict=True):
        if found:
            lines += [f"{len(found)} {kind}:", *(f"  {line}" for line in found)]
    if any(line.startswith("head.") for line in problems.different) and not problems.missing:
        lines.append("Other classes? Give the model the file's num_classes, or load with reset_head=True.")
    if problems.missing or problems.unexpected:
        lines.append("Another model? `polaformer convert FILE OUT.safetensors`, without --model, recognises it.")
    return lines


def model_name(model: nn.Module) -> str:
    """The name that the model was created by, or of its class if it has none."""
    return str(getattr(model, "built_from", {}).get("name", type(model).__name__))


def _as_json(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value)
