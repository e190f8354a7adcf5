"""The entry point: finds the command, parses its options, turns every expected failure into one line and an exit code."""

import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

from polaformer import __version__
from polaformer.cli.errors import EXPECTED, INTERRUPTED, CommandError, UsageError, exit_code
from polaformer.cli.output import print_all, print_line
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


class Entry(NamedTuple):
    """Where a command is, and what help says of it: the first line of its docstring. Loaded only when it runs."""

    module: str
    name: str
    about: str

    def load(self) -> type[Command] | type[WordsCommand]:
        """The class of the command."""
        return getattr(importlib.import_module(f"polaformer.cli.{self.module}"), self.name)


COMMANDS: dict[str, Entry] = {
    "demo": Entry("demo", "Demo", "Train a small PolaFormer and its softmax twin on handwritten digits, and compare them."),
    "demo operator": Entry(
        "demo_operator",
        "DemoOperator",
        "Show what polarity attention does: exactness, safety, sharpness, and time against length.",
    ),
    "train": Entry("train", "Train", "Train a recipe, on your own data if you give some."),
    "resume": Entry("resume", "Resume", "Resume a run that was stopped or killed, bit-for-bit as if it had not been."),
    "eval": Entry("evaluate", "Evaluate", "Evaluate a model on the validation part of a data set."),
    "predict": Entry(
        "predict", "Predict", "Say what a trained model sees in its inputs: of images the most probable classes of each."
    ),
    "sweep": Entry("sweep", "Sweep", "Train every cell of a sweep with every seed, and print mean and spread in one table."),
    "check": Entry("check", "Check", "Read all of a data set and list what is wrong."),
    "models": Entry("models", "Models", "List the models: attention of each stage, parameters, MACs, and the paper's numbers."),
    "convert": Entry(
        "convert", "Convert", "Turn the authors' .pth, timm's weights or any state dict into a safetensors file of ours."
    ),
    "bench op": Entry(
        "bench_op", "BenchOp", "Time the operator on each backend against the published form, linear attention and softmax."
    ),
    "bench model": Entry(
        "bench_model", "BenchModel", "Time whole models against their published form, their softmax twins and timm's."
    ),
    "bench memory": Entry(
        "bench_memory",
        "BenchMemory",
        "Measure the memory of the operator against the published form, linear attention and softmax.",
    ),
    "bench attention": Entry(
        "bench_attention", "BenchAttention", "Compare all attention mechanisms: time and memory against the number of tokens."
    ),
    "env": Entry("env", "Env", "Show which backends work here and why others do not, versions, devices and the machine."),
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
    command, options = COMMANDS[name].load(), words[len(name.split()) :]
    return command.run_words(options) if issubclass(command, WordsCommand) else _parsed(command, program, options).run()


def _parsed(command: type[Command], program: str, options: Sequence[str]) -> Command:
    """The command with its options; ends the process where they are wrong.

    The parser repeats words as they were given, and these may be names of files that hold escape sequences (`check *`).
    """
    import tyro  # takes a while to load, and --help does not need it

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
        *(f"  {name:{width}}  {COMMANDS[name].about}" for name in names),
        f"\nExample: polaformer {names[0]}",
    )


def _never_fail_on_characters() -> None:
    """On a terminal or pipe that cannot show a character, a question mark stands for it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
