"""The attention mechanisms by name, and the layer that each is published in; polaformer.attention.core says what a core is."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from polaformer.attention.core import Core, Facts
from polaformer.attention.layer.attention_layer import AttentionLayer, PolaAttention
from polaformer.attention.layer.checks import check_key_positions, check_width
from polaformer.attention.layer.key_reduction import reduced_grid
from polaformer.attention.mechanisms.angular import AngularCore
from polaformer.attention.mechanisms.bigbird import BigBirdCore
from polaformer.attention.mechanisms.cosformer import CosformerCore
from polaformer.attention.mechanisms.efficient import EfficientCore
from polaformer.attention.mechanisms.enhanced import EnhancedCore
from polaformer.attention.mechanisms.focused import FocusedCore
from polaformer.attention.mechanisms.hedgehog import HedgehogCore
from polaformer.attention.mechanisms.hydra import HydraCore
from polaformer.attention.mechanisms.informer import InformerCore
from polaformer.attention.mechanisms.kernelized import KernelizedCore
from polaformer.attention.mechanisms.linear import LinearCore
from polaformer.attention.mechanisms.linformer import LinformerCore
from polaformer.attention.mechanisms.local import LocalCore
from polaformer.attention.mechanisms.longformer import LongformerCore
from polaformer.attention.mechanisms.mobile import MobileCore
from polaformer.attention.mechanisms.nystrom import NystromCore
from polaformer.attention.mechanisms.performer import PerformerCore
from polaformer.attention.mechanisms.pola import PolaCore
from polaformer.attention.mechanisms.reformer import ReformerCore
from polaformer.attention.mechanisms.skyformer import SkyformerCore
from polaformer.attention.mechanisms.softmax import SoftmaxCore
from polaformer.attention.mechanisms.synthesizer import SynthesizerCore
from polaformer.ops.grid import Grid

_CORES: dict[str, Callable[..., Core]] = {
    "angular": AngularCore,
    "bigbird": BigBirdCore,
    "cosformer": CosformerCore,
    "efficient": EfficientCore,
    "enhanced": EnhancedCore,
    "focused": FocusedCore,
    "hedgehog": HedgehogCore,
    "hydra": HydraCore,
    "informer": InformerCore,
    "kernelized": KernelizedCore,
    "linear": LinearCore,
    "linformer": LinformerCore,
    "local": LocalCore,
    "longformer": LongformerCore,
    "mobile": MobileCore,
    "nystrom": NystromCore,
    "performer": PerformerCore,
    "pola": PolaCore,
    "reformer": ReformerCore,
    "skyformer": SkyformerCore,
    "softmax": SoftmaxCore,
    "synthesizer": SynthesizerCore,
}


def names() -> list[str]:
    """The names that `create` knows, sorted."""
    return sorted(_CORES)


def facts(name: str) -> Facts:
    """What is known of the mechanism called `name`: cost, randomness, which calls it takes."""
    found: Facts = _core_type(name).facts  # type: ignore[attr-defined]
    return found


def option_names(name: str) -> list[str]:
    """The arguments of the mechanism called `name` beside num_heads and head_dim."""
    return [p for p in inspect.signature(_core_type(name)).parameters if p not in ("num_heads", "head_dim")]


def create(name: str, *, num_heads: int, head_dim: int, **options: Any) -> Core:
    """The core called `name` for `num_heads` heads of width `head_dim`; options are that core's own arguments.

    max_length, the largest number of tokens, is one of them for mechanisms with parameters for each token
    (`facts(name).needs_length`), and has to be given there.
    """
    make = _core_type(name)
    _check_options("attention.create", name, options, option_names(name))
    if facts(name).needs_length and "max_length" not in options:
        raise TypeError(f"attention.create: {name!r} has parameters for each token; give max_length, their largest number")
    return make(num_heads=num_heads, head_dim=head_dim, **options)


def create_layer(
    name: str, dim: int, num_heads: int, *, tokens: int | Grid | None = None, num_prefix_tokens: int = 0, **options: Any
) -> AttentionLayer:
    """The multi-head layer around the mechanism called `name`, with what it is published with unless options say otherwise.

    That is, for pola: gate, 5×5 depthwise convolution, key positions; for focused: the same without the gate; for angular: a
    convolution over the sequence with 9 taps; for the others: nothing beside the projections.
    tokens: the native number of tokens of a sequence, or the (height, width) of a grid; without it, nothing is sized by it.
    options: arguments of AttentionLayer and of the core.
    """
    check_width(dim, num_heads)
    tokens = check_key_positions(tokens)
    layer_arguments = set(inspect.signature(AttentionLayer).parameters) - {"dim", "num_heads", "core"}
    own = option_names(name)
    _check_options("attention.create_layer", name, options, [*own, *sorted(layer_arguments)])
    if options.get("reduction", 1) != 1 and not facts(name).cross:
        raise ValueError(
            f"attention.create_layer: {name!r} relates the tokens of one sequence and cannot take keys reduced by "
            f"{options['reduction']}; give reduction=1"
        )
    settings = _published_layer(name, tokens) | options | {"num_prefix_tokens": num_prefix_tokens}
    if name == "pola":
        return PolaAttention(dim, num_heads, **settings)
    if facts(name).needs_length and "max_length" not in settings and tokens is not None:
        settings |= _lengths(own, tokens, num_prefix_tokens, settings.get("reduction", 1)) | options
    core_settings = {key: settings.pop(key) for key in own if key in settings}
    core = create(name, num_heads=num_heads, head_dim=dim // num_heads, **core_settings)
    return AttentionLayer(dim, num_heads, core, **settings)


def _lengths(own: list[str], tokens: int | Grid, num_prefix_tokens: int, reduction: int) -> dict[str, int]:
    """The native number of tokens, and of keys for a mechanism that asks for it; prefix tokens are not reduced."""
    cells = tokens if isinstance(tokens, int) else tokens[0] * tokens[1]
    lengths = {"max_length": num_prefix_tokens + cells}
    if "max_keys" in own and not isinstance(tokens, int):
        height, width = reduced_grid(tokens, reduction)
        lengths["max_keys"] = num_prefix_tokens + height * width
    return lengths


def _published_layer(name: str, tokens: int | Grid | None) -> dict[str, Any]:
    """The arguments of AttentionLayer that a mechanism is published with."""
    if name == "focused":
        return {"conv": "depthwise", "kernel_size": 5, "key_positions": tokens}
    if name == "angular":
        return {"conv": "sequence", "kernel_size": 9}
    return {"key_positions": tokens} if name == "pola" else {}


def _core_type(name: str) -> Callable[..., Core]:
    if not isinstance(name, str) or name not in _CORES:
        near = get_close_matches(str(name), _CORES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"attention: there is no mechanism {name!r}; choose one of {', '.join(names())}{hint}")
    return _CORES[name]


def _check_options(where: str, name: str, given: dict[str, Any], known: list[str]) -> None:
    unknown = [option for option in given if option not in known]
    if unknown:
        allowed = ", ".join(known) or "none"
        raise TypeError(f"{where}: {name!r} does not take {', '.join(unknown)}; its options are: {allowed}")
