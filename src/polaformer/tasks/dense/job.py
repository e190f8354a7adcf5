"""What jobs of detection and segmentation share: the memory they need, and the weights they start from."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polaformer.data.randomness import derive, reseed
from polaformer.data.sources.source import Images
from polaformer.tasks.dense.backbone_weights import load_backbone
from polaformer.tasks.dense.recipe import DenseRecipe
from polaformer.tasks.dense.trained_model import load_whole
from polaformer.tasks.map_style import MapStyleJob
from polaformer.training.memory_estimate import MemoryEstimate
from polaformer.training.run import weights_file


class DenseJob(MapStyleJob):
    """A job whose model is described by arguments. A subclass sets `classes`, `description` and `notices`."""

    recipe: DenseRecipe
    parts: Mapping[str, Images]
    classes: tuple[str, ...]
    description: Any  # a DenseDescription
    notices: list[str]

    def memory(self, part: int) -> MemoryEstimate:
        """The memory to train on `part` images of the largest size at once; raises SettingsError if there is less."""
        raise NotImplementedError

    def check_processes(self, world: int) -> None:
        """Raises SettingsError unless `world` processes can share the work, and each has the memory for its part."""
        super().check_processes(world)
        self.memory(self.recipe.batch_size // (world * self.recipe.accumulation))

    def needs(self, part: int) -> dict[str, Any]:
        """Images, classes and memory of a training run, and what the user should know."""
        memory = self.memory(part)
        return {
            **{f"{name}_images": len(source) for name, source in self.parts.items()},
            **({"notices": "; ".join(self.notices)} if self.notices else {}),
            "classes": len(self.classes),
            "memory_of_weights_MB": round(memory.weights / 1e6),
            "memory_of_activations_MB": round(memory.activations / 1e6),
            "memory_of_each_process_MB": round(memory.total / 1e6),
        }

    def initialised_model(self) -> Any:
        """The model with its initial weights, or with those that the recipe names; adds to `notices` what was loaded."""
        recipe = self.recipe
        reseed(derive("initialisation", recipe.seed))
        model = self.description.build()
        if recipe.backbone is not None:
            self.notices.append(f"backbone: {load_backbone(model.backbone, recipe.backbone)}")
        if recipe.checkpoint is not None:
            reset = load_whole(model, self.description, self.classes, weights_file(Path(recipe.checkpoint)))
            self.notices += [f"checkpoint: it has other classes, so {len(reset)} parameters start anew"] * bool(reset)
        return _with_shared_statistics(model)


def device_name() -> str:
    """The device to train on, for estimates of memory."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def shares_statistics() -> bool:
    """Whether batch norm takes its statistics from all processes: on several GPUs, as published; there is none for CPUs."""
    return torch.cuda.is_available() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def _with_shared_statistics(model: nn.Module) -> nn.Module:
    return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) if shares_statistics() else model
