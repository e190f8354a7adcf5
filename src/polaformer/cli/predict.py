"""`polaformer predict`: predictions of a trained model for inputs such as images."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from polaformer.cli.checkpoint_option import CheckpointOption, about_options, find_checkpoint, task_for_help
from polaformer.cli.command import REQUIRED, DynamicCommand
from polaformer.cli.errors import BAD_DATA, UsageError
from polaformer.cli.options import parse, print_help, wants_help
from polaformer.cli.output import new_table, print_all, print_json, print_line, progress_bar
from polaformer.tasks.recipe import POSITIONAL

PROGRAM = "polaformer predict"


@dataclass(frozen=True)
class Predict(DynamicCommand):
    """Predict with a trained model: classes of images, documents or pixels, or objects on images.

    Unreadable inputs are listed at the end and make the exit code 65; the other inputs are still predicted.

    Example: polaformer predict "a superb, moving film" --checkpoint runs/lra/text-pola-a3/20261118-120000-0

    Example: polaformer predict cat.jpg dog.png --checkpoint runs/digits/pola-vit-tiny/20261116-120000-0 --top 3

    Example: polaformer predict street.jpg --checkpoint runs/coco/mask-rcnn-pola-pvt-nano/20261118-120000-0 --out drawn

    Example: polaformer predict street.jpg --checkpoint runs/camvid/semantic-fpn-pola-pvt-nano/20261120-120000-0 --out drawn
    """

    inputs: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="INPUT", help_behavior_hint=REQUIRED)]] = (
        field(default=(), metadata=POSITIONAL)
    )
    """Files, such as images; for a model of text or expressions also the documents themselves."""
    checkpoint: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint=REQUIRED)] = None
    """A run, one of its checkpoints, or a weights file."""
    json: bool = False
    """Print the result as JSON on stdout, and nothing else."""

    def problems(self) -> list[str]:
        """All problems with the options, one string each."""
        return [] if self.inputs else [f"no inputs given; name at least one file, as in: {PROGRAM} cat.jpg --checkpoint RUN"]

    @classmethod
    def run_arguments(cls, arguments: Sequence[str]) -> int:
        """Predicts the inputs; the available options depend on the task of the weights."""
        if wants_help(arguments):
            task = task_for_help(arguments, PROGRAM)
            return print_help(PROGRAM, about_options(cls.__doc__ or "", arguments, task), cls(), task.prediction())
        if not arguments:
            raise UsageError("; ".join(cls().problems()))
        checkpoint = find_checkpoint(arguments, PROGRAM)
        command, options = parse(arguments, cls(), checkpoint.task.prediction(), program=PROGRAM)
        return command.run(checkpoint, options)

    def run(self, checkpoint: CheckpointOption, options: Any) -> int:
        """Loads the model, predicts and prints the predictions."""
        predictor = checkpoint.task.predictor(checkpoint.weights)
        with progress_bar() as bar:
            task = bar.add_task("predicting", total=len(self.inputs))
            found = predictor.answer(self.inputs, options, lambda: bar.advance(task))
        if self.json:
            about = {"command": "predict", "checkpoint": str(checkpoint.path)}
            print_json(about | {checkpoint.task.recipe.terms.sample_noun: found.records, "unreadable": found.unreadable})
        else:
            table = new_table(f"{checkpoint.path}", *found.columns)
            for row in found.rows:
                table.add_row(*row)
            if found.rows:
                print_all(table)
            for line in found.unreadable:
                print_line(f"{PROGRAM}: {line}", stderr=True)
        return BAD_DATA if found.unreadable else 0
