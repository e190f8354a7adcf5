"""The models of `polaformer models --task sequence`: the five tasks of the Long Range Arena times every mechanism."""

from collections.abc import Sequence
from fnmatch import fnmatch

import torch
from torch import Tensor

from polaformer.data.sources.lra.datasets import DATASETS
from polaformer.errors import SettingsError, nearest
from polaformer.tasks.sequence.description import describe
from polaformer.tasks.sequence.model import SequenceModel
from polaformer.tasks.sequence.recipe import SequenceRecipe
from polaformer.tasks.sequence.rows import ARENA_ROWS
from polaformer.tasks.task import ListedModel, ListedModels

NOTES = (
    "For one sample of the full length; a sample of Retrieval has two documents of it. Parameters in millions, MACs in",
    "billions: first everything; then the paper's way of counting, only linear layers, convolutions and norms.",
)


def list_models(pattern: str, attention: Sequence[str]) -> ListedModels:
    """The models whose names match, such as "text-pola-a3"; those with the given mechanisms, if some are given."""
    unknown = [name for name in attention if name not in ("all", *(one.attention for one in ARENA_ROWS.values()))]
    if unknown:
        known = dict.fromkeys(one.attention for one in ARENA_ROWS.values())
        raise SettingsError(f"--attention has {unknown[0]!r}; {nearest(unknown[0], known)}choose from all, {', '.join(known)}")
    wanted = None if not attention or "all" in attention else set(attention)
    models = [
        _listed(f"{dataset}-{name}", SequenceRecipe(dataset=dataset, attention=one.attention, attention_options=one.options))
        for dataset in DATASETS
        for name, one in ARENA_ROWS.items()
        if fnmatch(f"{dataset}-{name}", pattern) and (wanted is None or one.attention in wanted)
    ]
    if not models:
        raise SettingsError(f'no model matches {pattern!r}; try "*", "text-*" or "*-pola-a3"')
    columns = {"tokens": lambda model: str(model.about["length"]), "attention": lambda model: model.about["attention"]}
    return ListedModels("Models of the Long Range Arena", columns, models, NOTES)


def _listed(name: str, recipe: SequenceRecipe) -> ListedModel:
    description = describe(recipe)

    def forward(model: SequenceModel) -> Tensor:
        device = next(model.parameters()).device
        return model(torch.ones(1, description.num_documents, description.length, dtype=torch.int32, device=device))

    about = {"dataset": description.dataset, "length": description.length, "attention": description.attention}
    return ListedModel(name, description.build, forward, about)
