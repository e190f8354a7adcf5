"""What `eval` and `predict` share: trained weights, and the task that they name, on which the options depend."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from polaformer.cli.errors import UsageError
from polaformer.cli.options import value_of
from polaformer.cli.output import load
from polaformer.tasks.registry import DEFAULT, find_task, task_of_weights
from polaformer.tasks.task import Task


class Trained(NamedTuple):
    """What `--checkpoint` names."""

    given: Path
    weights: Path  # the file
    task: Task


def named_in(words: Sequence[str], program: str) -> Trained:
    """The weights that the words name with --checkpoint; raises UsageError and DataError. Loads PyTorch."""
    value = value_of("checkpoint", words)
    if value is None:
        raise UsageError(f"no weights given; name a run, a checkpoint of one, or a weights file: {program} --checkpoint PATH")
    given = Path(value)
    if not os.path.exists(given):
        raise UsageError(f"there is no {given}; give a run, a checkpoint of one, or a weights file")
    load("polaformer.training.run", "polaformer.weights.files")
    from polaformer.training.run import weights_file

    weights = weights_file(given)
    return Trained(given, weights, task_of_weights(weights))


def task_for_help(words: Sequence[str], program: str) -> Task:
    """The task whose options help shows: that of the weights that are named, or classification."""
    return named_in(words, program).task if value_of("checkpoint", words) else find_task(DEFAULT)
