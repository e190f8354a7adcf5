"""The entry point: finds the command, parses its options, turns every expected failure into one line and an exit code."""

import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from functools import partial
from typing import Protocol, runtime_checkable

import tyro

from polaformer import __version__
from polaformer.cli.bench import BenchOp
from polaformer.cli.bench_attention import BenchAttention
from polaformer.cli.bench_memory import BenchMemory
from polaformer.cli.bench_model import BenchModel
from polaformer.cli.check import Check
from polaformer.cli.convert import Convert
from polaformer.cli.demo import Demo
from polaformer.cli.demo_operator import DemoOperator
from polaformer.cli.env import Env
from polaformer.cli.errors import EXPECTED, INTERRUPTED, CommandError, UsageError, exit_code
from polaformer.cli.evaluate import Evaluate
from polaformer.cli.models import Models
from polaformer.cli.output import print_all, print_line
from polaformer.cli.predict import Predict
from polaformer.cli.resume import Resume
from polaformer.cli.sweep import Sweep
from polaformer.cli.train import Train
from polaformer.errors import CannotWriteError, DataError, SettingsError, nearest, shown
from polaformer.training.slurm import slurm_variables


class Command(Protocol):
    """A frozen dataclass of options that knows how to run; its docstring is its help."""

    def run(self) -> int:
        """Does the work and returns the exit code."""
        ...


@runtime_checkable
class WordsCommand(Protocol):
    """A command whose options depend on a recipe or a task, so that it reads its words itself."""

    @classmethod
    def run_words(cls, words: Sequence[str]) -> int:
        """Does the work and returns the exit code."""
        ...


COMMANDS: dict[str, type[Command] | type[WordsCommand]] = {
    "demo": Demo,
    "demo operator": DemoOperator,
    "train": Train,
    "resume": Resume,
    "eval": Evaluate,
    "predict": Predict,
    "sweep": Sweep,
    "check": Check,
    "models": Models,
    "convert": Convert,
    "bench op": BenchOp,
    "bench model": BenchModel,
    "bench memory": BenchMemory,
    "bench attention": BenchAttention,
    "env": Env,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `polaformer` with the arguments, those of the process unless given, and returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _never_fail_on_characters()
    os.environ.update(slurm_variables(os.environ))  # before anything asks which of several processes this is
    if arguments is None and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `polaformer … | head` ends quietly, as other tools do
    name = _command_name(words)
    program = f"polaformer {name}".strip()
    try:
        return _run(name, words, program)
    except EXPECTED as error:
        _tell(program, error)
        return exit_code(error)
    except KeyboardInterrupt:
        print_line(f"{program}: stopped by Ctrl-C", stderr=True)
        return INTERRUPTED


def _run(name: str, words: Sequence[str], program: str) -> int:
    if name not in COMMANDS:
        return _without_command(name, words)
    command, options = COMMANDS[name], words[len(name.split()) :]
    return command.run_words(options) if issubclass(command, WordsCommand) else _parsed(command, program, options).run()


def _parsed(command: type[Command], program: str, options: Sequence[str]) -> Command:
    """The command with its options; ends the process where they are wrong.

    The parser repeats words as they were given, and these may be names of files that hold escape sequences (`check *`).
    """
    parse = partial(tyro.cli, command, prog=program, config=(tyro.conf.FlagCreatePairsOff,))
    safe = [shown(word) for word in options]
    if safe == list(options):
        return parse(args=options)
    try:
        with redirect_stderr(io.StringIO()):
            return parse(args=options)
    except SystemExit as ended:
        if ended.code:
            parse(args=safe)  # says what is wrong
        raise


def _tell(program: str, error: Exception) -> None:
    """Of several processes that all find the same thing wrong, one says so."""
    if os.environ.get("RANK", "0") == "0" or isinstance(error, DataError | CannotWriteError):
        # The others see to their lines themselves.
        text = str(error) if isinstance(error, DataError | SettingsError | CommandError) else shown(str(error))
        print_line(f"{program}: {text}", stderr=True)


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
    hint = nearest(rest[0], names)
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
