"""Registers all our models in timm, except under names that timm already has."""

from collections.abc import Callable
from typing import Any

from timm.models import is_model, register_model
from torch import nn

from polaformer.backbones.registry import MODELS, build
from polaformer.backbones.registry import default_cfgs as default_cfgs  # timm looks for it in this module


def register_all() -> None:
    """Makes `timm.create_model("pola_swin_tiny", …)` work."""
    for name in MODELS:
        if not is_model(name):
            globals()[name] = register_model(_entry_point(name))


def _entry_point(name: str) -> Callable[..., nn.Module]:
    def entry(pretrained: bool = False, **options: Any) -> nn.Module:
        return build(name, pretrained=pretrained, **options)

    entry.__name__, entry.__doc__ = name, f"{name}: see polaformer.create_model."
    return entry
