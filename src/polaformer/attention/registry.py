"""Attention mechanisms by name, and the layer that each is published with; polaformer.attention.core defines cores."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from polaformer.attention.core import Core, Facts
from polaformer.attention.layer.attention_layer import AttentionLayer, PolaAttention
from polaformer.attention.layer.checks import check_key_positions, check_width
from polaformer.attention.layer.key_reduction import reduced_grid
from polaformer.attention.layer.window_attention import WindowAttention
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
from polaformer.errors import nearest
from polaformer.ops.allocator import keep_freed_memory
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
GIVEN_TO_WINDOWS = ("dim", "num_heads", "window", "core")
# Layer classes that create their core themselves, by its class.
_LAYERS: dict[Callable[..., Core], type[AttentionLayer]] = {PolaCore: PolaAttention}


def names() -> list[str]:
    """The names that `create` accepts, sorted."""
    return sorted(_CORES)


def facts(name: str) -> Facts:
    """The facts of the mechanism called `name`: cost, randomness, supported calls."""
    found: Facts = _core_type(name).facts  # type: ignore[attr-defined]
    return found


def option_names(name: str) -> list[str]:
    """The arguments of the mechanism called `name` other than num_heads and head_dim."""
    return [p for p in inspect.signature(_core_type(name)).parameters if p not in ("num_heads", "head_dim")]


def create(name: str, *, num_heads: int, head_dim: int, **options: Any) -> Core:
    """The core called `name` for `num_heads` heads of width `head_dim`; options are that core's own arguments.

    Mechanisms with parameters per token (`facts(name).needs_length`) require max_length, the largest number of tokens.
    """
    keep_freed_memory()
    core_type = _core_type(name)
    _check_options("attention.create", name, options, option_names(name))
    if facts(name).needs_length and "max_length" not in options:
        raise TypeError(f"attention.create: {name!r} has parameters per token; give max_length, the largest number of tokens")
    return core_type(num_heads=num_heads, head_dim=head_dim, **options)


def create_layer(
    name: str,
    dim: int,
    num_heads: int,
    *,
    tokens: int | Grid | None = None,
    num_prefix_tokens: int = 0,
    window: int | None = None,
    **options: Any,
) -> AttentionLayer:
    """The multi-head layer around the mechanism called `name`, with the parts it is published with unless options change them.

    `facts(name).published` lists them.
    tokens: the native number of tokens of a sequence, or (height, width) of a grid; None: no key positions, no max_length.
    window: the side of windows to attend in, without the published parts and without tokens; then a WindowAttention.
    options: arguments of AttentionLayer, or of WindowAttention, and of the core.
    """
    check_width(dim, num_heads)
    if window is not None:
        if tokens is not None or num_prefix_tokens:
            raise TypeError("attention.create_layer: windows support neither tokens nor num_prefix_tokens; leave them out")
        return _window_layer(name, dim, num_heads, window, options)
    tokens, about = check_key_positions(tokens), facts(name)
    layer_arguments = set(inspect.signature(AttentionLayer).parameters) - {"dim", "num_heads", "core"}
    core_arguments = option_names(name)
    _check_options("attention.create_layer", name, options, [*core_arguments, *sorted(layer_arguments)])
    if options.get("reduction", 1) != 1 and not about.cross:
        raise ValueError(
            f"attention.create_layer: reduction is {options['reduction']}, but queries and keys of {name!r} must be the same "
            "tokens; give reduction=1"
        )
    if about.needs_length and tokens is not None and "max_length" not in options:
        options = _sizes(about.sized_by, tokens, num_prefix_tokens, options.get("reduction", 1)) | options
    settings = about.published.layer_options(tokens) | options | {"num_prefix_tokens": num_prefix_tokens}
    if layer_type := _LAYERS.get(_core_type(name)):
        return layer_type(dim, num_heads, **settings)
    core_options = {key: settings.pop(key) for key in core_arguments if key in settings}
    core = create(name, num_heads=num_heads, head_dim=dim // num_heads, **core_options)
    return AttentionLayer(dim, num_heads, core, **settings)


def _window_layer(name: str, dim: int, num_heads: int, window: int, options: dict[str, Any]) -> WindowAttention:
    of_core = option_names(name)
    of_layer = [one for one in inspect.signature(WindowAttention).parameters if one not in (*GIVEN_TO_WINDOWS, *of_core)]
    _check_options("attention.create_layer", name, options, [*of_core, *of_layer])
    core_options = {key: value for key, value in options.items() if key in of_core}
    core = create(name, num_heads=num_heads, head_dim=dim // num_heads, **core_options)
    return WindowAttention(dim, num_heads, window, core=core, **{key: options[key] for key in options if key in of_layer})


def _sizes(arguments: Sequence[str], tokens: int | Grid, num_prefix_tokens: int, reduction: int) -> dict[str, int]:
    """The given arguments for a native size: numbers of tokens and, on a grid, of keys; prefix tokens are not reduced."""
    if isinstance(tokens, int):
        return {"max_length": num_prefix_tokens + tokens}
    height, width = reduced_grid(tokens, reduction)
    sizes = {"max_length": tokens[0] * tokens[1], "max_keys": height * width}
    return {name: num_prefix_tokens + sizes[name] for name in arguments}


def _core_type(name: str) -> Callable[..., Core]:
    if not isinstance(name, str) or name not in _CORES:
        hint = nearest(str(name), _CORES)
        raise ValueError(f"attention: unknown mechanism {name!r}; {hint}choose one of {', '.join(names())}")
    return _CORES[name]


def _check_options(where: str, name: str, given: dict[str, Any], known: list[str]) -> None:
    unknown = [option for option in given if option not in known]
    if unknown:
        allowed = ", ".join(known) or "none"
        raise TypeError(f"{where}: {name!r} does not take {', '.join(unknown)}; its options are: {allowed}")
