"""Options of commands that depend on a recipe or a task: dataclasses, from which both the parser and the help are made.

tyro, which parses all other commands and writes the help of these, stops at the first wrong value; here all mistakes are told
at once.
"""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import fields, make_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tyro

from polaformer.errors import SettingsError, nearest
from polaformer.tasks.options import as_tuple, kind_of, wanted
from polaformer.tasks.recipe import option_names

BOOLEANS = ("true", "false")


def parse(words: Sequence[str], *defaults: Any, program: str) -> tuple[Any, ...]:
    """The dataclasses with the options that the words give; raises SettingsError with everything that is wrong.

    A field called `inputs` takes the words that belong to no option.
    """
    hints = {name: hint for one in defaults for name, hint in _hints(one).items()}
    given, loose, problems = _given(words, hints, program)
    if "inputs" in hints:
        given["inputs"] = tuple(loose)
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


def _hints(options: Any) -> dict[str, Any]:
    hints = get_type_hints(type(options))
    return {name: hints[name] for name in option_names(options)}


def _given(words: Sequence[str], hints: dict[str, Any], program: str) -> tuple[dict[str, Any], list[str], list[str]]:
    """The values of options, the words that belong to none, and what is wrong."""
    found: dict[str, Any] = {}
    problems: list[str] = []
    given, loose = _options(words, hints, problems)
    for name, values in given.items():
        if name not in hints:
            near = nearest(flag(name), [flag(one) for one in hints])
            problems.append(f"there is no option {flag(name)}; {near}{program} --help lists them")
            continue
        try:
            found[name] = _value(hints[name], values)
        except ValueError:
            problems.append(f"{flag(name)} is {' '.join(values) or 'nothing'}; give {wanted(hints[name])}")
    return found, loose, problems


def _options(words: Sequence[str], hints: dict[str, Any], problems: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The words after each option, as many as it takes, and the others."""
    found: dict[str, list[str]] = {}
    loose: list[str] = []
    current: str | None = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            current = name.replace("-", "_")
            if current in found:
                problems.append(f"{flag(current)} is given twice")
            found[current] = [value] if equals else []
        elif current is not None and _takes(hints, current, found[current], word):
            found[current].append(word)
        else:
            loose.append(word)
            current = None
    return found, loose


def _takes(hints: dict[str, Any], name: str, taken: list[str], word: str) -> bool:
    """Whether an option that has taken some words takes one more; where none can stand alone, it takes all up to the next."""
    hint = hints.get(name)
    if "inputs" not in hints or hint is None or get_origin(kind_of(hint)[0]) is tuple:
        return True
    return not taken and (kind_of(hint)[0] is not bool or word.lower() in BOOLEANS)


def _value(hint: Any, words: list[str]) -> Any:
    kind, or_none = kind_of(hint)
    if or_none and words == ["None"]:
        return None
    if get_origin(kind) is tuple:
        return as_tuple(kind, [_from_word(get_args(kind)[0], part) for word in words for part in word.split(",")])
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
        if word not in get_args(kind):
            raise ValueError
        return word
    return Path(word) if kind is Path else kind(word)
