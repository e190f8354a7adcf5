"""The base of what weights files store about detectors and segmenters: the backbone, the classes, the checks, JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from math import isfinite
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from polaformer.backbones.fitting import misfits
from polaformer.errors import SettingsError, nearest
from polaformer.ops.grid import Grid
from polaformer.tasks.dense.features import STRIDES, strides_of
from polaformer.weights.errors import Misfits

MAX_OF_BACKBONE = 65_536  # for every number among its arguments
MAX_BLOCKS = 1000
NOT_OF_DESCRIPTION = ("num_classes", "global_pool", "feature_norms", "checkpoint", "features_only", "out_indices", "in_chans")


@dataclass(frozen=True, kw_only=True)
class DenseDescription:
    """The arguments of a model around a backbone. Raises SettingsError for anything implausible.

    backbone: the name of a pyramid. backbone_options: other arguments of `create_model`, as JSON can hold them.
    """

    noun: ClassVar[str]  # what is described
    choices: ClassVar[Mapping[str, Sequence[Any]]]  # the allowed values of fields
    most: ClassVar[Mapping[str, int]]  # the largest value of fields with integers from 1 on
    ranges: ClassVar[Mapping[str, float]]  # the largest value of fields with numbers from 0 on
    positive: ClassVar[tuple[str, ...]] = ()  # those of them that may not be 0
    optional: ClassVar[tuple[str, ...]] = ()  # those of either that may be None

    backbone: str
    num_classes: int
    backbone_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = [*self._wrong_choices(), *self.problems(), *self._wrong_numbers(), *self._wrong_backbone()]
        if problems:
            raise SettingsError(problems)

    def problems(self) -> list[str]:
        """Problems that a subclass finds in its own fields, one line each."""
        return []

    def build(self) -> nn.Module:
        """A new model."""
        raise NotImplementedError(f"{type(self).__name__} does not implement build()")

    def build_for(self, native: Grid | None) -> nn.Module:
        """A new model whose tables are for images of that size; None: as described."""
        if native is None:
            return self.build()
        return replace(self, backbone_options={**self.backbone_options, "img_size": native}).build()

    def misfits(self, state: Mapping[str, Tensor]) -> Misfits:
        """What prevents the model from having these parameters; allocates no memory for a model as large as described."""
        with torch.device("meta"):
            return misfits(dict(state), self.build())

    def to_json(self) -> str:
        """The description as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`; raises SettingsError for anything else."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SettingsError(f"the description of the {cls.noun} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise SettingsError(f"the description of the {cls.noun} is a {type(found).__name__}; give a JSON object")
        known = [one.name for one in fields(cls)]
        needed = [one.name for one in fields(cls) if one.default is MISSING and one.default_factory is MISSING]
        problems = [
            f"{cls.noun}: unknown key {key!r}; {nearest(key, known)}it has {', '.join(known)}"
            for key in found
            if key not in known
        ]
        problems += [f"{cls.noun}: {name} is missing" for name in needed if name not in found]
        if problems:
            raise SettingsError(problems)
        return cls(**found)

    def arguments_of_backbone(self) -> dict[str, Any]:
        """The options of the backbone with tuples for the lists of JSON."""
        return {name: tuple(value) if isinstance(value, list) else value for name, value in self.backbone_options.items()}

    def _wrong_choices(self) -> list[str]:
        found = []
        for name, choices in self.choices.items():
            value = getattr(self, name)
            if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
                hint = nearest(value, [str(one) for one in choices]) if isinstance(value, str) else ""
                found.append(f"{name} is {value!r}; {hint}choose one of {', '.join(map(str, choices))}")
        return found

    def _wrong_numbers(self) -> list[str]:
        found = []
        for name, most in self.most.items():
            value = getattr(self, name)
            if not (_is_integer(value) and 1 <= value <= most) and not self._may_be_none(name):
                found.append(f"{name} is {value!r}; give an integer from 1 to {most}")
        for name, largest in self.ranges.items():
            value = getattr(self, name)
            is_allowed = _is_number(value) and 0 <= value <= largest and (value > 0 or name not in self.positive)
            if not is_allowed and not self._may_be_none(name):
                found.append(f"{name} is {value!r}; give a number from 0 to {largest:g}")
        return found

    def _may_be_none(self, name: str) -> bool:
        return getattr(self, name) is None and name in self.optional

    def _wrong_backbone(self) -> list[str]:
        options = self.backbone_options
        if not isinstance(self.backbone, str):
            return [f"backbone is {self.backbone!r}; give the name of a model"]
        if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
            return [f"backbone_options is {options!r}; give a mapping from argument names to values"]
        if refused := [name for name in options if name in NOT_OF_DESCRIPTION]:
            return [f"backbone_options has {', '.join(refused)}, which a {self.noun} sets itself; leave them out"]
        if too_large := [name for name, value in options.items() if _largest(value) > MAX_OF_BACKBONE]:
            return [
                f"backbone_options has {name}={options[name]!r}; give numbers up to {MAX_OF_BACKBONE}" for name in too_large
            ]
        depths = options.get("depths", 1)
        if _total(depths) > MAX_BLOCKS:
            return [f"backbone_options has depths={depths!r}; give at most {MAX_BLOCKS} blocks"]
        try:
            strides = strides_of(self.backbone, self.arguments_of_backbone())
        except SettingsError as error:
            return error.problems
        if strides != STRIDES:
            return [
                f"the stages of the backbone have strides {strides}, but {self.noun}s need {STRIDES}; give four, and "
                "patch_size 4"
            ]
        return []


def _total(value: Any) -> float:
    """The sum of the numbers in a list, or the number."""
    return sum(one for one in (value if isinstance(value, list | tuple) else [value]) if _is_number(one))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _largest(value: Any) -> float:
    """The largest number in a value as JSON holds it."""
    if isinstance(value, Mapping):
        return max((_largest(one) for one in value.values()), default=0.0)
    if isinstance(value, list | tuple):
        return max((_largest(one) for one in value), default=0.0)
    return abs(value) if _is_number(value) else 0.0
