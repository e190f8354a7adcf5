"""What a user changes about a recipe, where one setting depends on others. Needs no PyTorch.

For settings that a user gives on the command line or in a sweep; a stored recipe is complete and is taken as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, TypeVar

Options = TypeVar("Options")  # a frozen dataclass


def with_changes(options: Options, given: Mapping[str, Any]) -> Options:
    """A copy of a recipe, or of other options, with the given values.

    attention_options: added to the recipe's own, which they replace by name; None drops those. With another mechanism
    (attention) the given ones are all there are. lr: a one-cycle schedule keeps its shape, so that warmup_lr and min_lr change
    in proportion, unless they are given.
    """
    changes = dict(given)
    _merge_attention_options(options, changes)
    _scale_one_cycle(options, changes)
    found: Any = replace(options, **changes)  # type: ignore[type-var]
    return found


def _merge_attention_options(options: Any, changes: dict[str, Any]) -> None:
    own = getattr(options, "attention_options", None)
    if not own:
        return
    if changes.get("attention", options.attention) != options.attention:
        changes.setdefault("attention_options", None)
    elif changes.get("attention_options") is not None:
        changes["attention_options"] = _merged(own, changes["attention_options"])


def _merged(own: Sequence[str], given: Sequence[str]) -> tuple[str, ...]:
    """All pairs NAME=VALUE: a given one in place of the own one of that name, then the others."""
    left = list(given)
    found = []
    for pair in own:
        same = [one for one in left if one.partition("=")[0] == pair.partition("=")[0]]
        found.append(same[0] if same else pair)
        left = [one for one in left if one not in same[:1]]
    return (*found, *left)


def _scale_one_cycle(options: Any, changes: dict[str, Any]) -> None:
    schedule = getattr(options, "schedule", None)
    if schedule == changes.get("schedule", schedule) == "one-cycle" and 0 < changes.get("lr", 0) < inf:
        for name in ("warmup_lr", "min_lr"):
            scaled = changes["lr"] * (getattr(options, name) / options.lr)
            changes.setdefault(name, float(f"{scaled:.12g}"))  # as one would write it: 4e-05, not 3.9999999999999996e-05
