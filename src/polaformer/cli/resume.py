"""`polaformer resume`: resume a run from its newest valid checkpoint."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polaformer.cli.command import DynamicCommand
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
class Resume(DynamicCommand):
    """Resume a stopped or killed run, bit-for-bit as if it had never been interrupted.

    Resumes from the newest valid checkpoint; damaged ones are reported and skipped. A finished run is evaluated again.

    Example: polaformer resume runs/digits/pola-vit-tiny/20261116-120000-0
    """

    replay: bool = False
    """Do not train: repeat the step that diverged on its saved batch, and print loss and gradients."""
    json: bool = False
    """Print the result as JSON on stdout, and nothing else."""

    @classmethod
    def run_arguments(cls, arguments: Sequence[str]) -> int:
        """Resumes the run that the first argument names; the available options depend on its task."""
        program = "polaformer resume RUN"
        if wants_help(arguments):
            is_run = not arguments[0].startswith("-") and os.path.lexists(arguments[0])
            task = find_task(load_recipe(Path(arguments[0])).task if is_run else DEFAULT)
            return print_help(program, cls.__doc__ or "", cls(), task.resumption())
        if not arguments or arguments[0].startswith("-"):
            raise UsageError("no run given; name its directory first, as in: polaformer resume runs/digits/pola-vit-tiny/…")
        folder = Path(arguments[0])
        if not os.path.lexists(folder):
            raise DataError(f"{folder} does not exist; give a run directory, as printed by `polaformer train`")
        require("train", "accelerate", "tensorboard", "matplotlib")
        load("polaformer.tasks.running")
        recipe = load_recipe(folder)
        command, options = parse(arguments[1:], cls(), find_task(recipe.task).resumption(), program=program)
        changes = {name: value for name, value in as_values(options).items() if value is not None}
        return command._replay(folder, changes) if command.replay else command._resume(folder, changes)

    def _resume(self, folder: Path, changes: dict[str, Any]) -> int:
        from polaformer.cli.run_report import report_run
        from polaformer.tasks.running import resume

        recipe = load_recipe(folder)
        with TrainingView(recipe.name, recipe) as view:
            finished = resume(folder, view, changes)
        report_run(finished, command="resume", json=self.json)
        return 0

    def _replay(self, folder: Path, changes: dict[str, Any]) -> int:
        from polaformer.tasks.running import replay

        found = replay(folder, changes)
        if not found:
            raise DataError(f"{folder} has no saved batch of a diverged step; there is nothing to replay")
        records: list[dict[str, Any]] = []
        for path, one in found.items():
            records.append({"file": str(path), "loss": one.loss, "grad_norm": one.grad_norm, "not_finite": one.bad_parameters})
        if self.json:
            print_json({"command": "resume", "replay": records})
        else:
            table = new_table("Replay of the diverged step", "batch", "loss", "gradient norm", "non-finite gradients")
            for record in records:
                bad = record["not_finite"]
                some = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
                table.add_row(Path(record["file"]).name, f"{record['loss']:g}", f"{record['grad_norm']:g}", some or "none")
            print_all(table)
        return DIVERGED if any(one.bad_parameters for one in found.values()) else 0
