"""`polaformer train`: a recipe, with any of its numbers changed, on data of your own."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from polaformer.cli.errors import UsageError
from polaformer.cli.options import parse, print_help, wants_help
from polaformer.cli.output import load, new_table, print_all, print_json, print_line
from polaformer.cli.training_view import TrainingView
from polaformer.extras import require
from polaformer.recipes.registry import find, problems, recipes
from polaformer.tasks.recipe import Recipe, as_values
from polaformer.training.settings import workers_for_cores
from polaformer.training.timeline import Timeline

if TYPE_CHECKING:
    from polaformer.tasks.job import TaskJob


@dataclass(frozen=True)
class Train:
    """Train a recipe, on your own data if you give some.

    Every field of the recipe is an option: polaformer train RECIPE --help lists them. The run goes into a folder with the
    configuration, a journal, checkpoints, a report and, at the end, model.safetensors. Killed, it goes on with: polaformer
    resume RUN.

    Example: polaformer train digits/pola-vit-tiny --epochs 10

    Example: polaformer train photos/pola-pvt-tiny --data photos --dry-run

    Example: torchrun --nproc-per-node 8 -m polaformer train imagenet/pola-swin-tiny --data imagenet --precision bf16
    """

    out: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder for the run, new or empty; runs/RECIPE/TIME-SEED unless given."""
    dry_run: bool = False
    """Check everything, print the resolved recipe and what it would need, and stop."""
    json: bool = False
    """Print the result as JSON on stdout and nothing else there."""

    def problems(self) -> list[str]:
        """Nothing: whether the folder is free is asked when it is made."""
        return []

    @classmethod
    def run_words(cls, words: Sequence[str]) -> int:
        """Trains what the words say; the first is the recipe, whose fields the others may change."""
        if not words:
            some = ", ".join(list(recipes())[:3])
            raise UsageError(f"no recipe given; choose one of: {some}, …; polaformer train --help lists them all")
        if words[0] in ("-h", "--help"):
            names = [f"Recipes: {', '.join(recipes())}", *(f"Not usable: {problem}" for problem in problems())]
            return print_help("polaformer train RECIPE", "\n\n    ".join([cls.__doc__ or "", *names]), cls())
        if words[0].startswith("-"):
            raise UsageError(
                f"the recipe comes first, but {words[0]!r} does; as in: polaformer train digits/pola-vit-tiny {words[0]} …"
            )
        recipe, program = _found(words[0]), f"polaformer train {words[0]}"
        if wants_help(words):
            return print_help(program, f"{_origin(recipe)}\n\nExample: {program} --epochs 10 --seed 1", recipe, cls())
        command, changed = parse(words[1:], cls(), recipe, program=program)
        return command.run(changed)

    def run(self, recipe: Recipe) -> int:
        """Trains the recipe, or says what that would need."""
        require("train", "accelerate", "tensorboard", "matplotlib")
        for line in recipe.before_training():
            print_line(line, stderr=True)
        load("polaformer.tasks.running")
        return self._explain(recipe) if self.dry_run else self._train(recipe)

    def _train(self, recipe: Recipe) -> int:
        from polaformer.cli.run_report import report
        from polaformer.tasks.running import train

        begun = datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = Path(self.out) if self.out else Path("runs") / recipe.name / f"{begun}-{recipe.seed}"
        with TrainingView(recipe.name, recipe) as view:
            finished = train(recipe, folder, view)
        report(finished, command="train", json=self.json)
        return 0

    def _explain(self, recipe: Recipe) -> int:
        from polaformer.tasks.running import prepare
        from polaformer.training.run import Run

        job, _ = prepare(recipe)
        if self.out:
            Run.check_new(Path(self.out))
        needs = _needs(recipe, job)
        if self.json:
            print_json({"command": "train", "recipe": recipe.name, "options": as_values(recipe), "needs": needs})
            return 0
        fields = new_table(f"{recipe.name}: every number of it", "field", "value", caption=_origin(recipe))
        for name, value in as_values(recipe).items():
            fields.add_row(name, str(value))
        table = new_table("What it would need", "", "")
        for name, value in needs.items():
            table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
        print_all(fields, table, "Nothing was trained; the same command without --dry-run does.")
        return 0


def _found(name: str) -> Recipe:
    """The recipe of that name, with no more processes that read data than this machine has cores for."""
    recipe = find(name)
    return replace(recipe, num_workers=workers_for_cores(recipe.num_workers))


def _needs(recipe: Recipe, job: "TaskJob") -> dict[str, Any]:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    part = recipe.batch_size // (world * recipe.accumulation)
    updates = Timeline(recipe, job.steps_per_epoch).total
    return {
        "parameters": sum(parameter.numel() for parameter in job.model.parameters()),
        "epochs": round(updates / job.steps_per_epoch, 2) if recipe.num_epochs is None else recipe.num_epochs,
        "updates_an_epoch": job.steps_per_epoch,
        "updates": updates,
        "processes": world,
        f"{recipe.terms.sample_noun}_at_once": part,
        **job.needs(part),
    }


def _origin(recipe: Recipe) -> str:
    return f"Paper: {recipe.paper}.\n\nExpected: {recipe.expected}.\n\nCommand: {recipe.command}"
