"""What the lists of detectors and of segmenters share: the paper's models, their softmax twins, or other mechanisms."""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from typing import Any

from polaformer.attention import facts
from polaformer.attention import names as mechanism_names
from polaformer.backbones.published import with_mechanism
from polaformer.backbones.registry import MODELS
from polaformer.errors import SettingsError, nearest
from polaformer.ops.grid import Grid
from polaformer.tasks.task import ListedModel

NOTES = (
    "Parameters in millions, MACs in billions: first everything; then the paper's way of counting, only linear layers,",
    "convolutions and norms. --attention shows the pola models with other mechanisms; those with parameters per token are",
    "built for the given size.",
)

Build = Callable[[str, str, str | None, str], list[ListedModel]]


def list_around_backbones(
    pairs: Iterable[tuple[str, str]], pattern: str, attention: Sequence[str], listed: Build, examples: str
) -> list[ListedModel]:
    """The models whose names match the pattern; raises SettingsError if there is none.

    pairs: the kind of model and the pola backbone of each row of the paper. attention: mechanisms for the pola backbones;
    without any, the rows and their softmax twins. listed: the entries of a kind, a backbone, the mechanisms of its stages
    (None: its own) and their name. examples: patterns for the message.
    """
    mechanisms = _mechanisms(attention)
    models: list[ListedModel] = []
    for kind, model in dict.fromkeys(pairs):
        if not mechanisms:
            models += listed(kind, model, None, "pola")
            models += listed(kind, model.replace("pola_", "softmax_"), None, "softmax")
        for mechanism in mechanisms:
            models += listed(kind, model, with_mechanism(mechanism, MODELS[model].config), mechanism)
    models = [model for model in models if fnmatch(model.name, pattern)]
    if not models:
        raise SettingsError(f"no model matches {pattern!r}; try {examples}")
    return models


def options_of_backbone(stages: str | None, size: Grid) -> dict[str, Any]:
    """The arguments of `create_model` for these mechanisms (None: the model's own).

    With parameters per token they are built for images of that size: they could not run on larger ones than they are built for.
    """
    if stages is None:
        return {}
    needs_size = any(facts(name).needs_length for name in stages.split(","))
    return {"attention": stages} | ({"img_size": size} if needs_size else {})


def name_of(kind: str, model: str) -> str:
    """The name of a model in a list, such as "mask-rcnn-pola-pvt-tiny"."""
    return f"{kind}-{model.replace('_', '-')}"


def _mechanisms(attention: Sequence[str]) -> tuple[str, ...]:
    known = ("all", *mechanism_names())
    if unknown := [name for name in attention if name not in known]:
        raise SettingsError(f"--attention has {unknown[0]!r}; {nearest(unknown[0], known)}choose from {', '.join(known)}")
    return tuple(mechanism_names() if "all" in attention else dict.fromkeys(attention))
