"""The entry point: finds the command, parses its options, turns every expected failure into one line and an exit code."""

import io
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from threading import current_thread, main_thread
from types import FrameType
from typing import Protocol

import tyro

from polaformer import __version__
from polaformer.cli.bench import BenchOp
from polaformer.cli.demo import Demo
from polaformer.cli.errors import INTERRUPTED, USAGE, CommandError, UsageError
from polaformer.cli.output import print_all, print_line
from polaformer.extras import MissingExtraError


class Command(Protocol):
    """A frozen dataclass of options that knows how to run; its docstring is its help."""

    def run(self) -> int:
        """Does the work and returns the exit code."""
        ...


COMMANDS: dict[str, type[Command]] = {"demo": Demo, "bench op": BenchOp}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `polaformer` with the arguments, those of the process unless given, and returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _never_fail_on_characters()
    name = _command_name(words)
    program = f"polaformer {name}".strip()
    with _remembered_ctrl_c() as pressed:
        try:
            return _run(name, words, program)
        except CommandError as error:
            print_line(f"{program}: {error}", stderr=True)
            return error.exit_code
        except MissingExtraError as error:
            print_line(f"{program}: {error}", stderr=True)
            return USAGE
        # A library that is interrupted while it loads may turn the interrupt into an error of another kind.
        except (KeyboardInterrupt, Exception) as error:
            if not (pressed or isinstance(error, KeyboardInterrupt)):
                raise
            print_line(f"{program}: stopped by Ctrl-C", stderr=True)
            return INTERRUPTED


def _run(name: str, words: Sequence[str], program: str) -> int:
    if name not in COMMANDS:
        return _without_command(name, words)
    options = words[len(name.split()) :]
    command = tyro.cli(COMMANDS[name], prog=program, args=options, config=(tyro.conf.FlagCreatePairsOff,))
    return command.run()


@contextmanager
def _remembered_ctrl_c() -> Iterator[list[int]]:
    """A list that is empty until Ctrl-C is pressed, which raises KeyboardInterrupt as ever."""
    pressed: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        signal.default_int_handler(number, frame)

    # Where Ctrl-C is ignored or means something else, that stays so.
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or current_thread() is not main_thread():
        yield pressed
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _command_name(words: Sequence[str]) -> str:
    """The longest beginning of `words` that is a command or a group of commands; "" if there is none."""
    known = {" ".join(name.split()[:size]) for name in COMMANDS for size in (1, 2)}
    candidates = [" ".join(words[:size]) for size in (2, 1)]
    return next((candidate for candidate in candidates if candidate in known), "")


def _without_command(group: str, words: Sequence[str]) -> int:
    """Help, the version, or a usage error, where the words name no command; `group` is "bench" for `polaformer bench …`."""
    rest = words[len(group.split()) :]
    if rest and rest[0] in ("-h", "--help"):
        _print_help(group)
        return 0
    if not group and rest == ["--version"]:
        print_all(f"polaformer {__version__}")
        return 0
    raise UsageError(_what_is_wrong(group, rest))


def _what_is_wrong(group: str, rest: Sequence[str]) -> str:
    depth = len(group.split())
    names = list(dict.fromkeys(name.split()[depth] for name in _commands_in(group)))
    help_command = " ".join(["polaformer", *group.split(), "--help"])
    if not rest:
        return f"no command given; choose one of: {', '.join(names)} ({help_command} says more)"
    near = get_close_matches(rest[0], names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"there is no command {rest[0]!r}; {hint}choose one of: {', '.join(names)} ({help_command} says more)"


def _commands_in(group: str) -> list[str]:
    return [name for name in COMMANDS if not group or name.startswith(f"{group} ")]


def _print_help(group: str) -> None:
    names = _commands_in(group)
    width = max(len(name) for name in names)
    print_all(
        "Polarity-aware linear attention (PolaFormer, ICLR 2025).\n",
        "usage: polaformer COMMAND [options]\n       polaformer COMMAND --help\n       polaformer --version\n",
        "commands:",
        *(f"  {name:{width}}  {(COMMANDS[name].__doc__ or '').splitlines()[0]}" for name in names),
        f"\nExample: polaformer {names[0]}",
    )


def _never_fail_on_characters() -> None:
    """On a terminal or pipe that cannot show a character, a question mark stands for it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
