"""Recipes from what a user typed and from JSON, with everything that is wrong told at once."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from polaformer.errors import SettingsError, nearest
from polaformer.recipes.classification import Classification, option_names


def with_words(
    recipe: Classification, words: Sequence[str], others: Mapping[str, Any] | None = None
) -> tuple[Classification, dict[str, Any]]:
    """The recipe changed by `--name value …` words, and the values of `others`, name → type, that were among them.

    Raises SettingsError with everything that is wrong.
    """
    others, problems = others or {}, list[str]()
    fields = get_type_hints(type(recipe))
    hints = {name: fields[name] for name in option_names(recipe)} | dict(others)
    found: dict[str, Any] = {}
    for name, values in _options(words, problems).items():
        if name not in hints:
            near = nearest(_flag(name), [_flag(one) for one in hints])
            problems.append(f"there is no option {_flag(name)}; {near}polaformer train {recipe.name} --help lists them")
            continue
        try:
            found[name] = _from_words(hints[name], values)
        except ValueError:
            problems.append(f"{_flag(name)} is {' '.join(values) or 'nothing'}; give {wanted(hints[name])}")
    mine = {name: value for name, value in found.items() if name not in others}
    return _checked(recipe, mine, problems), {name: value for name, value in found.items() if name in others}


def with_values(recipe: Classification, values: Mapping[str, Any]) -> Classification:
    """The recipe changed by values from JSON or Python; raises SettingsError with everything that is wrong."""
    hints, problems = get_type_hints(type(recipe)), list[str]()
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in option_names(recipe):
            problems.append(
                f"there is no field {name!r}; {nearest(name, option_names(recipe))}it has {', '.join(option_names(recipe))}"
            )
        else:
            try:
                changes[name] = _from_json(hints[name], value)
            except ValueError:
                problems.append(f"{name} is {json.dumps(value, default=str)}; give {wanted(hints[name])}")
    return _checked(recipe, changes, problems)


def as_values(recipe: Classification) -> dict[str, Any]:
    """The options of a recipe, for JSON."""
    return {name: getattr(recipe, name) for name in option_names(recipe)}


def wanted(hint: Any) -> str:
    """What a field takes, in words."""
    if get_origin(hint) is UnionType:
        return " or ".join(wanted(one) for one in get_args(hint))
    if get_origin(hint) is tuple:
        inner = get_args(hint)
        kind = {int: "whole numbers", str: "words"}.get(inner[0], "numbers")
        return f"{kind} with spaces between them" if inner[-1] is ... else f"{len(inner)} {kind} with a space between them"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "None"}[hint]


def _checked(recipe: Classification, changes: dict[str, Any], problems: list[str]) -> Classification:
    changed = replace(recipe, **changes)
    problems = problems + changed.problems()
    if problems:
        raise SettingsError(problems)
    return changed


def _options(words: Sequence[str], problems: list[str]) -> dict[str, list[str]]:
    """The words after each option; what follows no option is a problem."""
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name in found:
                problems.append(f"{_flag(name)} is given twice")
            current = found[name] = [value] if equals else []
        elif current is None:
            problems.append(f"{word!r} stands alone; options are --name VALUE")
        else:
            current.append(word)
    return found


def _from_words(hint: Any, words: list[str]) -> Any:
    kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    if NoneType in kinds and words == ["None"]:
        return None
    kind = next(one for one in kinds if one is not NoneType)
    if get_origin(kind) is tuple:
        return _tuple(kind, [_from_word(get_args(kind)[0], part) for word in words for part in word.split(",")])
    if kind is bool and not words:
        return True
    if len(words) != 1:
        raise ValueError
    return _from_word(kind, words[0])


def _from_word(kind: Any, word: str) -> Any:
    if kind is bool:
        if word.lower() not in ("true", "false"):
            raise ValueError
        return word.lower() == "true"
    return kind(word)


def _from_json(hint: Any, value: Any) -> Any:
    kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    if value is None and NoneType in kinds:
        return None
    kind = next(one for one in kinds if one is not NoneType)
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError
        return _tuple(kind, [_from_json(get_args(kind)[0], one) for one in value])
    if isinstance(value, bool) is not (kind is bool) or not isinstance(value, int | float if kind is float else kind):
        raise ValueError
    try:
        return kind(value)
    except OverflowError as error:
        raise ValueError from error


def _tuple(kind: Any, values: list[Any]) -> tuple[Any, ...]:
    inner = get_args(kind)
    if inner[-1] is not ... and len(values) != len(inner):
        raise ValueError
    return tuple(values)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
