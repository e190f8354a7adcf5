"""A trained classifier as one file: weights, how the model is made, names of classes, how images are prepared."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, NamedTuple

import torch
from PIL.Image import Image
from torch import nn

from polaformer.backbones import create_model
from polaformer.backbones.loading import load_weights, save_weights
from polaformer.backbones.recognition import model_of_file
from polaformer.data.transforms import Preprocessing
from polaformer.weights.errors import WeightsError
from polaformer.weights.files import read_metadata, read_state_dict


class Guess(NamedTuple):
    """A class and the probability that the model gives it."""

    name: str
    label: int
    probability: float


@dataclass(frozen=True)
class Classifier:
    """A model with the names of its classes and the preparation of its images."""

    model: nn.Module
    classes: tuple[str, ...]
    preprocessing: Preprocessing

    @torch.inference_mode()
    def predict(self, images: Sequence[Image], top: int = 5) -> list[list[Guess]]:
        """For each image the most probable classes, best first."""
        transform, parameter = self.preprocessing.transform(), next(self.model.parameters())
        batch = torch.stack([transform(image) for image in images]).to(parameter.device, parameter.dtype)
        found = self.model.eval()(batch).float().softmax(dim=-1).topk(min(top, len(self.classes)))
        rows = zip(found.values.tolist(), found.indices.tolist(), strict=True)
        return [[Guess(self.classes[k], k, p) for p, k in zip(*row, strict=True)] for row in rows]

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the file; it appears whole or not at all."""
        save_weights(self.model, path, metadata=describe(self.classes, self.preprocessing))


def describe(classes: Sequence[str], preprocessing: Preprocessing) -> dict[str, str]:
    """What a file of weights says besides its weights."""
    return {"classes": json.dumps(list(classes)), "preprocessing": json.dumps(asdict(preprocessing), sort_keys=True)}


def load_classifier(path: str | PathLike[str]) -> Classifier:
    """The classifier in a file of weights, ours or a published one; raises WeightsError.

    A file that does not name its classes gets their numbers; one that does not say how images are prepared, the authors' way.
    """
    arguments = model_of_file(path, read_state_dict(path))
    if arguments is None:
        raise WeightsError(
            f"{path} holds no model that is known; turn it into one with `polaformer convert {path} OUT --model …`"
        )
    model = create_model(**arguments)
    load_weights(model, path)
    _check_finite(path, model)
    about = read_metadata(path)
    try:
        return Classifier(model.eval(), _classes(about, model), _preprocessing(about, model))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path} is damaged: what it says of its classes or images makes no sense ({error})") from error


def _classes(about: dict[str, str], model: Any) -> tuple[str, ...]:
    if not model.num_classes:
        raise ValueError("the model has no classifier")
    if "classes" not in about:
        return tuple(str(label) for label in range(model.num_classes))
    found = json.loads(about["classes"])
    if not isinstance(found, list) or len(found) != model.num_classes or not all(isinstance(name, str) for name in found):
        raise ValueError(f"the names of classes are not {model.num_classes} texts")
    return tuple(found)


def _preprocessing(about: dict[str, str], model: Any) -> Preprocessing:
    if "preprocessing" in about:
        given = json.loads(about["preprocessing"])
        found = Preprocessing(**given | {key: tuple(given[key]) for key in ("img_size", "mean", "std")})
    else:
        cfg = model.default_cfg
        found = Preprocessing(tuple(model.img_size), tuple(cfg["mean"]), tuple(cfg["std"]), "square", cfg["crop_pct"])
    if found.channels != model.in_chans:
        raise ValueError(f"images have {found.channels} channels, but the model {model.in_chans}")
    return found


def _check_finite(path: str | PathLike[str], model: nn.Module) -> None:
    broken = [name for name, parameter in model.named_parameters() if not bool(parameter.isfinite().all())]
    if broken:
        raise WeightsError(f"{path} has numbers that are not finite, first in {broken[0]}; train or fetch it again")
