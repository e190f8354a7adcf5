"""Recipes run, of any task: a new training, or one that goes on, from the checks before it to the file that is shipped."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from polaformer.errors import DataError, raise_all
from polaformer.regular_files import writing
from polaformer.tasks.job import Predictor, TaskJob
from polaformer.tasks.options import with_values
from polaformer.tasks.recipe import Recipe
from polaformer.tasks.stored import recipe_of
from polaformer.training import checkpoint, divergence
from polaformer.training.divergence import Replay
from polaformer.training.engine import Engine
from polaformer.training.loop import RESERVED, Training, Watch
from polaformer.training.metric import VALIDATION
from polaformer.training.optim import check_settings, check_trainable
from polaformer.training.processes import create_accelerator
from polaformer.training.run import CONFIG, Run
from polaformer.training.timeline import Timeline


@dataclass(frozen=True)
class Finished:
    """A training that came to its end."""

    run: Run
    job: TaskJob
    predictor: Predictor
    counts: dict[str, Any]  # of every split, with the weights that were shipped; the first is that of validation
    is_main: bool  # whether this process is the one that reports


def train(recipe: Recipe, folder: Path, watch: Watch) -> Finished:
    """Trains from the beginning in a new folder; everything is checked before anything is written."""
    job, accelerator = prepared(recipe)
    # Only one process knows the time that a folder may be named after.
    [shared] = broadcast_object_list([str(folder)]) if accelerator.num_processes > 1 else [str(folder)]
    run = Run(Path(shared))
    if accelerator.is_main_process:
        about = {"recipe": recipe.name, "task": recipe.task, "options": recipe.from_anywhere(), "data": job.seen()}
        run = Run.create(run.folder, about)
    accelerator.wait_for_everyone()
    return _finish(Training(job, recipe, run, accelerator, watch, recipe.terms), job)


def resume(folder: Path, watch: Watch, changes: Mapping[str, Any] | None = None) -> Finished:
    """Goes on with a run from its newest valid checkpoint, or from the beginning if there is none.

    changes: fields on which no result depends, such as where the data lie now.
    """
    run, recipe = recipe_of(folder)
    recipe = with_values(recipe, changes or {})
    if checkpoint.list_checkpoints(run.checkpoints):
        # The weights that it started from are no longer needed.
        recipe = replace(recipe, checkpoint=None)
    job, accelerator = prepared(recipe)
    _check_data(folder, job)
    return _finish(Training(job, recipe, run, accelerator, watch, recipe.terms), job)


def run_around(path: Path) -> Path | None:
    """The run that a path lies in: the run itself, a checkpoint of it, or a file in either; None if there is none."""
    return next((folder for folder in (path, *path.resolve().parents[:2]) if (folder / CONFIG).is_file()), None)


def _check_data(folder: Path, job: TaskJob) -> None:
    before, now = Run.open(folder)[1].get("data"), job.seen()
    if isinstance(before, dict) and not _holds(now, before):
        raise DataError(
            f"the data are not those that {folder} was begun with: there were {_counted(before)}, now {_counted(now)}, "
            "or they have other names or contents; give the same with --data, or train anew"
        )


def _holds(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether everything that a run remembers is still so; what it does not know of may be new."""
    both = [(now.get(name), value) for name, value in before.items()]
    return all(_holds(a, b) if isinstance(a, dict) and isinstance(b, dict) else a == b for a, b in both)


def _counted(seen: dict[str, Any]) -> str:
    """The numbers in what a run remembers of its data."""
    return ", ".join(f"{name} {value}" for name, value in seen.items() if "names" not in name) or "others"


def prepared(recipe: Recipe) -> tuple[TaskJob, Accelerator]:
    """A job and the processes to train it in, both checked; raises SettingsError or DataError. Nothing is written."""
    job = recipe.job()
    accelerator = create_accelerator(recipe.precision)
    checks = [
        lambda: check_settings(recipe),
        lambda: check_trainable(job.model, recipe),
        lambda: job.check_processes(accelerator.num_processes),
    ]
    raise_all(Timeline(recipe, job.steps_per_epoch).problems(), checks)
    _check_contract(job)
    return job, accelerator


def _check_contract(job: TaskJob) -> None:
    """Raises TypeError where a task would fail, or be taken for another, only after hours."""
    recipe, record = job.recipe, job.objective.new_counts().record()
    missing = {"samples", recipe.terms.metric.name} - record.keys()
    if missing or RESERVED & record.keys():
        raise TypeError(
            f"the counts of task {recipe.task!r} have the record {sorted(record)}; it needs {recipe.terms.metric.name!r} and "
            f"'samples', and none of {', '.join(sorted(RESERVED))}"
        )
    if job.steps_per_epoch < 1:
        raise TypeError(
            f"the job of task {recipe.task!r} has {job.steps_per_epoch} updates per epoch; refuse too few samples in it"
        )
    if job.splits[:1] != (VALIDATION,):
        raise TypeError(f"the job of task {recipe.task!r} has the splits {job.splits}; the first one must be {VALIDATION!r}")
    named = job.metadata().get("task")
    if named != recipe.task:
        raise TypeError(f"the job of task {recipe.task!r} says in its metadata that the task is {named!r}")


def _finish(training: Training, job: TaskJob) -> Finished:
    counts = training.train()
    predictor = job.predictor(training.engine.evaluated_model)
    if training.is_main:
        with writing(training.run.model):
            predictor.save(training.run.model)
    training.accelerator.wait_for_everyone()
    return Finished(training.run, job, predictor, counts, training.is_main)


def replay(folder: Path, changes: Mapping[str, Any] | None = None) -> dict[Path, Replay]:
    """Every batch that a run left behind when it diverged, run again with the weights of that step; {} if there is none."""
    run, recipe = recipe_of(folder)
    recipe = replace(with_values(recipe, changes or {}), checkpoint=None)
    left = sorted((folder / divergence.FOLDER).glob("*.safetensors"))
    if not left:
        return {}
    job, accelerator = prepared(recipe)
    engine = Engine(job.model, job.objective, recipe, job.steps_per_epoch, accelerator)
    found = {}
    for path in left:
        parts, about = divergence.read(path, job.batch_class)
        stored = checkpoint.at_step(run.checkpoints, about["step"])
        engine.restore(stored)
        found[path] = divergence.replay(engine, parts, about)
    return found
