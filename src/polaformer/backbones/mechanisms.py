"""Which attention each stage has, and the layer that each mechanism is published with."""

import inspect
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from torch import nn

from polaformer.attention import AttentionLayer, create_layer, names, option_names
from polaformer.attention.layer.checks import check_kernel
from polaformer.attention.mechanisms.bigbird import BigBirdCore
from polaformer.errors import nearest
from polaformer.ops.grid import Grid

LETTERS = {"L": "pola", "S": "softmax"}  # the authors' letters for a stage: linear, softmax
CONVOLVED = ("pola", "focused", "angular")  # published with a convolution of the values
WINDOW_ARGUMENTS = ("gate", "gate_init")  # of AttentionLayer, that windows can honour
PUBLISHED_EPS = 1e-6  # added to the normalisers in the authors' models


def mechanism_of_stages(attention: str | Sequence[str], num_stages: int) -> tuple[str, ...]:
    """One mechanism a stage.

    attention: one name for all stages ("pola"), a name a stage ("pola,pola,softmax,softmax", or a sequence), or the authors'
    letters ("LLSS"). Raises ValueError for anything else.
    """
    allowed = (
        f"give one of {', '.join(names())} for all stages, {num_stages} of them with commas between, "
        f"or {num_stages} of the letters L (pola) and S (softmax)"
    )
    if not isinstance(attention, str | Sequence):
        raise ValueError(f"attention is {attention!r}; {allowed}")
    if isinstance(attention, str):
        is_letters = len(attention) == num_stages and set(attention) <= set(LETTERS)
        parts = [LETTERS[letter] for letter in attention] if is_letters else [part.strip() for part in attention.split(",")]
    else:
        parts = list(attention)
    unknown = [part for part in parts if part not in names()]
    if unknown:
        hint = nearest(str(unknown[0]), names())
        raise ValueError(f"attention is {attention!r}, but there is no mechanism {unknown[0]!r}; {hint}{allowed}")
    if len(parts) == 1:
        parts = parts * num_stages
    if len(parts) != num_stages:
        raise ValueError(f"attention is {attention!r}, which names {len(parts)} stages of {num_stages}; {allowed}")
    return tuple(parts)


def create_attention(
    mechanism: str,
    dim: int,
    num_heads: int,
    *,
    grid: Grid,
    reduction: int = 1,
    num_prefix_tokens: int = 0,
    qkv_bias: bool = True,
    proj_drop: float = 0.0,
    alpha: float = 4.0,
    kernel_size: int = 5,
    options: Mapping[str, Any] | None = None,
) -> AttentionLayer:
    """The layer of a mechanism as it is published; see polaformer.attention.create_layer.

    grid: the native (height, width) of the tokens. alpha concerns pola, kernel_size what has a depthwise convolution.
    options: further arguments of the layer and its core. Each layer takes those that it can honour, so that a model may mix
        mechanisms; `check_attention_options` refuses what no layer takes.
    """
    _check_pola(alpha, kernel_size)
    settings: dict[str, Any] = {"reduction": reduction, "qkv_bias": qkv_bias, "proj_drop": proj_drop}
    if mechanism == "pola":
        settings |= {"alpha": alpha, "eps": PUBLISHED_EPS}
    if mechanism in ("pola", "focused") or (options or {}).get("conv") in ("depthwise", "deformable"):
        settings["kernel_size"] = kernel_size
    settings |= honoured(mechanism, options)
    return create_layer(mechanism, dim, num_heads, tokens=grid, num_prefix_tokens=num_prefix_tokens, **settings)


def honoured(mechanism: str, options: Mapping[str, Any] | None, *, in_windows: bool = False) -> dict[str, Any]:
    """Those of the options that a stage with this mechanism can honour.

    What would have no effect is left out: gate_init without a gate, kernel_size without a convolution.
    in_windows: softmax in Swin's windows. A convolution would mix tokens that meet in a shifted window only through the cyclic
    shift, and tables as large as the grid (key positions, a matrix gate) have no place there.
    """
    known = _known(mechanism, in_windows=in_windows)
    found = {name: value for name, value in (options or {}).items() if name in known}
    if in_windows and found.get("gate") == "matrix":
        del found["gate"]
    if found.get("gate", "linear" if mechanism == "pola" else None) is None:
        found.pop("gate_init", None)
    if found.get("conv", mechanism if mechanism in CONVOLVED else None) is None:
        found.pop("kernel_size", None)
    return found


def has_local_mlp(mechanism: str) -> bool:
    """Whether a mechanism's block is published with a depthwise convolution in its MLP."""
    return mechanism == "enhanced"


def tell_layers_apart(model: nn.Module, options: Mapping[str, Any] | None) -> None:
    """Gives each layer that draws a pattern once and for all a seed of its own, its number, unless one was given for all."""
    if "seed" not in (options or {}):
        cores = [module for module in model.modules() if isinstance(module, BigBirdCore)]
        for number, core in enumerate(cores):
            core.seed = number


def check_attention_options(mechanisms: Sequence[str], options: Any, *, windows: bool = False) -> None:
    """Raises for options that no stage can honour. windows: softmax stages attend in windows."""
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise TypeError(f"attention_options is a {type(options).__name__}; give a mapping from names of arguments")
    stages = [(name, windows and name == "softmax") for name in dict.fromkeys(mechanisms)]
    taken = {key for name, in_windows in stages for key in honoured(name, options, in_windows=in_windows)}
    taken |= {key for key in ("gate", "conv", "key_positions") if options.get(key, "") is None}  # every layer can do without
    refused = [f"{key}={value!r}" for key, value in options.items() if key not in taken]
    if refused:
        known = dict.fromkeys(key for name, in_windows in stages for key in _known(name, in_windows=in_windows))
        raise TypeError(
            f"attention_options holds {', '.join(refused)}, which no stage can honour; "
            f"{', '.join(name for name, _ in stages)} here takes {', '.join(known)}"
            f"{' (in windows: gate linear or None)' if windows else ''}"
        )


def _check_pola(alpha: Any, kernel_size: Any) -> None:
    """Raises for settings that no pola layer takes, also where there is none: a mistake should not wait for the next model."""
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < inf:
        raise ValueError(f"alpha is {alpha!r}; give a positive number (4 in the authors' models)")
    check_kernel(kernel_size)


def _known(mechanism: str, *, in_windows: bool) -> list[str]:
    return [*option_names(mechanism), *(WINDOW_ARGUMENTS if in_windows else _layer_arguments())]


def _layer_arguments() -> list[str]:
    given_here = ("dim", "num_heads", "core", "reduction", "num_prefix_tokens", "qkv_bias", "proj_drop")
    return [name for name in inspect.signature(AttentionLayer).parameters if name not in given_here]
