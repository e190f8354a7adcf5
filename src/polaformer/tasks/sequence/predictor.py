"""A trained model of sequences as one file: weights, how to build the model, how to encode documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polaformer.backbones.loading import load_weights, save_weights
from polaformer.data.order import EvaluationOrder
from polaformer.data.randomness import seeded
from polaformer.data.samples import Samples, batches
from polaformer.data.sources.lra.inputs import read_input, shortened
from polaformer.data.sources.lra.opening import open_sequences
from polaformer.data.sources.lra.sequences import SequenceSplit
from polaformer.errors import DataError, SettingsError
from polaformer.tasks.job import Evaluation
from polaformer.tasks.sequence.data import pad
from polaformer.tasks.sequence.description import SequenceModelDescription
from polaformer.tasks.sequence.model import SequenceModel
from polaformer.tasks.sequence.objective import SequenceObjective
from polaformer.tasks.sequence.recipe import SequenceRecipe
from polaformer.tasks.sequence.task import SequenceEvaluation, SequencePrediction
from polaformer.tasks.task import Advance, Answers
from polaformer.weights.errors import WeightsError
from polaformer.weights.files import read_metadata


@dataclass(frozen=True)
class SequencePredictor:
    """A model with the encoding of its documents."""

    model: SequenceModel
    description: SequenceModelDescription

    @torch.inference_mode()
    def probabilities(self, documents: Sequence[np.ndarray]) -> list[float]:
        """The probability of each class, for the symbols of the documents of one sample."""
        encoding, about = self.description.encoding, self.description
        ids = pad([[encoding.ids(one) for one in documents]], about.num_documents, None if self.model.trims else about.length)
        with seeded(0):
            logits = self.model.eval()(ids.to(next(self.model.parameters()).device))
        return logits[0].float().softmax(dim=-1).tolist()

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the weights file atomically."""
        save_weights(self.model, path, metadata=self.description.metadata())

    def evaluation(self, options: SequenceEvaluation, recipe: SequenceRecipe | None) -> Evaluation:
        """The evaluation of a split; each sample is evaluated by one process."""
        split = self._split(options, recipe)
        samples = Samples(self.description.reader(split, trims=self.model.trims), seed=0, replace=False)

        def share(rank: int, world: int) -> EvaluationOrder:
            return EvaluationOrder(len(split), options.batch_size, rank, world)

        return Evaluation(
            SequenceObjective(len(self.description.classes)),
            lambda rank, world: len(share(rank, world)),
            lambda rank, world: batches(samples, share(rank, world), num_workers=options.num_workers),
            {"dataset": self.description.dataset, "kept": self.description.kept, "length": self.description.length},
        )

    def _split(self, options: SequenceEvaluation, recipe: SequenceRecipe | None) -> SequenceSplit:
        """The split that the options ask for, sorted by length."""
        from polaformer.tasks.sequence.job import open_parts

        encoding = self.description.encoding
        if options.data is None:
            assert recipe is not None, "neither data nor a run that names them"
            found = open_parts(recipe, self.description)
        else:
            loaded = open_sequences(Path(options.data), self.description.dataset)
            found = {name: encoding.applied(split) for name, split in loaded.items()}
        if options.split not in found:
            raise SettingsError(f"there is no split {options.split!r} (--split); the data have {', '.join(found)}")
        split = found[options.split]
        return split.subset(np.argsort(encoding.lengths(split), kind="stable"))

    def answer(self, inputs: Sequence[str], options: SequencePrediction, advance: Advance) -> Answers:
        """The most probable classes of documents, given as files or as they are; with two documents per sample, of pairs."""
        size = self.description.num_documents
        if len(inputs) % size:
            number = f"{len(inputs)} input{'s' * (len(inputs) > 1)}"
            raise SettingsError(f"{number} given, but documents are compared in pairs; give an even number")
        records, rows, unreadable = list[dict[str, Any]](), list[tuple[str, ...]](), list[str]()
        for start in range(0, len(inputs), size):
            given = inputs[start : start + size]
            try:
                found = self.probabilities([read_input(self.description.dataset, one) for one in given])
            except DataError as error:
                unreadable.append(str(error))
            else:
                best = sorted(zip(found, self.description.classes, strict=True), key=lambda one: -one[0])[: options.top]
                name = " | ".join(shortened(one) for one in given)
                records.append({"input": name, "classes": [{"name": label, "probability": one} for one, label in best]})
                rows += [(name if not rank else "", label, f"{100 * one:.1f} %") for rank, (one, label) in enumerate(best)]
            for _ in given:
                advance()
        return Answers(records, ("input", "answer", "probability"), rows, unreadable)


def load_predictor(path: str | PathLike[str]) -> SequencePredictor:
    """The predictor in a weights file; raises WeightsError, which is a DataError."""
    try:
        description = SequenceModelDescription.from_metadata(read_metadata(path))
        model = description.build()
    except (KeyError, ValueError, TypeError, IndexError, RecursionError) as error:
        raise WeightsError(f"{path} does not store how its model is built ({error}); train or download it again") from error
    load_weights(model, path)
    return SequencePredictor(model.eval(), description)
