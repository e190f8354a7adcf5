"""What the lists of detectors and of segmenters share: the recipes' models, their softmax twins, or other mechanisms."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any, NamedTuple

from polaformer.attention import facts
from polaformer.attention import names as mechanism_names
from polaformer.backbones.published import with_mechanism
from polaformer.backbones.registry import MODELS, softmax_twin
from polaformer.errors import SettingsError, nearest
from polaformer.ops.grid import Grid
from polaformer.tasks.task import ListedModel, ListedModels

NOTES = (
    "Parameters in millions, MACs in billions: first everything; then the paper's way of counting, only linear layers,",
    "convolutions and norms. --attention shows the pola models with other mechanisms; those with parameters per token are",
    "built for the given size.",
)

COLUMNS: dict[str, Callable[[ListedModel], str]] = {
    "attention": lambda model: model.about["attention"],
    "size": lambda model: "×".join(map(str, model.about["size"])),
}


class Row(NamedTuple):
    """A model to list, around a pola backbone: its name, a recipe that describes it, and the sizes of the images."""

    name: str
    recipe: Any  # a DenseRecipe
    num_classes: int
    sizes: tuple[Grid, ...]


Listed = Callable[[Row, Grid], ListedModel]  # the entry of a row at one of its sizes


def list_around_backbones(
    title: str, rows: Iterable[Row], pattern: str, attention: Sequence[str], listed: Listed, *, note: str, examples: str
) -> ListedModels:
    """The models whose names match the pattern; raises SettingsError if there is none.

    attention: mechanisms for the backbones; without any, the rows and their softmax twins. note: about what is counted.
    examples: patterns for the message.
    """
    mechanisms = _mechanisms(attention)
    models: list[ListedModel] = []
    for row in rows:
        variants = [(name, _with_attention(row, name)) for name in mechanisms] or [
            (_own_mechanisms(one), one) for one in (row, _twin(row))
        ]
        found = [(mechanism, listed(one, size)) for mechanism, one in variants for size in one.sizes]
        models += [replace(model, about=model.about | {"attention": mechanism}) for mechanism, model in found]
    models = [model for model in models if fnmatch(model.name, pattern)]
    if not models:
        raise SettingsError(f"no model matches {pattern!r}; try {examples}")
    return ListedModels(title, COLUMNS, models, (note, *NOTES))


def native_size(row: Row, size: Grid) -> Grid | None:
    """The size that a backbone is to be built for; None: its own, which suits all sizes.

    With parameters per token it is built for the images: it could not run on larger ones than it is built for.
    """
    stages = () if row.recipe.attention is None else row.recipe.attention.split(",")
    return size if any(facts(name).needs_length for name in stages) else None


def name_of(kind: str, model: str) -> str:
    """The name of a model in a list, such as "mask-rcnn-pola-pvt-tiny"."""
    return f"{kind}-{model.replace('_', '-')}"


def _twin(row: Row) -> Row:
    """The same around softmax attention."""
    recipe = replace(row.recipe, model=softmax_twin(row.recipe.model))
    return row._replace(name=row.name.replace("-pola-", "-softmax-"), recipe=recipe)


def _own_mechanisms(row: Row) -> str:
    """One name, or one per stage with commas between them."""
    names = MODELS[row.recipe.model].config.mechanisms
    return ",".join(names if len(set(names)) > 1 else names[:1])


def _with_attention(row: Row, mechanism: str) -> Row:
    stages = with_mechanism(mechanism, MODELS[row.recipe.model].config)
    return row._replace(recipe=replace(row.recipe, attention=stages))


def _mechanisms(attention: Sequence[str]) -> tuple[str, ...]:
    known = ("all", *mechanism_names())
    if unknown := [name for name in attention if name not in known]:
        raise SettingsError(f"--attention has {unknown[0]!r}; {nearest(unknown[0], known)}choose from {', '.join(known)}")
    return tuple(mechanism_names() if "all" in attention else dict.fromkeys(attention))
