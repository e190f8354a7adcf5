"""`polaformer train`: train a recipe, with any of its settings changed, on its data or yours."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from polaformer.cli.command import DynamicCommand
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

MAX_LISTED = 50  # recipes of one folder in the help


@dataclass(frozen=True)
class Train(DynamicCommand):
    """Train a recipe, optionally on your own data.

    Every setting of the recipe is an option: polaformer train RECIPE --help lists them. The run directory holds the
    configuration, a journal, checkpoints and, at the end, a report and model.safetensors. If the run is interrupted,
    polaformer resume RUN resumes it.

    Example: polaformer train digits/pola-vit-tiny --epochs 10

    Example: polaformer train photos/pola-pvt-tiny --data photos --dry-run

    Example: torchrun --nproc-per-node 8 -m polaformer train imagenet/pola-swin-tiny --data imagenet --precision bf16
    """

    out: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Run directory, new or empty; runs/RECIPE/TIME-SEED if not given."""
    dry_run: bool = False
    """Check everything, print the resolved recipe and its requirements, and stop."""
    json: bool = False
    """Print the result as JSON on stdout, and nothing else."""

    @classmethod
    def run_arguments(cls, arguments: Sequence[str]) -> int:
        """Trains the recipe that the first argument names; the options after it change its settings."""
        if not arguments:
            some = ", ".join(list(recipes())[:3])
            raise UsageError(f"no recipe given; choose one of: {some}, …; polaformer train --help lists them all")
        if arguments[0] in ("-h", "--help"):
            names = [f"Recipes: {_listed(recipes())}", *(f"Unavailable: {problem}" for problem in problems())]
            return print_help("polaformer train RECIPE", "\n\n    ".join([cls.__doc__ or "", *names]), cls())
        first = arguments[0]
        if first.startswith("-"):
            raise UsageError(
                f"{first!r} comes before the recipe; name the recipe first: polaformer train digits/pola-vit-tiny {first} …"
            )
        recipe, program = find_recipe(first), f"polaformer train {first}"
        if wants_help(arguments):
            return print_help(program, f"{_origin(recipe)}\n\nExample: {program} --epochs 10 --seed 1", recipe, cls())
        command, changed = parse(arguments[1:], cls(), recipe, program=program)
        return command.run(changed)

    def run(self, recipe: Recipe) -> int:
        """Trains the recipe, or prints what that would require."""
        require("train", "accelerate", "tensorboard", "matplotlib")
        for line in recipe.before_training():
            print_line(line, stderr=True)
        load("polaformer.tasks.running")
        return self._print_plan(recipe) if self.dry_run else self._train(recipe)

    def _train(self, recipe: Recipe) -> int:
        from polaformer.cli.run_report import report_run
        from polaformer.tasks.running import train

        started = datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = Path(self.out) if self.out else Path("runs") / recipe.name / f"{started}-{recipe.seed}"
        with TrainingView(recipe.name, recipe) as view:
            finished = train(recipe, folder, view)
        report_run(finished, command="train", json=self.json)
        return 0

    def _print_plan(self, recipe: Recipe) -> int:
        from polaformer.tasks.running import prepare
        from polaformer.training.run import Run

        job, _ = prepare(recipe)
        if self.out:
            Run.check_new(Path(self.out))
        needs = _needs(recipe, job)
        if self.json:
            print_json({"command": "train", "recipe": recipe.name, "options": as_values(recipe), "needs": needs})
            return 0
        settings = new_table(f"{recipe.name}: all settings", "setting", "value", caption=_origin(recipe))
        for name, value in as_values(recipe).items():
            settings.add_row(name, str(value))
        table = new_table("Requirements", "", "")
        for name, value in needs.items():
            label = name.replace("_an_", " per ").replace("_", " ")
            table.add_row(label, f"{value:,}" if isinstance(value, int) else str(value))
        print_all(settings, table, "Nothing was trained; run the same command without --dry-run to train.")
        return 0


def _listed(names: Iterable[str]) -> str:
    """The names of recipes, separated by commas; of a folder with many, the first ones and their number."""
    folders: dict[str, list[str]] = {}
    for name in names:
        folders.setdefault(name.partition("/")[0], []).append(name)
    parts = (own if len(own) <= MAX_LISTED else [*own[:3], f"… ({len(own)} in {name}/)"] for name, own in folders.items())
    return ", ".join(one for own in parts for one in own)


def find_recipe(name: str) -> Recipe:
    """The recipe of that name, with no more data workers than this machine has cores for."""
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
