"""Sets options of dataclasses from JSON or Python values and reports all problems at once. Needs no PyTorch."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from polaformer.errors import SettingsError, nearest
from polaformer.tasks.recipe import option_names

Options = TypeVar("Options")  # a frozen dataclass with `problems()`


def with_values(
    options: Options, values: Mapping[str, Any], *, change: Callable[[Any, Mapping[str, Any]], Any] | None = None
) -> Options:
    """A copy of the options with values from JSON or Python; raises SettingsError with all problems.

    change: how to make the copy; `with_changes` for what a user changes about a recipe, by default `replace`.
    """
    hints, names, problems = get_type_hints(type(options)), option_names(options), list[str]()
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in names:
            problems.append(f"there is no field {name!r}; {nearest(name, names)}the fields are {', '.join(names)}")
        else:
            try:
                changes[name] = _from_json(hints[name], value)
            except ValueError:
                problems.append(f"{name} is {json.dumps(value, default=str)}; give {describe_type(hints[name])}")
    found: Any = change(options, changes) if change else replace(options, **changes)  # type: ignore[type-var]
    problems += found.problems()
    if problems:
        raise SettingsError(problems)
    return found


def unwrap_optional(hint: Any) -> tuple[Any, bool]:
    """The type of an option without None, and whether None is allowed."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return next(one for one in kinds if one is not NoneType), NoneType in kinds


def describe_type(hint: Any) -> str:
    """The values that an option takes, in words."""
    kind, or_none = unwrap_optional(hint)
    if or_none:
        return f"{describe_type(kind)} or None"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        what = {int: "integers", float: "numbers", Path: "paths"}.get(inner[0], "strings")
        what = what if inner[-1] is ... or len(set(inner)) == 1 else "values"
        return f"{what} separated by spaces" if inner[-1] is ... else f"{len(inner)} {what} separated by spaces"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string", Path: "a path"}[kind]


def convert_tuple(kind: Any, values: Sequence[Any], convert: Callable[[Any, Any], Any]) -> tuple[Any, ...]:
    """The values, each converted to the type at its position; raises ValueError for too few or too many."""
    inner = get_args(kind)
    kinds = (inner[0],) * len(values) if inner[-1] is ... else inner
    if len(values) != len(kinds):
        raise ValueError
    return tuple(convert(one, value) for one, value in zip(kinds, values, strict=True))


def _from_json(hint: Any, value: Any) -> Any:
    kind, or_none = unwrap_optional(hint)
    if value is None and or_none:
        return None
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError
        return convert_tuple(kind, value, _from_json)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError
        return value
    if isinstance(value, bool) is not (kind is bool) or not isinstance(value, int | float if kind is float else kind):
        raise ValueError
    try:
        return kind(value)
    except OverflowError as error:
        raise ValueError from error
