"""`polaformer eval`: what a model gets right of a data set, counted exactly whatever the number of processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from polaformer.cli.errors import UsageError
from polaformer.cli.options import parse, print_help, wants_help
from polaformer.cli.output import load, new_table, print_all, print_json, progress_bar
from polaformer.cli.trained import Trained, named_in, task_for_help
from polaformer.extras import require

PROGRAM = "polaformer eval"


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a model on the validation part of a data set.

    With several processes each sample is still counted once. Samples are prepared as the weights file says; the authors' files
    squeeze an image to a square, --resize shorter cuts it, as is usual. The options below are for image classification; with
    --checkpoint PATH --help they are those of the task of these weights.

    Example: polaformer eval --checkpoint runs/digits/pola-vit-tiny/20261116-120000-0

    Example: polaformer eval --checkpoint pola_swin_tiny.safetensors --data imagenet --resize shorter

    Example: torchrun --nproc-per-node 4 -m polaformer eval --checkpoint pola_swin_tiny.safetensors --data imagenet
    """

    checkpoint: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """A run, a checkpoint of one, or a weights file; required."""
    json: bool = False
    """Print the result as JSON on stdout and nothing else there."""

    def problems(self) -> list[str]:
        """Nothing: the weights were looked at before the options."""
        return []

    @classmethod
    def run_words(cls, words: Sequence[str]) -> int:
        """Evaluates what the words say; which options there are depends on the task of the weights."""
        if wants_help(words):
            return print_help(PROGRAM, cls.__doc__ or "", cls(), task_for_help(words, PROGRAM).evaluation())
        trained = named_in(words, PROGRAM)
        command, options = parse(words, cls(), trained.task.evaluation(), program=PROGRAM)
        require("train", "accelerate")
        return command.run(trained, options)

    def run(self, trained: Trained, options: Any) -> int:
        """Loads, counts, prints."""
        load("polaformer.tasks.running")
        from polaformer.tasks.running import find_run
        from polaformer.tasks.stored_recipe import load_recipe
        from polaformer.training.evaluation import count
        from polaformer.training.processes import create_accelerator

        around = find_run(trained.given)
        if around is None and options.data is None:
            raise UsageError(f"{trained.given} belongs to no run, so its data are not known; give them with --data")
        predictor = trained.task.predictor(trained.weights)
        recipe = load_recipe(around) if around is not None and options.data is None else None
        evaluation = predictor.evaluation(options, recipe)
        accelerator = create_accelerator(options.precision)
        mine = accelerator.process_index, accelerator.num_processes
        with progress_bar() as bar:
            task = bar.add_task(f"evaluating {options.split}", total=evaluation.num_batches(*mine))
            shown = (bar.advance(task) or batch for batch in evaluation.batches(*mine))  # type: ignore[func-returns-value]
            counts = count(predictor.model.to(accelerator.device), evaluation.objective, shown, accelerator)
        if accelerator.is_main_process:
            self._report(counts, trained, options.split, evaluation.about)
        return 0

    def _report(self, counts: Any, trained: Trained, split: str, about: dict[str, Any]) -> None:
        record, noun = counts.record(), trained.task.recipe.terms.sample_noun
        if self.json:
            known = {"command": "eval", "checkpoint": str(trained.weights), "split": split, **about}
            known |= {"unreadable": len(counts.bad), "result": record, f"unreadable_{noun}": counts.bad}
            print_json(known)
            return
        table = new_table(f"{trained.weights} on {record['samples']:,} {noun}", "", "")
        for name, text in counts.summary().items():
            table.add_row(name, text)
        for name, value in about.items():
            table.add_row(name.replace("_", " "), str(value))
        table.add_row("unreadable, left out", f"{len(counts.bad)}")
        print_all(table, *counts.bad)
