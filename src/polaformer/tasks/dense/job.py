"""What jobs of detection and segmentation share: the memory they need, and the weights they start from."""

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polaformer.data.randomness import derive, reseed
from polaformer.data.sources.source import Images
from polaformer.errors import raise_all
from polaformer.tasks.dense.backbone_weights import load_backbone
from polaformer.tasks.dense.recipe import DenseRecipe
from polaformer.tasks.dense.trained_model import load_whole
from polaformer.tasks.map_style import MapStyleJob
from polaformer.training.memory_estimate import MemoryEstimate
from polaformer.training.run import weights_file
from polaformer.training.slurm import num_processes

NUM_NAMES = 12  # of classes that are shown before a training


class DenseJob(MapStyleJob):
    """A job whose model is described by arguments. A subclass sets `classes`, `description` and `notices`."""

    recipe: DenseRecipe
    parts: Mapping[str, Images]
    classes: tuple[str, ...]
    description: Any  # a DenseDescription
    notices: list[str]

    @cached_property
    def _estimates(self) -> dict[int, MemoryEstimate]:
        """What is known about the memory, by the number of images at once."""
        return {}

    def memory(self, part: int) -> MemoryEstimate:
        """The memory to train on `part` images of the largest size at once; raises SettingsError if there is less."""
        raise NotImplementedError

    def check_evaluation(self) -> None:
        """Raises SettingsError if the model cannot be evaluated at the size that the recipe names."""
        raise NotImplementedError

    def check_processes(self, world: int) -> None:
        """Raises SettingsError unless `world` processes can share the work, and each has the memory for its part."""
        super().check_processes(world)
        self._known_memory(self.recipe.batch_size // (world * self.recipe.accumulation))

    def _known_memory(self, part: int) -> MemoryEstimate:
        """`memory`, estimated once."""
        if part not in self._estimates:
            self._estimates[part] = self.memory(part)
        return self._estimates[part]

    def needs(self, part: int) -> dict[str, Any]:
        """Images, classes and memory of a training run, and what the user should know."""
        memory = self._known_memory(part)
        return {
            **{f"{name}_images": len(source) for name, source in self.parts.items()},
            **({"notices": "; ".join(self.notices)} if self.notices else {}),
            "classes": len(self.classes),
            "class_names": ", ".join(self.classes[:NUM_NAMES]) + ", …" * (len(self.classes) > NUM_NAMES),
            **memory.as_record(),
        }

    def initialised_model(self) -> Any:
        """The model with its initial weights, or with those that the recipe names; adds to `notices` what was loaded.

        Raises SettingsError, before any weights are made or read, if it cannot be trained or evaluated at its sizes.
        """
        recipe = self.recipe
        part = recipe.batch_size // (num_processes(os.environ) * recipe.accumulation)
        raise_all([], [lambda: self._known_memory(max(1, part)), self.check_evaluation])
        reseed(derive("initialisation", recipe.seed))
        model = self.description.build()
        if recipe.backbone is not None:
            self.notices.append(f"backbone: {load_backbone(model.backbone, recipe.backbone)}")
        if recipe.checkpoint is not None:
            reset = load_whole(model, self.description, self.classes, weights_file(Path(recipe.checkpoint)))
            self.notices += [f"checkpoint: trained for other classes; {len(reset)} parameters are newly initialised"] * bool(
                reset
            )
        return _with_shared_statistics(model)

    @property
    def validated_on(self) -> str:
        """Which images are those of validation, for figures."""
        return "training" if "val" in self.same_as_train else "validation"


def shares_statistics() -> bool:
    """Whether batch norm takes its statistics from all processes: on several GPUs, as published; there is none for CPUs."""
    return torch.cuda.is_available() and num_processes(os.environ) > 1


def _with_shared_statistics(model: nn.Module) -> nn.Module:
    return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) if shares_statistics() else model
