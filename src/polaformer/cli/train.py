"""`polaformer train`: a recipe, with any of its numbers changed, on data of your own."""

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from polaformer.cli.errors import UsageError
from polaformer.cli.output import load, new_table, print_all, print_json, print_line
from polaformer.cli.training_view import TrainingView
from polaformer.extras import require
from polaformer.recipes.classification import Classification
from polaformer.recipes.options import as_values, with_words
from polaformer.recipes.registry import RECIPES, find
from polaformer.training.settings import workers_for_cores
from polaformer.training.timeline import Timeline

if TYPE_CHECKING:
    from polaformer.recipes.jobs import ClassificationJob

DIGITS = "digits"
OTHERS: dict[str, Any] = {"out": str, "dry_run": bool, "json": bool}


@dataclass(frozen=True)
class Train:
    """Train a recipe, on your own images if you give a folder of them.

    Every field of the recipe is an option: polaformer train RECIPE --help lists them. The run goes into a folder with the
    configuration, a journal, checkpoints, a report and, at the end, model.safetensors. Killed, it goes on with: polaformer
    resume RUN.

    Example: polaformer train digits/pola-vit-tiny --epochs 10

    Example: polaformer train imagenet/pola-swin-tiny --data photos --img-size 96 --batch-size 64 --epochs 20 --dry-run

    Example: torchrun --nproc-per-node 8 -m polaformer train imagenet/pola-swin-tiny --data imagenet --precision bf16
    """

    recipe: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RECIPE")]]
    """Name of the recipe."""
    out: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder for the run, new or empty; runs/RECIPE/TIME-SEED unless given."""
    dry_run: bool = False
    """Check everything, print the resolved recipe and what it would need, and stop."""
    json: bool = False
    """Print the result as JSON on stdout and nothing else there."""

    def run(self) -> int:
        """Trains the recipe as it is."""
        return _Training(_found(self.recipe), self.out, self.dry_run, self.json).run()

    @staticmethod
    def run_words(words: Sequence[str]) -> int:
        """Trains what the words say; the first is the recipe, whose fields the others may change."""
        if not words or words[0] in ("-h", "--help"):
            if not words:
                raise UsageError(f"no recipe given; choose one of: {_some_recipes()}; polaformer train --help lists them all")
            return _help()
        if words[0].startswith("-"):
            raise UsageError(
                f"the recipe comes first, but {words[0]!r} does; as in: polaformer train digits/pola-vit-tiny {words[0]} …"
            )
        recipe = _found(words[0])
        if "-h" in words or "--help" in words:
            return _help_of(recipe)
        changed, others = with_words(recipe, words[1:], OTHERS)
        return _Training(changed, others.get("out"), others.get("dry_run", False), others.get("json", False)).run()


@dataclass(frozen=True)
class _Training:
    recipe: Classification
    out: str | None
    dry_run: bool
    json: bool

    def run(self) -> int:
        require("train", "accelerate", "tensorboard", "matplotlib")
        if self.recipe.data in (None, DIGITS):
            require("train", "sklearn")
        if self.recipe.data is None:
            print_line("no --data given: the 1,797 bundled handwritten digits are trained on", stderr=True)
        load("polaformer.recipes.running")
        return self._explain() if self.dry_run else self._train()

    def _train(self) -> int:
        from polaformer.cli.run_report import report
        from polaformer.recipes.running import train

        begun = datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = Path(self.out) if self.out else Path("runs") / self.recipe.name / f"{begun}-{self.recipe.seed}"
        with TrainingView(self.recipe.name, self.recipe.batch_size, self.recipe.num_epochs) as view:
            finished = train(self.recipe, folder, view)
        report(finished, self.recipe, command="train", json=self.json)
        return 0

    def _explain(self) -> int:
        from polaformer.training.processes import start
        from polaformer.training.run import Run

        job = self.recipe.job()
        start(self.recipe.precision)
        if self.out:
            Run.check_new(Path(self.out))
        needs = _needs(self.recipe, job)
        if self.json:
            print_json({"command": "train", "recipe": self.recipe.name, "options": as_values(self.recipe), "needs": needs})
            return 0
        fields = new_table(f"{self.recipe.name}: every number of it", "field", "value", caption=_origin(self.recipe))
        for name, value in as_values(self.recipe).items():
            fields.add_row(name, str(value))
        table = new_table("What it would need", "", "")
        for name, value in needs.items():
            table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
        print_all(fields, table, "Nothing was trained; the same command without --dry-run does.")
        return 0


def _found(name: str) -> Classification:
    """The recipe of that name, with no more processes that read data than this machine has cores for."""
    recipe = find(name)
    return replace(recipe, num_workers=workers_for_cores(recipe.num_workers))


def _needs(recipe: Classification, job: "ClassificationJob") -> dict[str, Any]:
    from polaformer.training.memory import estimate

    world = int(os.environ.get("WORLD_SIZE", "1"))
    part = recipe.batch_size // (world * recipe.accumulation)
    memory = estimate(job.on_meta(), (part, len(recipe.mean), recipe.img_size, recipe.img_size), recipe)
    updates = Timeline(recipe, job.steps_per_epoch).total
    return {
        "training_images": len(job.data.train),
        "validation_images": len(job.data.val),
        "classes": len(job.data.classes),
        "parameters": sum(parameter.numel() for parameter in job.model.parameters()),
        "epochs": round(updates / job.steps_per_epoch, 2) if recipe.num_epochs is None else recipe.num_epochs,
        "updates_an_epoch": job.steps_per_epoch,
        "updates": updates,
        "processes": world,
        "images_at_once": part,
        "memory_of_weights_MB": round(memory.weights / 1e6),
        "memory_of_activations_MB": round(memory.activations / 1e6),
        "memory_of_each_process_MB": round(memory.total / 1e6),
    }


def _origin(recipe: Classification) -> str:
    return f"Paper: {recipe.paper}.\n\nExpected: {recipe.expected}.\n\nCommand: {recipe.command}"


def _some_recipes() -> str:
    return ", ".join(list(RECIPES)[:3]) + ", …"


def _help() -> int:
    about = f"{inspect.cleandoc(Train.__doc__ or '')}\n\nRecipes: " + ", ".join(RECIPES)
    tyro.cli(Train, prog="polaformer train", description=about, args=["--help"], config=(tyro.conf.FlagCreatePairsOff,))
    return 0


def _help_of(recipe: Classification) -> int:
    @dataclass(frozen=True)
    class Options:
        recipe: tyro.conf.OmitArgPrefixes[Classification]
        out: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
        """Folder for the run, new or empty; runs/RECIPE/TIME-SEED unless given."""
        dry_run: bool = False
        """Check everything, print the resolved recipe and what it would need, and stop."""
        json: bool = False
        """Print the result as JSON on stdout and nothing else there."""

    about = f"{_origin(recipe)}\n\nExample: polaformer train {recipe.name} --epochs 10 --seed 1"
    program = f"polaformer train {recipe.name}"
    config = (tyro.conf.FlagCreatePairsOff,)
    tyro.cli(Options, prog=program, description=about, default=Options(recipe), args=["--help"], config=config)
    return 0
