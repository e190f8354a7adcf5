"""The models of `polaformer models`: backbones with their own or other mechanisms, compared with the paper's tables."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from polaformer.attention import names as mechanism_names
from polaformer.backbones import Backbone, create_model, list_models
from polaformer.backbones.config import LETTERS
from polaformer.backbones.published import EXCEPTIONS, RIVAL_EXCEPTIONS, RIVALS, ROWS, with_mechanism
from polaformer.backbones.registry import MODELS
from polaformer.errors import SettingsError, nearest
from polaformer.tasks.task import ListedModel, ListedModels

TABLE_1 = ("pola_deit_tiny", "pola_swin_tiny")
NOTES = (
    "Attention of each stage: L pola, S softmax. Parameters in millions and MACs in billions, for one image at the",
    "native size: first everything; then the paper's way, only parameters of layers, and only MACs of linear layers,",
    "convolutions and norms, without the matmuls of attention. Printed and top-1: from the paper's ImageNet tables.",
    "The authors released neither DeiT nor PVTv2: these are reconstructions that match the printed columns.",
)
RIVAL_NOTES = (
    "The mechanism is used in all stages; in Swin in the first two, globally, followed by stages of softmax windows.",
    "Columns as in `polaformer models`: parameters in millions, MACs of matmuls in billions, the paper's way of counting,",
    "the printed numbers. No column counts elementwise products of a mechanism (such as Hydra's, or feature maps).",
)


def list_backbones(pattern: str) -> ListedModels:
    """The backbones that match, with their own mechanisms."""
    models = [
        ListedModel(
            name,
            _builder(name),
            forward,
            {"img_size": MODELS[name].config.img_size, "attention": list(MODELS[name].config.mechanisms)},
            ROWS.get(name),
            EXCEPTIONS.get(name),
        )
        for name in _matching(pattern)
    ]
    columns = {"size": lambda model: str(model.about["img_size"]), "stages": lambda model: _letters(model.about["attention"])}
    return ListedModels("Models", columns, models, NOTES)


def list_backbones_with_mechanisms(pattern: str, attention: Sequence[str]) -> ListedModels:
    """The pola_* backbones that match, with the given mechanisms; for the pattern "*" those of the paper's Table 1."""
    found = [name for name in _matching(pattern) if name.startswith("pola_")] if pattern != "*" else list(TABLE_1)
    if not found:
        raise SettingsError(f'--attention needs pola_* models, but {pattern!r} matches none; try "pola_pvt*"')
    pairs = [(name, mechanism) for name in found for mechanism in _mechanisms(attention)]
    models = [
        ListedModel(
            name,
            _builder(name, _stages(name, mechanism)),
            forward,
            {"mechanism": mechanism},
            RIVALS.get((name, mechanism)),
            RIVAL_EXCEPTIONS.get((name, mechanism)),
        )
        for name, mechanism in pairs
    ]
    columns = {"attention": lambda model: model.about["mechanism"]}
    return ListedModels("Models with other mechanisms", columns, models, RIVAL_NOTES)


def forward(model: Backbone) -> Tensor:
    """A forward pass of one image at the model's native size."""
    return model(next(model.parameters()).new_empty(1, model.in_chans, *model.img_size))


def _builder(name: str, attention: str | None = None) -> Callable[[], nn.Module]:
    return partial(create_model, name, attention=attention)


def _stages(name: str, mechanism: str) -> str:
    return with_mechanism(mechanism, MODELS[name].config)


def _matching(pattern: str) -> list[str]:
    names = list_models(pattern)
    if not names:
        raise SettingsError(f'no model matches {pattern!r}; try "*", or "pola_swin*"')
    return names


def _mechanisms(attention: Sequence[str]) -> list[str]:
    """The mechanisms to list; for "all", those of Table 1 first, in its order."""
    for name in attention:
        if name not in ("all", *mechanism_names()):
            hint = "give a PATTERN before --attention; " if "_" in name else nearest(name, mechanism_names())
            raise SettingsError(f"--attention has {name!r}; {hint}choose from all, {', '.join(mechanism_names())}")
    if "all" not in attention:
        return list(dict.fromkeys(attention))
    printed = list(dict.fromkeys(mechanism for _, mechanism in RIVALS))
    return [*printed, *(name for name in mechanism_names() if name not in printed)]


def _letters(attention: Sequence[str]) -> str:
    """The authors' letter for each stage: L for pola, S for softmax."""
    letters = {name: letter for letter, name in LETTERS.items()}
    return "".join(letters[name] for name in attention)
