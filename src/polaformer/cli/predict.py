"""`polaformer predict`: what a trained model says of inputs, such as images."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from polaformer.cli.errors import BAD_DATA, UsageError
from polaformer.cli.options import parse, print_help, wants_help
from polaformer.cli.output import new_table, print_all, print_json, print_line, progress_bar
from polaformer.cli.trained import Trained, named_in, task_for_help
from polaformer.tasks.recipe import POSITIONAL

PROGRAM = "polaformer predict"


@dataclass(frozen=True)
class Predict:
    """Say what a trained model sees in its inputs: of images the most probable classes of each.

    An input that cannot be read is named at the end, and makes the exit code 65; the others are predicted all the same. The
    options below are for image classification; with --checkpoint PATH --help they are those of the task of these weights.

    Example: polaformer predict cat.jpg dog.png --checkpoint runs/digits/pola-vit-tiny/20261116-120000-0 --top 3
    """

    inputs: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="INPUT")]] = field(
        default=(), metadata=POSITIONAL
    )
    """Files, such as images."""
    checkpoint: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """A run, a checkpoint of one, or a weights file; required."""
    json: bool = False
    """Print the result as JSON on stdout and nothing else there."""

    def problems(self) -> list[str]:
        """Nothing to predict is one."""
        return [] if self.inputs else [f"no inputs given; name one or more files, as in: {PROGRAM} cat.jpg --checkpoint RUN"]

    @classmethod
    def run_words(cls, words: Sequence[str]) -> int:
        """Predicts what the words say; which options there are depends on the task of the weights."""
        if wants_help(words):
            return print_help(PROGRAM, cls.__doc__ or "", cls(), task_for_help(words, PROGRAM).prediction())
        if not words:
            raise UsageError("; ".join(cls().problems()))
        trained = named_in(words, PROGRAM)
        command, options = parse(words, cls(), trained.task.prediction(), program=PROGRAM)
        return command.run(trained, options)

    def run(self, trained: Trained, options: Any) -> int:
        """Loads, predicts, prints."""
        predictor = trained.task.predictor(trained.weights)
        with progress_bar() as bar:
            task = bar.add_task("predicting", total=len(self.inputs))
            found = predictor.answer(self.inputs, options, lambda: bar.advance(task))
        if self.json:
            about = {"command": "predict", "checkpoint": str(trained.given)}
            print_json(about | {trained.task.recipe.terms.sample_noun: found.records, "unreadable": found.unreadable})
        else:
            table = new_table(f"{trained.given}", *found.columns)
            for row in found.rows:
                table.add_row(*row)
            if found.rows:
                print_all(table)
            for line in found.unreadable:
                print_line(f"{PROGRAM}: {line}", stderr=True)
        return BAD_DATA if found.unreadable else 0
