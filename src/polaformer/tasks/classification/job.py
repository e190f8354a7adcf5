"""A classification recipe with its data, model and objective, ready for the training loop."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from timm.data import Mixup
from torch import nn

from polaformer.backbones import create_model
from polaformer.backbones.backbone import Backbone
from polaformer.backbones.loading import load_weights, model_metadata
from polaformer.backbones.recognition import num_classes_of
from polaformer.data.labelled_images import ImageReader, LabelledImages
from polaformer.data.order import Order
from polaformer.data.randomness import derive, reseed
from polaformer.data.sources.opening import DIGITS, open_data
from polaformer.data.sources.source import DataSplits, Source, digest_of_names
from polaformer.data.transforms import Preprocessing, Transform, training_transform
from polaformer.errors import SettingsError, raise_all
from polaformer.tasks.accuracy import ClassificationCounts
from polaformer.tasks.classification import figures
from polaformer.tasks.classification.objective import CrossEntropy
from polaformer.tasks.classification.predictor import Classifier, classifier_metadata
from polaformer.tasks.classification.recipe import ClassificationRecipe
from polaformer.tasks.figures import Figure
from polaformer.tasks.map_style import MapStyleJob
from polaformer.training.memory_estimate import estimate_memory
from polaformer.training.optim import check_settings, check_trainable
from polaformer.training.run import weights_file
from polaformer.weights.files import read_metadata, read_state_dict


class ClassificationJob(MapStyleJob):
    """A classification recipe with its data opened and its model built; raises SettingsError or DataError."""

    batch_class = LabelledImages
    recipe: ClassificationRecipe
    parts: Mapping[str, Source]

    def __init__(self, recipe: ClassificationRecipe, *, data: DataSplits | None = None) -> None:
        self.recipe = recipe
        checks = [lambda: check_settings(recipe), lambda: _check_model(recipe), lambda: _augmentation(recipe)]
        raise_all(recipe.problems(), checks)
        self.data = (
            open_data(DIGITS if recipe.data is None else recipe.data, val_share=recipe.val_share) if data is None else data
        )
        self.parts = self.data.splits
        self.on_bad, self.max_bad_share = recipe.on_bad_image, recipe.max_bad_share
        self.use_order(Order(len(self.data.train), recipe.batch_size, recipe.seed))
        self.preprocessing = _preprocessing(recipe)
        self.model = self._initialised_model()
        self.objective = CrossEntropy(len(self.data.classes), self._mixup(), recipe.smoothing)

    def check_processes(self, world: int) -> None:
        """Raises SettingsError unless `world` processes can share the work."""
        super().check_processes(world)
        pieces = world * self.recipe.accumulation
        if self.objective.mixup is not None and self.recipe.batch_size // pieces % 2:
            raise SettingsError(
                f"mixup and cutmix need an even number of images per process; give a batch_size divisible by {2 * pieces}"
            )

    def reader(self, split: str, *, training: bool) -> ImageReader:
        """Reads the images of a split, augmented for training."""
        transform = _augmentation(self.recipe) if training else self.preprocessing.transform()
        return ImageReader(self.parts[split], transform, channels=self.preprocessing.channels)

    def metadata(self) -> dict[str, str]:
        """The metadata of weights files: how to build the model, class names, preprocessing."""
        about = classifier_metadata(self.data.classes, self.preprocessing)
        return model_metadata(self.model) | about | {"recipe": self.recipe.name}

    def data_fingerprint(self) -> dict[str, Any]:
        """The number of images in each part, and a digest of their names and labels."""
        digests = {name: digest_of_names(source) for name, source in self.data.splits.items()}
        return {"images": {name: len(source) for name, source in self.data.splits.items()}, "names": digests}

    def needs(self, part: int) -> dict[str, Any]:
        """Images, classes and memory of a training run."""
        recipe = self.recipe
        images = torch.empty(part, len(recipe.mean), recipe.img_size, recipe.img_size, device="meta")
        memory = estimate_memory(self.on_meta(), lambda model: model(images), recipe)
        return {
            "training_images": len(self.data.train),
            "validation_images": len(self.data.val),
            **({} if self.data.test is None else {"test_images": len(self.data.test)}),
            "classes": len(self.data.classes),
            **memory.as_record(),
        }

    def figures(self, predictor: Classifier, counts: Mapping[str, ClassificationCounts]) -> dict[str, Figure]:
        """Confusion matrix, predictions and attention maps of validation images."""
        return figures.collect_figures(predictor, counts["val"], self.data.val)

    def predictor(self, model: nn.Module) -> Classifier:
        """The trained model with its class names and preprocessing."""
        return Classifier(model, self.data.classes, self.preprocessing)

    def on_meta(self) -> nn.Module:
        """The model on the meta device, for memory estimates."""
        model = _build_model(self.recipe, len(self.data.classes), "meta")
        model.set_grad_checkpointing(self.recipe.grad_checkpointing)  # type: ignore[operator]
        return model

    def _initialised_model(self) -> nn.Module:
        reseed(derive("initialisation", self.recipe.seed))
        model = _build_model(self.recipe, len(self.data.classes), "cpu")
        if self.recipe.checkpoint is not None:
            weights = weights_file(Path(self.recipe.checkpoint))
            load_weights(model, weights, reset_head=not self._has_these_classes(weights))
        return model

    def _has_these_classes(self, weights: Path) -> bool:
        """Whether a weights file has the classes of the data; if it does not name them, whether their number is the same."""
        names = read_metadata(weights).get("classes")
        if names is not None:
            return names == json.dumps(list(self.data.classes))
        return num_classes_of(read_state_dict(weights)) == len(self.data.classes)

    def _mixup(self) -> Mixup | None:
        recipe = self.recipe
        if recipe.mixup == recipe.cutmix == 0:
            return None
        return Mixup(
            mixup_alpha=recipe.mixup,
            cutmix_alpha=recipe.cutmix,
            prob=recipe.mix_prob,
            switch_prob=recipe.mix_switch_prob,
            label_smoothing=recipe.smoothing,
            num_classes=len(self.data.classes),
        )


def _build_model(recipe: ClassificationRecipe, num_classes: int, device: str) -> nn.Module:
    try:
        with torch.device(device):
            model = create_model(recipe.model, num_classes=num_classes, **recipe.model_options())
    except (ValueError, TypeError) as error:
        raise SettingsError(f"model {recipe.model}: {error}") from error
    except (RuntimeError, OverflowError) as error:  # from PyTorch, if memory does not suffice
        reason = str(error).splitlines()[0]
        raise SettingsError(
            f"model {recipe.model} cannot be built: {reason}; give smaller dims, depths or mlp_ratios"
        ) from error
    assert isinstance(model, Backbone)
    return model


def _check_model(recipe: ClassificationRecipe) -> None:
    """Raises SettingsError unless the model can be built and has the stages and parameters that the recipe names."""
    check_trainable(_build_model(recipe, 2, "meta"), recipe)


def _preprocessing(recipe: ClassificationRecipe) -> Preprocessing:
    size, interpolation = (recipe.img_size, recipe.img_size), recipe.interpolation
    for_evaluation = "bicubic" if interpolation == "random" else interpolation
    return Preprocessing(size, recipe.mean, recipe.std, recipe.resize, recipe.crop_pct, for_evaluation)


def _augmentation(recipe: ClassificationRecipe) -> Transform:
    preprocessing = _preprocessing(recipe)
    try:
        return training_transform(
            preprocessing,
            scale=recipe.crop_scale,
            ratio=recipe.crop_ratio,
            hflip=recipe.hflip,
            color_jitter=recipe.color_jitter,
            augmentation=recipe.auto_augment,
            erase_prob=recipe.erase_prob,
            interpolation=recipe.interpolation,
        )
    except (AssertionError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise SettingsError(
            f"auto_augment is {recipe.auto_augment!r}, which timm does not understand ({error}); give a name such as "
            "rand-m9-mstd0.5-inc1, augmix-m3-w3, original, or None"
        ) from error
