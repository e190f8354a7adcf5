"""Weights of whole detectors and segmenters: read from a file that describes its model, or taken over by a new training."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from json import dumps
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polaformer.backbones.fitting import fit, table_grids
from polaformer.backbones.loading import stored_grids
from polaformer.errors import SettingsError
from polaformer.tasks.dense.description import DenseDescription
from polaformer.weights.errors import WeightsError
from polaformer.weights.files import StateDict, check_finite, read_metadata, read_state_dict, write_safetensors

CLASSES = "classes"  # key of the metadata: the class names


def save_model(model: nn.Module, path: str | PathLike[str], metadata: Mapping[str, str]) -> None:
    """Writes a weights file atomically, with the grids of the model's tables besides the metadata."""
    tensors = {key: tensor.detach().contiguous() for key, tensor in model.state_dict().items()}
    write_safetensors(tensors, path, dict(metadata) | {"grids": dumps(table_grids(model), sort_keys=True)})


def build_trained(path: str | PathLike[str], description: DenseDescription, state: StateDict) -> Any:
    """The model of a description with the parameters from its file, ready for inference; raises WeightsError."""
    try:
        problems = description.misfits(state)
    except SettingsError as error:
        raise WeightsError(f"{path} is damaged: its {description.noun} cannot be built: {error}") from error
    if any(problems):
        raise WeightsError(
            f"{path} is damaged: its parameters are not those of the {description.noun} that it describes", problems
        )
    model = description.build()
    model.load_state_dict(state, strict=True)
    check_finite(path, model.state_dict())
    return model.eval()


def load_whole(model: nn.Module, description: DenseDescription, classes: Sequence[str], path: Path) -> list[str]:
    """Loads a whole model to train on, and returns the names of the parameters that keep their initial values.

    These are what depends on the classes, unless the file has the same class names. Raises WeightsError.
    """
    about, noun = read_metadata(path), description.noun
    if noun not in about:
        raise WeightsError(f"{path} does not hold a {noun} of ours; for weights of the backbone alone use --backbone")
    state, wanted = fit(read_state_dict(path), model, stored_grids(path)).state, model.state_dict()
    kept = []
    if about.get(CLASSES) != dumps(list(classes)):
        kept = [name for name in class_parameters(description) if name in wanted]
        state |= {name: wanted[name] for name in kept}
    wrong = sorted(wanted.keys() ^ state.keys())
    wrong += [name for name in wanted if name in state and state[name].shape != wanted[name].shape]
    if wrong:
        raise WeightsError(
            f"{path} holds another {noun} ({_named(about[noun], description)}), and nothing was loaded: {len(wrong)} "
            f"parameters differ, such as {wrong[0]}; give the same --{noun} and --model, or its backbone alone with --backbone"
        )
    model.load_state_dict(state, strict=True)
    check_finite(path, model.state_dict())
    return kept


def class_parameters(description: DenseDescription) -> list[str]:
    """The names of the parameters whose shape depends on the number of classes."""
    shapes = [_shapes(replace(description, num_classes=number)) for number in (2, 3)]
    return [name for name, shape in shapes[0].items() if shapes[1][name] != shape]


def _shapes(description: DenseDescription) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: one.shape for name, one in description.build().state_dict().items()}


def _named(text: str, like: DenseDescription) -> str:
    """The model and the backbone of a description in JSON."""
    try:
        about = like.from_json(text)
    except SettingsError:
        return "unknown"
    return f"{getattr(about, like.noun)} with {about.backbone}"
