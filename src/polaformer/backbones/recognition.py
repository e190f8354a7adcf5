"""Recognises the model of a state dict by parameter names and shapes."""

import json
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from polaformer.backbones.backbone import Backbone
from polaformer.backbones.fitting import fit, misfits
from polaformer.backbones.registry import MODELS, create_model
from polaformer.weights.errors import WeightsError
from polaformer.weights.files import read_metadata

_CLASSIFIERS = ("head.weight", "head.fc.weight")  # ours and the authors', timm's


def model_of_file(path: str | PathLike[str], state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of `create_model` for the model of a file: stored in the file if it is ours, otherwise recognised."""
    text = read_metadata(path).get("model")
    if text is None:
        return recognise(state)
    try:
        arguments = json.loads(text)
        _check_plausible(arguments, state)
        with torch.device("meta"):
            model = create_model(**arguments)
    except (ValueError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise WeightsError(f"{path} is damaged: its description of the model is invalid ({text[:80]!r})") from error
    # Before memory is allocated for a model as large as the file claims.
    problems = misfits(fit(state, model).state, model)
    if any(problems):
        raise WeightsError(f"{path} is damaged: its parameters are not those of the model that it names", problems)
    return arguments


def _check_plausible(arguments: dict[str, Any], state: Mapping[str, Any]) -> None:
    """Raises for sizes that exceed the whole file, so that no file can make us build a huge model."""
    sizes = [arguments.get("num_classes", 0), *_as_list(arguments.get("dims", 0)), *_as_list(arguments.get("img_size", 0))]
    largest = sum(tensor.numel() for tensor in state.values())
    if sum(_as_list(arguments.get("depths", 0))) > len(state) or max(sizes) > largest:
        raise ValueError("the model would be larger than its file")
    if {"checkpoint", "features_only", "out_indices"} & arguments.keys():
        raise ValueError("checkpoint, features_only and out_indices are not arguments of a model")


def _as_list(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [value]


def recognise(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of `create_model` for the model that the state dict fits exactly, or None."""
    num_classes = num_classes_of(state)
    num_blocks = sum(key.endswith(".norm1.weight") for key in state)
    for name in (name for name, variant in MODELS.items() if sum(variant.config.per_stage("depths")) == num_blocks):
        with torch.device("meta"):
            model = create_model(name, num_classes=num_classes)
        assert isinstance(model, Backbone)
        found = fit(state, model)
        if not found.resized and not any(misfits(found.state, model)):
            return {"name": name, "num_classes": num_classes}
    return None


def num_classes_of(state: Mapping[str, Any]) -> int:
    """The number of classes of a state dict's classifier; 0 without a classifier."""
    heads = [state[key] for key in _CLASSIFIERS if isinstance(state.get(key), Tensor) and state[key].ndim == 2]
    return len(heads[0]) if heads else 0
