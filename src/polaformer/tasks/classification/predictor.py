"""A trained classifier as one file: weights, how to build the model, class names, preprocessing."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from typing import Any, NamedTuple

import torch
from PIL.Image import Image
from torch import nn

from polaformer.backbones import create_model
from polaformer.backbones.loading import load_weights, save_weights
from polaformer.backbones.recognition import model_of_file
from polaformer.data.images import read_image
from polaformer.data.labelled_images import ImageReader
from polaformer.data.order import EvaluationOrder
from polaformer.data.samples import Samples, batches
from polaformer.data.sources.opening import DIGITS, open_data
from polaformer.data.sources.source import Source
from polaformer.data.transforms import Preprocessing
from polaformer.errors import DataError, SettingsError, printable
from polaformer.tasks.classification.objective import CrossEntropy
from polaformer.tasks.classification.recipe import ClassificationRecipe
from polaformer.tasks.classification.task import ClassificationEvaluation, ClassificationPrediction
from polaformer.tasks.job import Evaluation
from polaformer.tasks.task import Advance, Answers
from polaformer.weights.errors import WeightsError
from polaformer.weights.files import check_finite, read_metadata, read_state_dict

BATCH_SIZE = 32  # images of `predict` in memory at once


class Guess(NamedTuple):
    """A class and its predicted probability."""

    name: str
    label: int
    probability: float


@dataclass(frozen=True)
class Classifier:
    """A model with its class names and the preprocessing of its images."""

    model: nn.Module
    classes: tuple[str, ...]
    preprocessing: Preprocessing

    @torch.inference_mode()
    def predict(self, images: Sequence[Image], top: int = 5) -> list[list[Guess]]:
        """The most probable classes of each image, best first."""
        transform, parameter = self.preprocessing.transform(), next(self.model.parameters())
        batch = torch.stack([transform(image) for image in images]).to(parameter.device, parameter.dtype)
        found = self.model.eval()(batch).float().softmax(dim=-1).topk(min(top, len(self.classes)))
        rows = zip(found.values.tolist(), found.indices.tolist(), strict=True)
        return [[Guess(self.classes[k], k, p) for p, k in zip(*row, strict=True)] for row in rows]

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the weights file atomically."""
        save_weights(self.model, path, metadata=classifier_metadata(self.classes, self.preprocessing))

    def evaluation(self, options: ClassificationEvaluation, recipe: ClassificationRecipe | None) -> Evaluation:
        """An evaluation on a split, each image in one process; raises DataError, and SettingsError for other classes."""
        preprocessing, source = self._preprocessing_with(options), _open_split(options, recipe)
        _check_classes(self.classes, source)
        reader = ImageReader(source, preprocessing.transform(), channels=preprocessing.channels)
        samples = Samples(reader, seed=0, on_bad=options.on_bad_image, replace=False)

        def share(rank: int, world: int) -> EvaluationOrder:
            return EvaluationOrder(len(source), options.batch_size, rank, world)

        return Evaluation(
            CrossEntropy(len(self.classes)),
            lambda rank, world: len(share(rank, world)),
            lambda rank, world: batches(samples, share(rank, world), num_workers=options.num_workers),
            {"resize": preprocessing.resize, "img_size": preprocessing.img_size, "crop_pct": preprocessing.crop_pct},
        )

    def answer(self, inputs: Sequence[str], options: ClassificationPrediction, advance: Advance) -> Answers:
        """The most probable classes of image files."""
        found: dict[str, list[Guess]] = {}
        unreadable = []
        for start in range(0, len(inputs), BATCH_SIZE):
            images = {}
            for path in inputs[start : start + BATCH_SIZE]:
                try:
                    images[printable(path)] = read_image(path, channels=self.preprocessing.channels)
                except DataError as error:
                    unreadable.append(str(error))
                advance()
            if images:
                found |= dict(zip(images, self.predict(list(images.values()), options.top), strict=True))
        records = [{"image": name, "classes": [guess._asdict() for guess in guesses]} for name, guesses in found.items()]
        rows = [
            (name if rank == 0 else "", guess.name, f"{100 * guess.probability:.1f} %")
            for name, guesses in found.items()
            for rank, guess in enumerate(guesses)
        ]
        return Answers(records, ("image", "class", "probability"), rows, unreadable)

    def _preprocessing_with(self, options: ClassificationEvaluation) -> Preprocessing:
        given = {name: getattr(options, name) for name in ("resize", "crop_pct") if getattr(options, name) is not None}
        if options.img_size is not None:
            given["img_size"] = (options.img_size, options.img_size)
        return replace(self.preprocessing, **given)


