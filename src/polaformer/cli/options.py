"""Options of commands that depend on a recipe or a task: dataclasses, from which both the parser and the help are made.

tyro, which parses all other commands and writes the help of these, stops at the first wrong value; here all mistakes are told
at once.
"""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import fields, make_dataclass, replace
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import tyro

from polaformer.errors import SettingsError, nearest
from polaformer.tasks.options import convert_tuple, describe_type, unwrap_optional
from polaformer.tasks.recipe import option_names

BOOLEANS = ("true", "false")


def parse(words: Sequence[str], *defaults: Any, program: str) -> tuple[Any, ...]:
    """The dataclasses with the options that the words give; raises SettingsError with everything that is wrong.

    A field that is marked as POSITIONAL takes the words that belong to no option.
    """
    declared = _declared(defaults)
    given, loose, problems = _given(words, declared, program)
    if declared.positional is not None:
        given[declared.positional] = tuple(loose)
    else:
        problems += [f"{word!r} stands alone; options are --name VALUE" for word in loose]
    found = []
    for one in defaults:
        changed = replace(one, **{name: value for name, value in given.items() if name in option_names(one)})
        problems += changed.problems()
        found.append(changed)
    if problems:
        raise SettingsError(problems)
    return tuple(found)


def loose_words(words: Sequence[str], *defaults: Any) -> list[str]:
    """The words that belong to no option of the dataclasses."""
    return _options(words, _declared(defaults), [])[1]


def value_of(name: str, words: Sequence[str]) -> str | None:
    """The word after an option, before it is known which other options there are; None where it is not given."""
    for place, word in enumerate(words):
        if word == flag(name) and place + 1 < len(words):
            return words[place + 1]
        if word.startswith(f"{flag(name)}="):
            return word.partition("=")[2]
    return None


def wants_help(words: Iterable[str]) -> bool:
    """Whether help is asked for."""
    return not {"-h", "--help"}.isdisjoint(words)


def print_help(program: str, about: str, *defaults: Any) -> int:
    """Prints what the options are, and returns the exit code."""
    together: Any = make_dataclass("Options", [], bases=tuple(type(one) for one in reversed(defaults)), frozen=True)
    values = {field.name: getattr(one, field.name) for one in defaults for field in fields(one)}
    try:
        said: dict[str, Any] = {
            "prog": program,
            "description": inspect.cleandoc(about),
            "config": (tyro.conf.FlagCreatePairsOff,),
        }
        tyro.cli(together, default=together(**values), args=["--help"], **said)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def flag(name: str) -> str:
    """The option of a field."""
    return f"--{name.replace('_', '-')}"


class _Declared(NamedTuple):
    """The options of some dataclasses: their types by name, and which one is positional."""

    hints: dict[str, Any]
    positional: str | None


def _declared(defaults: Iterable[Any]) -> _Declared:
    hints: dict[str, Any] = {}
    positional = None
    for one in defaults:
        types = get_type_hints(type(one))
        hints |= {name: types[name] for name in option_names(one)}
        positional = next((field.name for field in fields(one) if field.metadata.get("positional")), positional)
    return _Declared({name: hint for name, hint in hints.items() if name != positional}, positional)


def _given(words: Sequence[str], declared: _Declared, program: str) -> tuple[dict[str, Any], list[str], list[str]]:
    """The values of options, the words that belong to none, and what is wrong."""
    found: dict[str, Any] = {}
    problems: list[str] = []
    hints = declared.hints
    given, loose = _options(words, declared, problems)
    for name, values in given.items():
        if name not in hints:
            near = nearest(flag(name), [flag(one) for one in hints])
            problems.append(f"there is no option {flag(name)}; {near}{program} --help lists them")
            continue
        try:
            found[name] = _value(hints[name], values)
        except ValueError:
            problems.append(f"{flag(name)} is {' '.join(values) or 'nothing'}; give {describe_type(hints[name])}")
    return found, loose, problems


def _options(words: Sequence[str], declared: _Declared, problems: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The words after each option, as many as it takes, and the others."""
    found: dict[str, list[str]] = {}
    loose: list[str] = []
    current: str | None = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            current = name.replace("-", "_")
            is_off = _is_flag(declared, current.removeprefix("no_")) and current not in declared.hints and not equals
            current = current.removeprefix("no_") if is_off else current
            if current in found:
                problems.append(f"{flag(current)} is given twice")
            found[current] = [value] if equals else ["false"] * is_off
        elif current is not None and _takes(declared, current, found[current], word):
            found[current].append(word)
        else:
            loose.append(word)
            current = None
    return found, loose


def _takes(declared: _Declared, name: str, taken: list[str], word: str) -> bool:
    """Whether an option that has taken some words takes one more; where none can stand alone, it takes all up to the next."""
    hint = declared.hints.get(name)
    if declared.positional is None or (hint is not None and get_origin(unwrap_optional(hint)[0]) is tuple):
        return True
    return not taken and (not _is_flag(declared, name) or word.lower() in BOOLEANS)


def _is_flag(declared: _Declared, name: str) -> bool:
    return name in declared.hints and unwrap_optional(declared.hints[name])[0] is bool


def _value(hint: Any, words: list[str]) -> Any:
    kind, or_none = unwrap_optional(hint)
    if or_none and words == ["None"]:
        return None
    if get_origin(kind) is tuple:
        return convert_tuple(kind, [part for word in words for part in word.split(",")], _from_word)
    if kind is bool and not words:
        return True
    if len(words) != 1:
        raise ValueError
    return _from_word(kind, words[0])


def _from_word(kind: Any, word: str) -> Any:
    if kind is bool:
        if word.lower() not in BOOLEANS:
            raise ValueError
        return word.lower() == "true"
    if get_origin(kind) is Literal:
        found = [value for value in get_args(kind) if str(value) == word]
        if not found:
            raise ValueError
        return found[0]
    return kind(word)
