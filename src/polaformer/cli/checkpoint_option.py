"""The --checkpoint option of `eval` and `predict`: trained weights and their task, on which the other options depend."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from polaformer.cli.errors import UsageError
from polaformer.cli.options import peek_option
from polaformer.cli.output import load
from polaformer.tasks.registry import DEFAULT, find_task, task_of_weights
from polaformer.tasks.task import Task


class CheckpointOption(NamedTuple):
    """The value of `--checkpoint`, its weights file, and the task of these weights."""

    path: Path
    weights: Path
    task: Task


def find_checkpoint(arguments: Sequence[str], program: str) -> CheckpointOption:
    """The weights that the arguments name with --checkpoint; raises UsageError and DataError. Loads PyTorch."""
    value = peek_option("checkpoint", arguments)
    if value is None:
        raise UsageError(f"no weights given; name a run, one of its checkpoints or a weights file: {program} --checkpoint PATH")
    path = Path(value)
    if not os.path.exists(path):
        raise UsageError(f"{path} does not exist; give a run, one of its checkpoints, or a weights file")
    load("polaformer.training.run", "polaformer.weights.files")
    from polaformer.training.run import weights_file

    weights = weights_file(path)
    return CheckpointOption(path, weights, task_of_weights(weights))


def about_options(about: str, arguments: Sequence[str], task: Task) -> str:
    """The description of a command, with a sentence before its examples that says which task its options are for."""
    more = (
        "" if peek_option("checkpoint", arguments) else "; --checkpoint PATH --help lists those for the task of these weights"
    )
    text, example, examples = about.partition("Example:")
    return f"{text.rstrip()}\n\n    The options below are for the task {task.name}{more}.\n\n    {example}{examples}"


def task_for_help(arguments: Sequence[str], program: str) -> Task:
    """The task whose options the help lists: that of the weights if they are given, otherwise classification."""
    return find_checkpoint(arguments, program).task if peek_option("checkpoint", arguments) else find_task(DEFAULT)