def _open_split(options: ClassificationEvaluation, recipe: ClassificationRecipe | None) -> Source:
    if options.data is not None:
        return open_data(options.data, val_share=options.val_share).split(options.split)
    assert recipe is not None, "neither data nor a run that names them"
    return open_data(recipe.data or DIGITS, val_share=recipe.val_share).split(options.split)


def _check_classes(classes: tuple[str, ...], source: Source) -> None:
    has_names = classes != tuple(str(label) for label in range(len(classes)))
    if len(source.classes) != len(classes) or (has_names and source.classes != classes):
        raise SettingsError(
            f"the data have the {len(source.classes)} classes {_list_names(source.classes)}, the model has the "
            f"{len(classes)} classes {_list_names(classes)}; give data with the classes it was trained on"
        )


def _list_names(names: tuple[str, ...]) -> str:
    return ", ".join(printable(name) for name in names[:3]) + (", …" if len(names) > 3 else "")


def classifier_metadata(classes: Sequence[str], preprocessing: Preprocessing) -> dict[str, str]:
    """The metadata of a weights file: class names, preprocessing and task."""
    about = {"classes": json.dumps(list(classes)), "preprocessing": json.dumps(asdict(preprocessing), sort_keys=True)}
    return about | {"task": ClassificationRecipe.task}


def load_classifier(path: str | PathLike[str]) -> Classifier:
    """Loads the classifier in a weights file, ours or a published one; raises WeightsError.

    Without class names in the file, classes are named by their index; without preprocessing, the authors' is used.
    """
    arguments = model_of_file(path, read_state_dict(path))
    if arguments is None:
        raise WeightsError(f"{path} does not contain a known model; convert it with `polaformer convert {path} OUT --model …`")
    model = create_model(**arguments)
    load_weights(model, path)
    check_finite(path, dict(model.named_parameters()))
    about = read_metadata(path)
    try:
        return Classifier(model.eval(), _classes(about, model), _preprocessing(about, model))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path} is damaged: its metadata on classes or preprocessing are not valid ({error})") from error


def _classes(about: dict[str, str], model: Any) -> tuple[str, ...]:
    if not model.num_classes:
        raise ValueError("the model has no classifier")
    if "classes" not in about:
        return tuple(str(label) for label in range(model.num_classes))
    found = json.loads(about["classes"])
    if not isinstance(found, list) or len(found) != model.num_classes or not all(isinstance(name, str) for name in found):
        raise ValueError(f"the class names are not {model.num_classes} strings")
    return tuple(found)


def _preprocessing(about: dict[str, str], model: Any) -> Preprocessing:
    if "preprocessing" in about:
        given = json.loads(about["preprocessing"])
        found = Preprocessing(**given | {key: tuple(given[key]) for key in ("img_size", "mean", "std")})
    else:
        cfg = model.default_cfg
        found = Preprocessing(tuple(model.img_size), tuple(cfg["mean"]), tuple(cfg["std"]), "square", cfg["crop_pct"])
    if found.channels != model.in_chans:
        raise ValueError(f"images have {found.channels} channels, but the model takes {model.in_chans}")
    return found
