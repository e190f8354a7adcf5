"""The arguments that all backbones share, checked once, and the settings of each stage that follow from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any, ClassVar, NamedTuple, Self

import torch
from timm.layers import calculate_drop_path_rates

from polaformer.arguments import check_integer, check_number
from polaformer.attention import AttentionLayer, facts, names, option_names
from polaformer.attention.layer.checks import check_kernel
from polaformer.backbones.token_layout import TokenLayout
from polaformer.errors import nearest
from polaformer.ops.grid import Grid

LETTERS = {"L": "pola", "S": "softmax"}  # the authors' letters for a stage: linear, softmax
GRID_CONVOLUTIONS = ("depthwise", "channelwise", "deformable")  # those whose kernel is the model's `kernel_size`
WINDOW_OPTIONS = ("gate", "gate_init")  # arguments of AttentionLayer that windows support
WHERE = "backbone"


class StageConfig(NamedTuple):
    """The settings of a stage."""

    mechanism: str
    in_chans: int
    dim: int
    num_heads: int
    mlp_ratio: float
    stride: int
    reduction: int  # pixels per token, along a side
    grid: Grid  # the native (height, width) of its tokens
    drop_paths: Sequence[float]  # one per block


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """The arguments of a backbone. Those with one value per stage also accept one value for all stages.

    attention: one mechanism for all stages, one per stage ("pola,pola,softmax,softmax"), or the authors' letters ("LLSS").
    alpha: of pola. kernel_size: of depthwise and deformable convolutions.
    attention_options: further arguments of the attention layers and their cores (gate, conv, polarity, backend, …), for every
        stage that supports them; one that no stage supports is refused. Windows support gate, gate_init and their core's
        arguments.
    feature_norms: a LayerNorm for the features of each stage, or each block of DeiT, for dense tasks.
    """

    img_size: int | Grid = 224
    in_chans: int = 3
    num_classes: int = 1000
    attention: str | Sequence[str] = "pola"
    dims: int | Sequence[int]
    depths: int | Sequence[int]
    num_heads: int | Sequence[int]
    mlp_ratios: float | Sequence[float] = 4
    patch_size: int
    alpha: float = 4.0
    kernel_size: int = 5
    attention_options: Mapping[str, Any] | None = None
    qkv_bias: bool = True
    drop_rate: float = 0.0
    proj_drop_rate: float = 0.0
    drop_path_rate: float = 0.0
    global_pool: str = "avg"
    feature_norms: bool = False

    has_windows: ClassVar[bool] = False  # whether mechanisms that can attend in windows do so

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """From the keyword arguments of a backbone; raises TypeError for those that it does not have."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in options if name not in known]
        if unknown:
            hint = nearest(unknown[0], known)
            raise TypeError(f"{WHERE}: unexpected keyword argument {unknown[0]!r}; {hint}it takes {', '.join(known)}")
        return cls(**options)

    def __post_init__(self) -> None:
        for name, least in (("patch_size", 1), ("in_chans", 1), ("num_classes", 0)):
            check_integer(WHERE, name, getattr(self, name), least)
        for name in ("drop_rate", "proj_drop_rate", "drop_path_rate"):
            check_number(WHERE, name, getattr(self, name), below=1.0)
        check_number(WHERE, "alpha", self.alpha, above=True, hint="4 in the authors' models")
        check_kernel(self.kernel_size)
        self._check_attention_options()

    @property
    def num_stages(self) -> int:
        """One per entry of `dims`."""
        if not isinstance(self.dims, Sequence) or isinstance(self.dims, str) or not self.dims:
            raise ValueError(f"{WHERE}: dims is {self.dims!r}; give the channels of each stage, such as (64, 128, 320, 512)")
        return len(self.dims)

    @property
    def num_outputs(self) -> int:
        """The number of feature maps that `features_only` returns by default."""
        return self.num_stages

    @property
    def grid(self) -> Grid:
        """The native (height, width) of the images."""
        return as_grid("img_size", self.img_size)

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The mechanism of each stage."""
        return stage_mechanisms(self.attention, self.num_stages)

    def per_stage(self, name: str, *, integers: bool = True) -> tuple[Any, ...]:
        """The field `name` as one positive number per stage."""
        values = getattr(self, name)
        found = tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else (values,) * self.num_stages
        if len(found) != self.num_stages:
            raise ValueError(
                f"{WHERE}: {name} is {values!r}, {len(found)} value(s) for {self.num_stages} stage(s); "
                "give one per stage, or one for all"
            )
        kinds = int if integers else int | float
        if any(isinstance(value, bool) or not isinstance(value, kinds) or value <= 0 for value in found):
            raise ValueError(f"{WHERE}: {name} is {values!r}; give positive {'integers' if integers else 'numbers'}")
        return found

    def stages(self) -> list[StageConfig]:
        """The settings of each stage. Drop path rates grow linearly over all blocks."""
        dims, depths, num_heads = (self.per_stage(name) for name in ("dims", "depths", "num_heads"))
        mlp_ratios = self.per_stage("mlp_ratios", integers=False)
        drop_paths = calculate_drop_path_rates(self.drop_path_rate, list(depths), stagewise=True)
        layout, reduction, found = TokenLayout(self.grid), 1, []
        for i, mechanism in enumerate(self.mechanisms):
            in_chans, stride = (dims[i - 1], 2) if i else (self.in_chans, self.patch_size)
            layout, reduction = layout.shrunk(stride), reduction * stride
            sizes = (in_chans, dims[i], num_heads[i], mlp_ratios[i], stride, reduction, layout.grid, drop_paths[i])
            found.append(StageConfig(mechanism, *sizes))
        return found

    def in_windows(self, mechanism: str) -> bool:
        """Whether stages with this mechanism attend within windows."""
        return self.has_windows and facts(mechanism).in_windows

    def layer_options(self, mechanism: str) -> dict[str, Any]:
        """The arguments of `create_layer` that all layers of a mechanism share."""
        shared: dict[str, Any] = {"qkv_bias": self.qkv_bias, "proj_drop": self.proj_drop_rate}
        if not self.in_windows(mechanism):
            published = facts(mechanism).published
            shared |= dict(published.core_options)
            shared |= {name: getattr(self, name) for name in facts(mechanism).set_by_model}
            if {published.conv, (self.attention_options or {}).get("conv")} & set(GRID_CONVOLUTIONS):
                shared["kernel_size"] = self.kernel_size
        return shared | self._supported_options(mechanism)

    def _supported_options(self, mechanism: str) -> dict[str, Any]:
        """The attention_options that stages with this mechanism support.

        Options without effect are left out: gate_init without a gate, kernel_size without a convolution. In windows a
        convolution would mix tokens that are neighbours only by the cyclic shift, and tables as large as the grid (key
        positions, a matrix gate) do not apply.
        """
        known = self._known_options(mechanism)
        found = {name: value for name, value in (self.attention_options or {}).items() if name in known}
        if self.in_windows(mechanism) and found.get("gate") == "matrix":
            del found["gate"]
        parts = facts(mechanism).published.with_options(found)
        if parts.gate is None:
            found.pop("gate_init", None)
        if parts.gate != "linear":
            found.pop("gate_bias_init", None)
        if parts.conv is None:
            found.pop("kernel_size", None)
        return found

    def _known_options(self, mechanism: str) -> list[str]:
        given_here = ("dim", "num_heads", "core", "reduction", "num_prefix_tokens", "qkv_bias", "proj_drop")
        of_layer = [name for name in signature(AttentionLayer).parameters if name not in given_here]
        return [*option_names(mechanism), *(WINDOW_OPTIONS if self.in_windows(mechanism) else of_layer)]

    def _check_attention_options(self) -> None:
        """Raises for options that no stage supports."""
        mechanisms, options = list(dict.fromkeys(self.mechanisms)), self.attention_options
        if options is None:
            return
        if not isinstance(options, Mapping):
            raise TypeError(f"{WHERE}: attention_options is {options!r}; give a mapping from argument names to values")
        supported = {key for name in mechanisms for key in self._supported_options(name)}
        supported |= {key for key in ("gate", "conv", "key_positions") if options.get(key, "") is None}  # any layer omits them
        refused = [f"{key}={value!r}" for key, value in options.items() if key not in supported]
        if refused:
            known = dict.fromkeys(key for name in mechanisms for key in self._known_options(name))
            raise TypeError(
                f"{WHERE}: attention_options has {', '.join(refused)}, which no stage supports; {', '.join(mechanisms)} here "
                f"takes {', '.join(known)}{' (in windows: gate linear or None)' if self.has_windows else ''}"
            )


def stage_mechanisms(attention: str | Sequence[str], num_stages: int) -> tuple[str, ...]:
    """One mechanism per stage, from the argument `attention` of BackboneConfig; raises ValueError for anything else."""
    allowed = (
        f"give one of {', '.join(names())} for all stages, {num_stages} of them separated by commas, "
        f"or {num_stages} of the letters L (pola) and S (softmax)"
    )
    if not isinstance(attention, str | Sequence):
        raise ValueError(f"{WHERE}: attention is {attention!r}; {allowed}")
    if isinstance(attention, str):
        is_letters = len(attention) == num_stages and set(attention) <= set(LETTERS)
        parts = [LETTERS[letter] for letter in attention] if is_letters else [part.strip() for part in attention.split(",")]
    else:
        parts = list(attention)
    unknown = [part for part in parts if part not in names()]
    if unknown:
        hint = nearest(str(unknown[0]), names())
        raise ValueError(f"{WHERE}: attention is {attention!r}: unknown mechanism {unknown[0]!r}; {hint}{allowed}")
    if len(parts) == 1:
        parts = parts * num_stages
    if len(parts) != num_stages:
        numbers = f"{len(parts)} mechanism(s) for {num_stages} stage(s)"
        raise ValueError(f"{WHERE}: attention is {attention!r}, which names {numbers}; {allowed}")
    return tuple(parts)


def as_grid(name: str, size: Any) -> Grid:
    """A size given as a number or as (height, width); raises unless both are positive integers."""
    pair = tuple(size) if isinstance(size, Sequence | torch.Size) and not isinstance(size, str) else (size, size)
    if len(pair) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in pair):
        raise ValueError(f"{WHERE}: {name} is {size!r}; give a number of pixels (an integer ≥ 1), or (height, width)")
    return pair[0], pair[1]
