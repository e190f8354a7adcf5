"""`polaformer resume`: a run goes on from its newest valid checkpoint."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polaformer.cli.errors import DIVERGED, UsageError
from polaformer.cli.options import parse, print_help, wants_help
from polaformer.cli.output import load, new_table, print_all, print_json
from polaformer.cli.training_view import TrainingView
from polaformer.errors import DataError
from polaformer.extras import require
from polaformer.tasks.recipe import as_values
from polaformer.tasks.registry import DEFAULT, find_task
from polaformer.tasks.stored_recipe import load_recipe


@dataclass(frozen=True)
class Resume:
    """Resume a run that was stopped or killed, bit-for-bit as if it had not been.

    Takes the newest checkpoint that is whole; damaged ones are named and passed over. A finished run is evaluated again.

    Example: polaformer resume runs/digits/pola-vit-tiny/20261116-120000-0
    """

    replay: bool = False
    """Do not train: run the batch again at which the loss was not finite, and say what it does."""
    json: bool = False
    """Print the result as JSON on stdout and nothing else there."""

    def problems(self) -> list[str]:
        """Nothing: any combination makes sense."""
        return []

    @classmethod
    def run_words(cls, words: Sequence[str]) -> int:
        """Resumes the run that the first word names; which options there are depends on its task."""
        program = "polaformer resume RUN"
        if wants_help(words):
            is_run = not words[0].startswith("-") and os.path.lexists(words[0])
            task = find_task(load_recipe(Path(words[0])).task if is_run else DEFAULT)
            return print_help(program, cls.__doc__ or "", cls(), task.resumption())
        if not words or words[0].startswith("-"):
            raise UsageError("no run given; name its folder first, as in: polaformer resume runs/digits/pola-vit-tiny/…")
        folder = Path(words[0])
        if not os.path.lexists(folder):
            raise DataError(f"there is no {folder}; give the folder of a run, which `polaformer train` named")
        require("train", "accelerate", "tensorboard", "matplotlib")
        load("polaformer.tasks.running")
        recipe = load_recipe(folder)
        command, options = parse(words[1:], cls(), find_task(recipe.task).resumption(), program=program)
        changes = {name: value for name, value in as_values(options).items() if value is not None}
        return command._replay(folder, changes) if command.replay else command._resume(folder, changes)

    def _resume(self, folder: Path, changes: dict[str, Any]) -> int:
        from polaformer.cli.run_report import report
        from polaformer.tasks.running import resume

        recipe = load_recipe(folder)
        with TrainingView(recipe.name, recipe) as view:
            finished = resume(folder, view, changes)
        report(finished, command="resume", json=self.json)
        return 0

    def _replay(self, folder: Path, changes: dict[str, Any]) -> int:
        from polaformer.tasks.running import replay

        found = replay(folder, changes)
        if not found:
            raise DataError(f"{folder} has no batch of a diverged step; there is nothing to replay")
        records: list[dict[str, Any]] = []
        for path, one in found.items():
            records.append({"file": str(path), "loss": one.loss, "grad_norm": one.grad_norm, "not_finite": one.bad_parameters})
        if self.json:
            print_json({"command": "resume", "replay": records})
        else:
            table = new_table("The step that diverged, once more", "batch", "loss", "norm of gradient", "gradients not finite")
            for record in records:
                bad = record["not_finite"]
                some = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
                table.add_row(Path(record["file"]).name, f"{record['loss']:g}", f"{record['grad_norm']:g}", some or "none")
            print_all(table)
        return DIVERGED if any(one.bad_parameters for one in found.values()) else 0
