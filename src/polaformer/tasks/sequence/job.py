"""A recipe for sequences with its data, model and objective, ready for the training loop."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from polaformer.backbones.loading import load_weights
from polaformer.data.order import Order
from polaformer.data.randomness import derive, reseed
from polaformer.data.sources.lra.opening import open_sequences
from polaformer.data.sources.lra.sequences import SPLITS, SequenceSplit
from polaformer.errors import SettingsError, raise_all
from polaformer.tasks.accuracy import ClassificationCounts
from polaformer.tasks.figures import Figure
from polaformer.tasks.map_style import MapStyleJob
from polaformer.tasks.sequence import figures
from polaformer.tasks.sequence.data import SequenceBatch, SequenceReader
from polaformer.tasks.sequence.description import SequenceModelDescription, describe
from polaformer.tasks.sequence.model import SequenceModel
from polaformer.tasks.sequence.objective import SequenceObjective
from polaformer.tasks.sequence.predictor import SequencePredictor
from polaformer.tasks.sequence.recipe import SequenceRecipe
from polaformer.training.memory_estimate import estimate_memory
from polaformer.training.optim import check_settings, check_trainable
from polaformer.training.run import weights_file


class SequenceJob(MapStyleJob):
    """A recipe for sequences with its data opened and its model built; raises SettingsError or DataError."""

    batch_class = SequenceBatch
    recipe: SequenceRecipe
    parts: Mapping[str, SequenceSplit]

    def __init__(self, recipe: SequenceRecipe) -> None:
        self.recipe, self.description = recipe, describe(recipe)
        raise_all(recipe.problems(), [lambda: check_settings(recipe), lambda: _check_model(recipe, self.description)])
        self.parts = open_parts(recipe, self.description)
        self.notices = [
            f"{name}: {len(split.skipped)} × empty and left out, such as {next(iter(split.skipped.values()))}"
            for name, split in self.parts.items()
            if split.skipped
        ]
        self.model = self._initialised_model()
        self.trims = self.model.trims if recipe.trim is None else recipe.trim
        lengths = self.description.encoding.lengths(self.parts["train"]).tolist() if self.trims else None
        self.use_order(Order(len(self.parts["train"]), recipe.batch_size, recipe.seed, lengths=lengths))
        self.objective = SequenceObjective(len(self.description.classes))

    def reader(self, split: str, *, training: bool) -> SequenceReader:
        """Reads the sequences of a split."""
        return self.description.reader(self.parts[split], trims=self.trims)

    def metadata(self) -> dict[str, str]:
        """The metadata of weights files: how to build the model and to encode documents."""
        return self.description.metadata() | {"recipe": self.recipe.name}

    def data_fingerprint(self) -> dict[str, Any]:
        """The number of sequences in each split, and a digest of their symbols and labels."""
        counts = {name: len(split) for name, split in self.parts.items()}
        return {"sequences": counts, "names": {name: split.digest() for name, split in self.parts.items()}}

    def needs(self, part: int) -> dict[str, Any]:
        """Sequences, classes and memory of a training run, and what the user should know."""
        ids = torch.ones(part, self.description.num_documents, self.description.length, dtype=torch.int32, device="meta")
        with torch.device("meta"):
            model = self.description.build()
        model.set_grad_checkpointing(self.recipe.grad_checkpointing)
        memory = estimate_memory(model, lambda one: one(ids), self.recipe)
        return {
            **{f"{name}_sequences": len(split) for name, split in self.parts.items()},
            **({"notices": "; ".join(self.notices)} if self.notices else {}),
            "classes": len(self.description.classes),
            **memory.as_record(),
        }

    def predictor(self, model: nn.Module) -> SequencePredictor:
        """The trained model, ready to answer."""
        assert isinstance(model, SequenceModel)
        return SequencePredictor(model, self.description)

    def figures(self, predictor: SequencePredictor, counts: Mapping[str, ClassificationCounts]) -> dict[str, Figure]:
        """Confusion matrix and examples."""
        split = "test" if "test" in counts else "val"
        return figures.collect_figures(predictor, counts[split], self.parts[split], split)

    def _initialised_model(self) -> SequenceModel:
        reseed(derive("initialisation", self.recipe.seed))
        model = self.description.build()
        if self.recipe.checkpoint is not None:
            load_weights(model, weights_file(Path(self.recipe.checkpoint)))
        return model


def open_parts(recipe: SequenceRecipe, description: SequenceModelDescription) -> dict[str, SequenceSplit]:
    """The splits to train, validate and test on, without the symbols that the encoding drops.

    Evaluated splits are sorted by length, so that batches need little padding.
    """
    assert recipe.data is not None
    found = open_sequences(Path(recipe.data), recipe.dataset)
    if "train" not in found:
        raise SettingsError(f"{recipe.data} has no training split; it has {', '.join(found)}")
    if "val" not in found:
        found = _with_validation(found, recipe)
    elif recipe.selection == "held-out":
        raise SettingsError(f"selection is held-out, but {recipe.data} has a validation split, which is used; leave it out")
    encoding = description.encoding
    parts = {name: encoding.applied(found[name]) for name in SPLITS if name in found}
    if recipe.eval_sequences is not None and recipe.eval_sequences < len(parts["val"]):
        chosen = _permutation("evaluated", len(parts["val"]))[: recipe.eval_sequences]
        parts["val"] = parts["val"].subset(np.sort(chosen))
    for name in ("val", "test"):
        if name in parts:
            parts[name] = parts[name].subset(np.argsort(encoding.lengths(parts[name]), kind="stable"))
    return parts


def _with_validation(found: dict[str, SequenceSplit], recipe: SequenceRecipe) -> dict[str, SequenceSplit]:
    """The splits with a validation split: the test split, as published, or a held-out share of the training split."""
    if recipe.selection == "published":
        if "test" not in found:
            raise SettingsError(f"{recipe.data} has neither a validation nor a test split; pass --selection held-out")
        return found | {"val": found["test"]}
    train = found["train"]
    order, count = _permutation("held out", len(train)), max(1, round(recipe.val_share * len(train)))
    return found | {"train": train.subset(np.sort(order[count:])), "val": train.subset(np.sort(order[:count]))}


def _permutation(purpose: str, number: int) -> np.ndarray:
    """A permutation that depends on nothing but its length, so that every seed and mechanism gets the same samples."""
    return np.random.default_rng(derive(purpose, number)).permutation(number)


def _check_model(recipe: SequenceRecipe, description: SequenceModelDescription) -> None:
    """Raises SettingsError unless the model can be built, and trimmed if it is to be."""
    if "num_prefix_tokens" in description.attention_options:
        raise SettingsError("attention_options has num_prefix_tokens, but sequences have no prefix; leave it out")
    try:
        with torch.device("meta"), torch.no_grad():
            model = description.build()
            model(torch.ones(1, description.num_documents, description.length, dtype=torch.int32))
    except (ValueError, TypeError, RuntimeError) as error:
        raise SettingsError(str(error)) from error
    check_trainable(model, recipe)
    if recipe.trim and not model.trims:
        raise SettingsError(
            f"trim is true, but results of attention {recipe.attention!r} with these options depend on padding; "
            "pass --trim false"
        )
