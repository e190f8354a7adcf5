"""Recipes run: a new training, or one that goes on, from the checks before it to the file that is shipped after it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from polaformer.data.sources import absolute, digest_of_names
from polaformer.errors import DataError
from polaformer.recipes.classification import Classification
from polaformer.recipes.jobs import ClassificationJob
from polaformer.recipes.options import as_values, with_values
from polaformer.tasks.classification import Counts
from polaformer.tasks.classifier import Classifier
from polaformer.training import checkpoint, divergence
from polaformer.training.divergence import Replay
from polaformer.training.engine import Engine
from polaformer.training.loop import Training, Watch
from polaformer.training.processes import start
from polaformer.training.run import Run, writing


@dataclass(frozen=True)
class Finished:
    """A training that came to its end."""

    run: Run
    job: ClassificationJob
    classifier: Classifier
    counts: Counts  # of the last evaluation
    is_main: bool  # whether this process is the one that reports


def train(recipe: Classification, folder: Path, watch: Watch) -> Finished:
    """Trains from the beginning in a new folder; everything is checked before anything is written."""
    job, accelerator = _prepared(recipe)
    # Only one process knows the time that a folder may be named after.
    [shared] = broadcast_object_list([str(folder)]) if accelerator.num_processes > 1 else [str(folder)]
    run = Run(Path(shared))
    if accelerator.is_main_process:
        run = Run.create(
            run.folder, {"recipe": recipe.name, "task": "classification", "options": _from_anywhere(recipe)} | _seen(job)
        )
    accelerator.wait_for_everyone()
    return _finish(Training(job, recipe, run, accelerator, watch), job)


def resume(folder: Path, watch: Watch, changes: Mapping[str, Any] | None = None) -> Finished:
    """Goes on with a run from its newest valid checkpoint, or from the beginning if there is none.

    changes: fields on which no result depends, such as where the data lie now.
    """
    run, recipe = recipe_of(folder)
    recipe = replace(recipe, **dict(changes or {}))
    if checkpoint.ordered(run.checkpoints):
        recipe = replace(recipe, checkpoint=None)  # the weights that it started from are no longer needed
    job, accelerator = _prepared(recipe)
    _check_data(folder, job)
    return _finish(Training(job, recipe, run, accelerator, watch), job)


def recipe_of(folder: Path) -> tuple[Run, Classification]:
    """A run and the recipe that it was begun with; raises DataError."""
    run, config = Run.open(folder)
    try:
        if config["task"] != "classification":
            raise ValueError(f"its task is {config['task']!r}; this version knows classification")
        return run, with_values(Classification(name=str(config["recipe"])), config["options"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{folder / 'config.json'} is damaged: {error}; restore it") from error


def _from_anywhere(recipe: Classification) -> dict[str, Any]:
    """The options of a recipe, with paths that hold from any folder."""
    checkpoint = None if recipe.checkpoint is None else os.path.abspath(recipe.checkpoint)
    return as_values(recipe) | {"data": None if recipe.data is None else absolute(recipe.data), "checkpoint": checkpoint}


def _seen(job: ClassificationJob) -> dict[str, Any]:
    """What a run remembers of its data, to know them again."""
    parts = {"train": job.data.train, "val": job.data.val}
    digests = {name: digest_of_names(source) for name, source in parts.items()}
    return {"data": {"images": {name: len(source) for name, source in parts.items()}, "names": digests}}


def _check_data(folder: Path, job: ClassificationJob) -> None:
    before, now = Run.open(folder)[1].get("data"), _seen(job)["data"]
    if isinstance(before, dict) and before != now:
        raise DataError(
            f"the data are not those that {folder} was begun with: there were {before.get('images')} images, now there are "
            f"{now['images']}, or they have other names or classes; give the same with --data, or train anew"
        )


def _prepared(recipe: Classification) -> tuple[ClassificationJob, Accelerator]:
    job = recipe.job()
    accelerator = start(recipe.precision)
    job.check_processes(accelerator.num_processes)
    return job, accelerator


def _finish(training: Training, job: ClassificationJob) -> Finished:
    counts = training.train()
    classifier = job.classifier(training.engine.best_model)
    if training.is_main:
        with writing(training.run.model):
            classifier.save(training.run.model)
    training.accelerator.wait_for_everyone()
    return Finished(training.run, job, classifier, counts, training.is_main)


def replay(folder: Path, changes: Mapping[str, Any] | None = None) -> dict[Path, Replay]:
    """Every batch that a run left behind when it diverged, run again with the weights of that step; {} if there is none."""
    run, recipe = recipe_of(folder)
    recipe = replace(recipe, **dict(changes or {}), checkpoint=None)
    left = sorted((folder / divergence.FOLDER).glob("*.safetensors"))
    if not left:
        return {}
    job, accelerator = _prepared(recipe)
    engine = Engine(job.model, job.task, recipe, job.steps_per_epoch, accelerator)
    found = {}
    for path in left:
        parts, about = divergence.read(path)
        stored = checkpoint.at_step(run.checkpoints, about["step"])
        engine.restore(stored)
        found[path] = divergence.replay(engine, parts, about)
    return found
