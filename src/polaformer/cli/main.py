"""The entry point: find the command, parse its options, and turn every expected failure into one line and an exit code."""

import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from functools import partial
from typing import NamedTuple

from polaformer import __version__
from polaformer.cli.command import Command, DynamicCommand
from polaformer.cli.errors import EXPECTED, INTERRUPTED, CommandError, UsageError, exit_code
from polaformer.cli.output import print_all, print_line
from polaformer.errors import CannotWriteError, DataError, SettingsError, nearest, printable
from polaformer.training.slurm import slurm_variables


class Entry(NamedTuple):
    """Where a command is defined, and its line in the help: the first line of its docstring. Loaded only when it runs."""

    module: str
    name: str
    about: str

    def load(self) -> type[Command] | type[DynamicCommand]:
        """The command's class."""
        return getattr(importlib.import_module(f"polaformer.cli.{self.module}"), self.name)


COMMANDS: dict[str, Entry] = {
    "demo": Entry("demo", "Demo", "Train a small PolaFormer and its softmax twin on handwritten digits, and compare them."),
    "demo operator": Entry(
        "demo_operator",
        "DemoOperator",
        "Show what polarity attention does: exactness, safety, sharpness, and time against length.",
    ),
    "train": Entry("train", "Train", "Train a recipe, optionally on your own data."),
    "resume": Entry("resume", "Resume", "Resume a stopped or killed run, bit-for-bit as if it had never been interrupted."),
    "eval": Entry("evaluate", "Evaluate", "Evaluate a model on a split of a dataset, by default validation."),
    "predict": Entry(
        "predict", "Predict", "Predict with a trained model: classes of images, documents or pixels, or objects on images."
    ),
    "sweep": Entry(
        "sweep", "Sweep", "Train every cell of a sweep with every seed, and tabulate the mean and standard deviation."
    ),
    "data listops": Entry(
        "data_listops", "DataListops", "Generate ListOps of the Long Range Arena (nested operations on lists of digits)."
    ),
    "data pathfinder": Entry(
        "data_pathfinder",
        "DataPathfinder",
        "Generate Pathfinder of the Long Range Arena (are two markers connected by a dashed contour?).",
    ),
    "data text": Entry("data_text", "DataText", "Prepare Text of the Long Range Arena (movie reviews) from IMDb."),
    "data retrieval": Entry(
        "data_retrieval", "DataRetrieval", "Prepare Retrieval of the Long Range Arena (pairs of papers) from the AAN files."
    ),
    "data image": Entry(
        "data_image", "DataImage", "Prepare Image of the Long Range Arena (grey pixels in a row) from CIFAR-10."
    ),
    "check": Entry("check", "Check", "Read a whole dataset and list its problems."),
    "models": Entry("models", "Models", "List the models: attention of each stage, parameters, MACs, and the paper's numbers."),
    "convert": Entry(
        "convert", "Convert", "Convert the authors' .pth, timm weights or any state dict to our safetensors format."
    ),
    "bench op": Entry(
        "bench_op", "BenchOp", "Time the operator on each backend against the published form, linear attention and softmax."
    ),
    "bench model": Entry(
        "bench_model", "BenchModel", "Time whole models against their published form, their softmax twins and timm's models."
    ),
    "bench detector": Entry(
        "bench_detector",
        "BenchDetector",
        "Time detectors with our backbones against their published form and their softmax twins.",
    ),
    "bench memory": Entry(
        "bench_memory",
        "BenchMemory",
        "Measure the memory of the operator against the published form, linear attention and softmax.",
    ),
    "bench attention": Entry(
        "bench_attention", "BenchAttention", "Compare all attention mechanisms: time and memory against the number of tokens."
    ),
    "table lra": Entry(
        "table_lra", "TableLra", "Show the paper's table of the Long Range Arena beside the accuracies of our own runs."
    ),
    "table lra-speed": Entry(
        "table_lra_speed",
        "TableLraSpeed",
        "Time training steps on the Long Range Arena: tokens per millisecond and memory, relative to softmax.",
    ),
    "env": Entry("env", "Env", "Show backends (and why some are unavailable), versions, devices and the machine."),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `polaformer` with the arguments (default: sys.argv) and returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _replace_unencodable_characters()
    os.environ.update(slurm_variables(os.environ))  # before anything reads the rank
    if arguments is None and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `polaformer … | head` ends quietly, as other tools do
    name = _command_name(given)
    program = f"polaformer {name}".strip()
    try:
        return _run(name, given, program)
    except EXPECTED as error:
        _print_error(program, error)
        return exit_code(error)
    except KeyboardInterrupt:
        print_line(f"{program}: stopped by Ctrl-C", stderr=True)
        return INTERRUPTED


def _run(name: str, arguments: Sequence[str], program: str) -> int:
    if name not in COMMANDS:
        return _run_without_command(name, arguments)
    command, options = COMMANDS[name].load(), arguments[len(name.split()) :]
    if issubclass(command, DynamicCommand):
        return command.run_arguments(options)
    return _parse(command, program, options).run()


def _parse(command: type[Command], program: str, options: Sequence[str]) -> Command:
    """The command with its options; exits the process if they are invalid.

    The parser repeats arguments verbatim, and these may be file names that contain escape sequences (`check *`).
    """
    import tyro  # slow to load, and --help does not need it

    parse = partial(tyro.cli, command, prog=program, config=(tyro.conf.FlagCreatePairsOff,))
    safe = [printable(option) for option in options]
    if safe == list(options):
        return parse(args=options)
    try:
        with redirect_stderr(io.StringIO()):
            return parse(args=options)
    except SystemExit as ended:
        if ended.code:
            parse(args=safe)  # prints the error
        raise


def _print_error(program: str, error: Exception) -> None:
    """Prints the error; if several processes meet the same one, only the first process prints it."""
    if os.environ.get("RANK", "0") == "0" or isinstance(error, DataError | CannotWriteError):
        # These errors escape their own lines.
        text = str(error) if isinstance(error, DataError | SettingsError | CommandError) else printable(str(error))
        print_line(f"{program}: {text}", stderr=True)


def _command_name(arguments: Sequence[str]) -> str:
    """The longest prefix of the arguments that is a command or a group of commands; "" if there is none."""
    known = {" ".join(name.split()[:size]) for name in COMMANDS for size in (1, 2)}
    candidates = [" ".join(arguments[:size]) for size in (2, 1)]
    return next((candidate for candidate in candidates if candidate in known), "")


def _run_without_command(group: str, arguments: Sequence[str]) -> int:
    """Prints help or the version, or raises UsageError; `group` is "bench" for `polaformer bench …`, otherwise ""."""
    rest = arguments[len(group.split()) :]
    if rest and rest[0] in ("-h", "--help"):
        _print_help(group)
        return 0
    if not group and rest == ["--version"]:
        print_all(f"polaformer {__version__}")
        return 0
    raise UsageError(_usage_message(group, rest))


def _usage_message(group: str, rest: Sequence[str]) -> str:
    depth = len(group.split())
    names = list(dict.fromkeys(name.split()[depth] for name in _commands_in(group)))
    help_command = " ".join(["polaformer", *group.split(), "--help"])
    if not rest:
        return f"no command given; choose one of: {', '.join(names)} (for help: {help_command})"
    hint = nearest(rest[0], names)
    return f"there is no command {rest[0]!r}; {hint}choose one of: {', '.join(names)} (for help: {help_command})"


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


def _replace_unencodable_characters() -> None:
    """Prints a question mark for a character that the encoding of stdout or stderr lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
