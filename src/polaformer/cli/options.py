"""Options that depend on a recipe or a task: dataclasses that define both the parser and the help.

tyro parses all other commands and formats the help of these, but stops at the first invalid value. This parser reports all
problems at once.
"""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import fields, make_dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import tyro

from polaformer.errors import SettingsError, nearest
from polaformer.tasks.changes import with_changes
from polaformer.tasks.options import convert_tuple, describe_type, unwrap_optional
from polaformer.tasks.recipe import option_names

BOOLEANS = ("true", "false")
NONE = tyro.conf.arg(help_behavior_hint="(default: none)")  # tyro shows an empty tuple as "(default: )"


def parse(arguments: Sequence[str], *defaults: Any, program: str) -> tuple[Any, ...]:
    """The dataclasses with the options given in the arguments; raises SettingsError with all problems.

    A field marked as POSITIONAL takes the positional arguments.
    """
    declared = _declarations(defaults)
    values, positional, problems = _parse_values(arguments, declared, program)
    if declared.positional is not None:
        values[declared.positional] = tuple(positional)
    else:
        problems += [f"unexpected argument {argument!r}; options are --name VALUE" for argument in positional]
    parsed = []
    for one in defaults:
        changed = with_changes(one, {name: value for name, value in values.items() if name in option_names(one)})
        problems += changed.problems()
        parsed.append(changed)
    if problems:
        raise SettingsError(problems)
    return tuple(parsed)


def positional_arguments(arguments: Sequence[str], *defaults: Any) -> list[str]:
    """The arguments that belong to no option of the dataclasses."""
    return _split(arguments, _declarations(defaults), [])[1]


def peek_option(name: str, arguments: Sequence[str]) -> str | None:
    """The value of one option, read before the other options are known; None if it is not given."""
    for index, argument in enumerate(arguments):
        if argument == flag(name) and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(f"{flag(name)}="):
            return argument.partition("=")[2]
    return None


def wants_help(arguments: Iterable[str]) -> bool:
    """Whether the arguments include -h or --help."""
    return not {"-h", "--help"}.isdisjoint(arguments)


def print_help(program: str, about: str, *defaults: Any) -> int:
    """Prints help on the options of all the dataclasses, and returns the exit code."""
    values = {field.name: getattr(one, field.name) for one in defaults for field in fields(one)}
    hints = {name: hint for one in defaults for name, hint in get_type_hints(type(one), include_extras=True).items()}
    empty = [
        (name, Annotated[hints[name], NONE], value)
        for name, value in values.items()
        if value == () and get_origin(hints[name]) is not Annotated
    ]
    bases = tuple(type(one) for one in reversed(defaults))
    combined: Any = make_dataclass("Options", empty, bases=bases, frozen=True, kw_only=True)
    default = combined(**values)
    config = (tyro.conf.FlagCreatePairsOff,)
    try:
        tyro.cli(combined, prog=program, description=inspect.cleandoc(about), args=["--help"], default=default, config=config)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def flag(name: str) -> str:
    """The command-line option for a field."""
    return f"--{name.replace('_', '-')}"


def as_arguments(options: Any, defaults: Any) -> list[str]:
    """The arguments that `parse` makes the options from, for what differs from the defaults."""
    found: list[str] = []
    for name, value in _differences(options, defaults).items():
        if isinstance(value, bool):
            found.append(flag(name) if value else flag(f"no_{name}"))
        elif isinstance(value, tuple):
            found += [flag(name), *map(str, value)]
        else:
            found.append(f"{flag(name)}={value}" if str(value).startswith("--") else flag(name))
            found += [str(value)] * (not str(value).startswith("--"))
    return found


def _differences(options: Any, defaults: Any) -> dict[str, Any]:
    """The values to give for the options; also those that equal the defaults, if other values would change them."""
    wanted = {name: getattr(options, name) for name in option_names(options)}
    given = {name: value for name, value in wanted.items() if value != getattr(defaults, name)}
    found = with_changes(defaults, given)
    return {name: value for name, value in wanted.items() if name in given or value != getattr(found, name)}


class _Declarations(NamedTuple):
    """The options that some dataclasses declare: their types by name, and which field is positional."""

    hints: dict[str, Any]
    positional: str | None


def _declarations(defaults: Iterable[Any]) -> _Declarations:
    hints: dict[str, Any] = {}
    positional = None
    for one in defaults:
        types = get_type_hints(type(one))
        hints |= {name: types[name] for name in option_names(one)}
        positional = next((field.name for field in fields(one) if field.metadata.get("positional")), positional)
    return _Declarations({name: hint for name, hint in hints.items() if name != positional}, positional)


def _parse_values(
    arguments: Sequence[str], declared: _Declarations, program: str
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The values of the options by name, the positional arguments, and all problems."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    hints = declared.hints
    given, positional = _split(arguments, declared, problems)
    for name, strings in given.items():
        if name not in hints:
            near = nearest(flag(name), [flag(one) for one in hints])
            problems.append(f"there is no option {flag(name)}; {near}{program} --help lists them")
            continue
        try:
            values[name] = _convert_all(hints[name], strings)
        except ValueError:
            problems.append(f"{flag(name)} is {' '.join(strings) or 'empty'}; give {describe_type(hints[name])}")
    return values, positional, problems


def _split(arguments: Sequence[str], declared: _Declarations, problems: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The arguments of each option, as many as it takes, and the positional arguments."""
    found: dict[str, list[str]] = {}
    positional: list[str] = []
    current: str | None = None
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            current = name.replace("-", "_")
            is_off = _is_flag(declared, current.removeprefix("no_")) and current not in declared.hints and not equals
            current = current.removeprefix("no_") if is_off else current
            if current in found:
                problems.append(f"{flag(current)} is given twice")
            found[current] = [value] if equals else ["false"] * is_off
        elif current is not None and _takes(declared, current, found[current], argument):
            found[current].append(argument)
        else:
            positional.append(argument)
            current = None
    return found, positional


def _takes(declared: _Declarations, name: str, taken: list[str], argument: str) -> bool:
    """Whether an option takes one more argument; if there are no positional ones, it takes all up to the next option."""
    hint = declared.hints.get(name)
    if declared.positional is None or (hint is not None and get_origin(unwrap_optional(hint)[0]) is tuple):
        return True
    return not taken and (not _is_flag(declared, name) or argument.lower() in BOOLEANS)


def _is_flag(declared: _Declarations, name: str) -> bool:
    return name in declared.hints and unwrap_optional(declared.hints[name])[0] is bool


def _convert_all(hint: Any, strings: list[str]) -> Any:
    kind, or_none = unwrap_optional(hint)
    if or_none and strings == ["None"]:
        return None
    if get_origin(kind) is tuple:
        return convert_tuple(kind, [part for string in strings for part in string.split(",")], _convert)
    if kind is bool and not strings:
        return True
    if len(strings) != 1:
        raise ValueError
    return _convert(kind, strings[0])


def _convert(kind: Any, string: str) -> Any:
    if kind is bool:
        if string.lower() not in BOOLEANS:
            raise ValueError
        return string.lower() == "true"
    if get_origin(kind) is Literal:
        found = [value for value in get_args(kind) if str(value) == string]
        if not found:
            raise ValueError
        return found[0]
    return kind(string)
