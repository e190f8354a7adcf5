"""Trains, resumes and replays recipes of any task, from the checks at the start to the weights file at the end."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from polaformer.errors import DataError, raise_all
from polaformer.regular_files import writing
from polaformer.tasks.job import Predictor, TaskJob
from polaformer.tasks.options import with_values
from polaformer.tasks.recipe import Recipe
from polaformer.tasks.stored_recipe import load_recipe
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
class FinishedRun:
    """A training run that reached its end."""

    run: Run
    job: TaskJob
    predictor: Predictor
    counts: dict[str, Any]  # of every split, validation first, with the weights that were shipped
    is_main: bool  # whether this process reports


def train(recipe: Recipe, folder: Path, watch: Watch) -> FinishedRun:
    """Trains from scratch in a new run directory; checks everything before it writes anything."""
    job, accelerator = prepare(recipe)
    for line in job.notices:
        watch("note", {"text": line})
    # The name of the directory may contain the time, which differs between processes: all take that of the first.
    [shared] = broadcast_object_list([str(folder)]) if accelerator.num_processes > 1 else [str(folder)]
    run = Run(Path(shared))
    if accelerator.is_main_process:
        options = recipe.values_with_absolute_paths()
        about = {"recipe": recipe.name, "task": recipe.task, "options": options, "data": job.data_fingerprint()}
        run = Run.create(run.folder, about)
    accelerator.wait_for_everyone()
    return _finish(Training(job, recipe, run, accelerator, watch, recipe.terms), job)


def resume(folder: Path, watch: Watch, changes: Mapping[str, Any] | None = None) -> FinishedRun:
    """Resumes a run from its newest valid checkpoint, or starts it over if there is none.

    changes: fields that do not affect results, such as where the data are now.
    """
    run, recipe = Run(folder), with_values(load_recipe(folder), changes or {})
    if checkpoint.list_checkpoints(run.checkpoints):
        recipe = recipe.without_weights()
    job, accelerator = prepare(recipe)
    _check_data(folder, job)
    return _finish(Training(job, recipe, run, accelerator, watch, recipe.terms), job)


def find_run(path: Path) -> Path | None:
    """The run directory that a path belongs to: itself, one of its checkpoints, or a file in either; None if none does."""
    return next((folder for folder in (path, *path.resolve().parents[:2]) if (folder / CONFIG).is_file()), None)


def _check_data(folder: Path, job: TaskJob) -> None:
    before, now = Run.open(folder)[1].get("data"), job.data_fingerprint()
    if isinstance(before, dict) and not _still_holds(before, now):
        raise DataError(
            f"the data are not those that {folder} was started with: there were {_list_counts(before)}, now "
            f"{_list_counts(now)}, or names or contents differ; give the same data with --data, or start a new run"
        )


def _still_holds(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether every stored entry has the same value now; new entries are allowed."""
    both = [(value, now.get(name)) for name, value in before.items()]
    return all(_still_holds(a, b) if isinstance(a, dict) and isinstance(b, dict) else a == b for a, b in both)


def _list_counts(fingerprint: dict[str, Any]) -> str:
    """The sample counts in a fingerprint of data."""
    return ", ".join(f"{name} {value}" for name, value in fingerprint.items() if "names" not in name) or "others"


def prepare(recipe: Recipe) -> tuple[TaskJob, Accelerator]:
    """A job and the processes to train it in, both checked; raises SettingsError or DataError. Writes nothing."""
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
    """Raises TypeError for mistakes of a task that would otherwise surface only at the end of training."""
    recipe, record = job.recipe, job.objective.new_counts().record()
    missing = {"samples", recipe.terms.metric.name} - record.keys()
    if missing or RESERVED & record.keys():
        raise TypeError(
            f"the counts of task {recipe.task!r} have the record {sorted(record)}; it needs {recipe.terms.metric.name!r} and "
            f"'samples', and none of {', '.join(sorted(RESERVED))}"
        )
    if job.steps_per_epoch < 1:
        raise TypeError(
            f"the job of task {recipe.task!r} has {job.steps_per_epoch} updates per epoch; it must refuse too few samples"
        )
    if job.splits[:1] != (VALIDATION,):
        raise TypeError(f"the job of task {recipe.task!r} has the splits {job.splits}; the first one must be {VALIDATION!r}")
    named = job.metadata().get("task")
    if named != recipe.task:
        raise TypeError(f"the metadata of the job of task {recipe.task!r} name the task {named!r}; they must name its own")


def _finish(training: Training, job: TaskJob) -> FinishedRun:
    counts = training.train()
    predictor = job.predictor(training.engine.evaluated_model)
    if training.is_main:
        with writing(training.run.model):
            predictor.save(training.run.model)
    training.accelerator.wait_for_everyone()
    return FinishedRun(training.run, job, predictor, counts, training.is_main)


def replay(folder: Path, changes: Mapping[str, Any] | None = None) -> dict[Path, Replay]:
    """Replays every batch that a run saved when it diverged, with the weights of that step; {} if there is none."""
    recipe = with_values(load_recipe(folder), changes or {}).without_weights()
    saved = sorted((folder / divergence.FOLDER).glob("*.safetensors"))
    if not saved:
        return {}
    job, accelerator = prepare(recipe)
    engine = Engine(job.model, job.objective, recipe, job.steps_per_epoch, accelerator)
    found = {}
    for path in saved:
        parts, about = divergence.read(path, job.batch_class)
        engine.restore(checkpoint.at_step(Run(folder).checkpoints, about["step"]))
        found[path] = divergence.replay(engine, parts, about)
    return found
