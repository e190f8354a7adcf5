"""What a weights file stores about a model of sequences: how documents are encoded, and how the model is built."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from polaformer.data.sources.lra.datasets import DATASETS, DatasetName, DatasetSpec
from polaformer.data.sources.lra.sequences import SequenceSplit
from polaformer.ops.grid import Grid
from polaformer.tasks.sequence.data import Encoding, SequenceReader
from polaformer.tasks.sequence.model import SequenceModel
from polaformer.tasks.sequence.recipe import SequenceRecipe

KEY = "sequence_model"  # of the metadata


@dataclass(frozen=True, kw_only=True)
class SequenceModelDescription:
    """How documents are encoded, and the arguments of the model."""

    dataset: DatasetName
    classes: tuple[str, ...]
    kept: int
    shift: int
    drops_closers: bool
    num_documents: int
    vocabulary: int
    length: int
    attention: str
    attention_options: dict[str, Any]
    dim: int
    depth: int
    num_heads: int
    mlp_dim: int
    dropout: float
    pooling: str
    grid: Grid | None

    @property
    def spec(self) -> DatasetSpec:
        """The dataset as the published models read it."""
        return DATASETS[self.dataset]

    @property
    def encoding(self) -> Encoding:
        """How documents become ids."""
        return Encoding(self.kept, self.shift, self.drops_closers)

    def build(self) -> SequenceModel:
        """A new model."""
        not_of_model = ("dataset", "classes", "kept", "shift", "drops_closers")
        arguments = {name: value for name, value in vars(self).items() if name not in not_of_model}
        return SequenceModel(num_classes=len(self.classes), **arguments)

    def reader(self, split: SequenceSplit, *, trims: bool) -> SequenceReader:
        """Reads the samples of a split."""
        return SequenceReader(split, self.encoding, length=self.length, trims=trims)

    def metadata(self) -> dict[str, str]:
        """The metadata of a weights file."""
        return {"task": SequenceRecipe.task, KEY: json.dumps(asdict(self), sort_keys=True)}

    @classmethod
    def from_metadata(cls, about: dict[str, str]) -> "SequenceModelDescription":
        """The inverse of `metadata`; raises KeyError, ValueError or TypeError if something is wrong."""
        values = json.loads(about[KEY])
        values["classes"] = tuple(str(name) for name in values["classes"])
        values["grid"] = None if values["grid"] is None else (int(values["grid"][0]), int(values["grid"][1]))
        return cls(**values)


def describe(recipe: SequenceRecipe) -> SequenceModelDescription:
    """What a weights file stores about a model that the recipe trains."""
    spec = recipe.spec
    grid = (spec.side, spec.side) if recipe.convolution == "grid" and spec.side else None
    return SequenceModelDescription(
        dataset=spec.name,
        classes=spec.classes,
        kept=recipe.max_tokens,
        shift=recipe.shift,
        drops_closers=spec.has_closers and recipe.tokenisation == "A",
        num_documents=spec.num_documents,
        vocabulary=recipe.vocabulary,
        length=recipe.num_positions,
        attention_options=recipe.layer_options(),
        grid=grid,
        **{name: getattr(recipe, name) for name in ("attention", "dim", "depth", "num_heads", "mlp_dim", "dropout", "pooling")},
    )
