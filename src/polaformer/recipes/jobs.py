"""What a recipe makes: data, model and task, ready for the loop."""

from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import torch
from timm.data import Mixup
from torch import nn

from polaformer.backbones import create_model, load_checkpoint
from polaformer.backbones.backbone import Backbone
from polaformer.backbones.checkpoints import model_metadata
from polaformer.backbones.files import read_state_dict
from polaformer.backbones.recognition import num_classes_of
from polaformer.data.order import Order, Share
from polaformer.data.randomness import derive, reseed
from polaformer.data.samples import Batch, Samples, batches
from polaformer.data.sources import DIGITS, Data, open_data
from polaformer.data.transforms import Preprocessing, Transform, training_transform
from polaformer.errors import SettingsError
from polaformer.recipes.classification import Classification
from polaformer.tasks import classification
from polaformer.tasks.classifier import Classifier, describe
from polaformer.training.freezing import frozen_names
from polaformer.training.optim import check_optimizer, parameter_groups
from polaformer.training.run import weights_of
from polaformer.training.timeline import Timeline


class ClassificationJob:
    """A classification recipe with its data opened and its model made; raises SettingsError or DataError."""

    def __init__(self, recipe: Classification, *, data: Data | None = None) -> None:
        self.recipe = recipe
        checks = [lambda: _check_optimizer(recipe), lambda: _check_model(recipe), lambda: _augmentation(recipe)]
        _raise_all(recipe.problems(), checks)
        self.data = (
            open_data(DIGITS if recipe.data is None else recipe.data, val_share=recipe.val_share) if data is None else data
        )
        self.order = Order(len(self.data.train), recipe.batch_size, recipe.seed)
        self.steps_per_epoch = self.order.steps_per_epoch
        if not self.steps_per_epoch:
            raise SettingsError(
                f"batch_size is {recipe.batch_size}, but there are only {len(self.data.train)} training images; make it smaller"
            )
        if problems := Timeline(recipe, self.steps_per_epoch).problems():
            raise SettingsError(problems)
        self.preprocessing = _preprocessing(recipe)
        self.model = self._model()
        self.task = classification.Classification(len(self.data.classes), self._mixup(), recipe.smoothing)

    def check_processes(self, world: int) -> None:
        """Raises SettingsError unless so many processes can share the work."""
        recipe, parts = self.recipe, world * self.recipe.accumulation
        if recipe.batch_size % parts:
            raise SettingsError(
                f"batch_size is {recipe.batch_size}, which {world} processes times accumulation {recipe.accumulation} do not "
                f"divide; give a multiple of {parts}"
            )
        if self.task.mixup is not None and recipe.batch_size // parts % 2:
            raise SettingsError(
                f"mixing needs an even number of images a process; give a batch_size that is a multiple of {2 * parts}"
            )

    def training_batches(self, first_step: int, rank: int, world: int) -> Generator[Batch, None, None]:
        """The parts of every update from `first_step` on, without end."""
        recipe, transform = self.recipe, _augmentation(self.recipe)
        channels = self.preprocessing.channels
        samples = Samples(self.data.train, transform, channels=channels, seed=recipe.seed, on_bad_image=recipe.on_bad_image)
        keys = self.order.parts(first_step, rank=rank, world=world, accumulation=recipe.accumulation)
        return batches(samples, keys, num_workers=recipe.num_workers, pin_memory=torch.cuda.is_available())

    def evaluation_batches(self, rank: int, world: int) -> Generator[Batch, None, None]:
        """What a process evaluates: its share of the validation images, each once."""
        samples = Samples(
            self.data.val,
            self.preprocessing.transform(),
            channels=self.preprocessing.channels,
            seed=self.recipe.seed,
            on_bad_image=self.recipe.on_bad_image,
            replace=False,
        )
        share = Share(len(self.data.val), max(1, self.recipe.batch_size // (world * self.recipe.accumulation)), rank, world)
        return batches(samples, share, num_workers=self.recipe.num_workers, pin_memory=torch.cuda.is_available())

    def name(self, index: int) -> str:
        """What to call a training image."""
        return self.data.train.name(index)

    def most_bad(self) -> int | None:
        """How many images of an epoch may be skipped; None where the first one ends the run."""
        if self.recipe.on_bad_image == "error":
            return None
        return max(1, int(self.recipe.max_bad_share * self.steps_per_epoch * self.recipe.batch_size))

    def metadata(self) -> dict[str, str]:
        """What the files of weights say besides the weights: how the model is made, its classes, its images."""
        return model_metadata(self.model) | describe(self.data.classes, self.preprocessing) | {"recipe": self.recipe.name}

    def classifier(self, model: nn.Module) -> Classifier:
        """A trained model with its classes and the preparation of its images."""
        return Classifier(model, self.data.classes, self.preprocessing)

    def on_meta(self) -> nn.Module:
        """The model without memory, for estimates."""
        model = _build(self.recipe, len(self.data.classes), "meta")
        model.set_grad_checkpointing(self.recipe.grad_checkpointing)  # type: ignore[operator]
        return model

    def _model(self) -> nn.Module:
        reseed(derive("initialisation", self.recipe.seed))
        model = _build(self.recipe, len(self.data.classes), "cpu")
        if self.recipe.checkpoint is not None:
            weights = weights_of(Path(self.recipe.checkpoint))
            other_classes = num_classes_of(read_state_dict(weights)) != len(self.data.classes)
            load_checkpoint(model, weights, reset_head=other_classes)
        return model

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


def _build(recipe: Classification, num_classes: int, device: str) -> nn.Module:
    try:
        with torch.device(device):
            model = create_model(recipe.model, num_classes=num_classes, **recipe.model_options())
    except (ValueError, TypeError) as error:
        raise SettingsError(f"model {recipe.model}: {error}") from error
    except (RuntimeError, OverflowError) as error:  # PyTorch's, for more memory than there is
        reason = str(error).splitlines()[0]
        raise SettingsError(
            f"model {recipe.model} cannot be made: {reason}; give smaller dims, depths or mlp_ratios"
        ) from error
    assert isinstance(model, Backbone)
    return model


def _check_optimizer(recipe: Classification) -> None:
    check_optimizer(recipe.optimizer, cycles_momentum=recipe.momentum_cycle is not None)


def _check_model(recipe: Classification) -> None:
    """Raises SettingsError unless the model can be made, and has the stages and parameters that the recipe names."""
    model = _build(recipe, 2, "meta")
    checks = [lambda: frozen_names(model, recipe.frozen_stages), lambda: parameter_groups(model, recipe)]
    _raise_all([], checks)


def _preprocessing(recipe: Classification) -> Preprocessing:
    size, interpolation = (recipe.img_size, recipe.img_size), recipe.interpolation
    of_evaluation = "bicubic" if interpolation == "random" else interpolation
    return Preprocessing(size, recipe.mean, recipe.std, recipe.resize, recipe.crop_pct, of_evaluation)


def _augmentation(recipe: Classification) -> Transform:
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


def _raise_all(problems: list[str], checks: Sequence[Callable[[], object]]) -> None:
    """Raises one SettingsError with all that is wrong: what is known, and what the checks find."""
    found = list(problems)
    for check in checks:
        try:
            check()
        except SettingsError as error:
            found += error.problems
    if found:
        raise SettingsError(found)
