"""`polaformer eval`: evaluate a model on a dataset, with exact counts for any number of processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from polaformer.cli.checkpoint_option import CheckpointOption, about_options, find_checkpoint, task_for_help
from polaformer.cli.command import REQUIRED, DynamicCommand
from polaformer.cli.errors import UsageError
from polaformer.cli.options import parse, print_help, wants_help
from polaformer.cli.output import load, new_table, print_all, print_json, progress_bar
from polaformer.extras import require

if TYPE_CHECKING:
    from polaformer.tasks.figures import Rows
    from polaformer.tasks.job import Evaluation

PROGRAM = "polaformer eval"
MAX_CLASSES = 20  # in the table


@dataclass(frozen=True)
class Evaluate(DynamicCommand):
    """Evaluate a model on a split of a dataset, by default validation.

    Each sample is counted once, even with several processes. Samples are preprocessed as the weights file specifies. The
    authors squash the images of classification to squares; --resize shorter crops them instead, as is usual.

    Example: polaformer eval --checkpoint runs/digits/pola-vit-tiny/20261116-120000-0

    Example: polaformer eval --checkpoint pola_swin_tiny.safetensors --data imagenet --resize shorter

    Example: torchrun --nproc-per-node 4 -m polaformer eval --checkpoint pola_swin_tiny.safetensors --data imagenet
    """

    checkpoint: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint=REQUIRED)] = None
    """A run, one of its checkpoints, or a weights file."""
    json: bool = False
    """Print the result as JSON on stdout, and nothing else."""

    @classmethod
    def run_arguments(cls, arguments: Sequence[str]) -> int:
        """Evaluates the weights; the available options depend on their task."""
        if wants_help(arguments):
            task = task_for_help(arguments, PROGRAM)
            return print_help(PROGRAM, about_options(cls.__doc__ or "", arguments, task), cls(), task.evaluation())
        checkpoint = find_checkpoint(arguments, PROGRAM)
        command, options = parse(arguments, cls(), checkpoint.task.evaluation(), program=PROGRAM)
        require("train", "accelerate")
        return command.run(checkpoint, options)

    def run(self, checkpoint: CheckpointOption, options: Any) -> int:
        """Loads the model, evaluates it and prints the results."""
        load("polaformer.tasks.running")
        from polaformer.tasks.running import find_run
        from polaformer.tasks.stored_recipe import load_recipe
        from polaformer.training.evaluation import count
        from polaformer.training.processes import create_accelerator

        around = find_run(checkpoint.path)
        if around is None and options.data is None:
            raise UsageError(f"{checkpoint.path} is not part of a run, so there is no default dataset; give one with --data")
        predictor = checkpoint.task.predictor(checkpoint.weights)
        recipe = load_recipe(around) if around is not None and options.data is None else None
        evaluation = predictor.evaluation(options, recipe)
        accelerator = create_accelerator(options.precision)
        mine = accelerator.process_index, accelerator.num_processes
        with progress_bar() as bar:
            task = bar.add_task(f"evaluating {options.split}", total=evaluation.num_batches(*mine))
            shown = (bar.advance(task) or batch for batch in evaluation.batches(*mine))  # type: ignore[func-returns-value]
            counts = count(predictor.model.to(accelerator.device), evaluation.objective, shown, accelerator)
        if accelerator.is_main_process:
            if evaluation.save is not None:
                evaluation.save(counts)
            self._report(counts, checkpoint, options.split, evaluation)
        return 0

    def _report(self, counts: Any, checkpoint: CheckpointOption, split: str, evaluation: "Evaluation") -> None:
        about, details = evaluation.about, {} if evaluation.details is None else evaluation.details(counts)
        record, noun = counts.record(), checkpoint.task.recipe.terms.sample_noun
        if self.json:
            known = {"command": "eval", "checkpoint": str(checkpoint.weights), "split": split, **about}
            known |= {"unreadable": len(counts.bad), "result": record, **details, f"unreadable_{noun}": counts.bad}
            print_json(known)
            return
        columns: Sequence[str] = ("", "")
        rows: Sequence[Sequence[str]] = list(counts.summary().items())
        if evaluation.table is not None:
            shown = evaluation.table(counts)
            columns, rows = shown.columns, shown.rows
        table = new_table(f"{checkpoint.weights} on {record['samples']:,} {noun}", *columns)
        for row in rows:
            table.add_row(*row)
        for name, value in about.items():
            table.add_row(name.replace("_", " "), str(value))
        table.add_row("unreadable, skipped", f"{len(counts.bad)}")
        print_all(table, *([] if evaluation.per_class is None else _worst_classes(evaluation.per_class(counts))), *counts.bad)


def _worst_classes(found: "Rows") -> list[Any]:
    """The table of the first MAX_CLASSES classes, and how many there are more."""
    table = new_table("by class, the worst first", *found.columns)
    for row in found.rows[:MAX_CLASSES]:
        table.add_row(*row)
    more = len(found.rows) - MAX_CLASSES
    return [table, *[f"{more} more classes: --json has all"] * (more > 0)]
