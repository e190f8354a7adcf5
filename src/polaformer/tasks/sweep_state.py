"""How far the runs of a sweep have come, read from their folders. Needs no PyTorch."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from polaformer.errors import DataError, SettingsError
from polaformer.tasks.recipe import Recipe, as_values
from polaformer.tasks.stored import recipe_of
from polaformer.tasks.sweep import SweepRun
from polaformer.training import checkpoint, journal
from polaformer.training.metric import VALIDATION
from polaformer.training.run import CONFIG, Run
from polaformer.training.timeline import Timeline

HALF_WRITTEN = f".{CONFIG}.tmp"  # what a kill leaves behind while the configuration is written
FREE = ("data", "num_workers")  # options that may change between two calls: no result depends on them


@dataclass(frozen=True)
class RunState:
    """How far a run has come.

    step: of the checkpoint that it would go on from, or the last one; total: None where nothing tells it yet. splits: of a
    finished run, the record of every split with the weights that were shipped. seconds: of training alone.
    """

    kind: Literal["missing", "begun", "finished"]
    step: int = 0
    total: int | None = None
    splits: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float | None = None

    @property
    def text(self) -> str:
        """In words."""
        if self.kind != "begun":
            return self.kind
        return f"begun, at step {self.step}" + (f" of {self.total}" if self.total else "")


def states_of(runs: Iterable[SweepRun]) -> dict[SweepRun, RunState]:
    """The states of all runs; raises SettingsError with every run that was begun with other options than are planned now."""
    found, problems = {}, list[str]()
    for run in runs:
        found[run] = state_of(run)
        problems += _problems(run, found[run])
    if problems:
        raise SettingsError(problems)
    return found


def state_of(run: SweepRun) -> RunState:
    """The state of one run; raises DataError where its files are damaged."""
    if not os.path.lexists(run.folder / CONFIG):
        return RunState("missing", total=run.recipe.steps if not run.recipe.cooldown_epochs else None)
    records = journal.read(run.folder)
    try:
        return _state(run, records)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError, ValueError) as error:
        raise DataError(f"{run.folder / journal.NAME} is damaged: {error!r}; restore it, or remove the run") from error


def _state(run: SweepRun, records: list[dict[str, Any]]) -> RunState:
    total = _total(run.recipe, records)
    seconds = records[-1]["wall"]["seconds"] if records else None
    evaluations = [record for record in records if record["kind"] == "eval" and record["step"] == total]
    if evaluations and total is not None and Run(run.folder).model.is_file():
        final = {record["split"]: _numbers(record) for record in records if record["kind"] == "final"}
        return RunState("finished", total, total, {VALIDATION: _numbers(evaluations[-1])} | final, seconds)
    saved = checkpoint.list_checkpoints(run.folder / "checkpoints")
    step = int(saved[-1].name.split("-")[1]) if saved else 0
    return RunState("begun", step, total, {}, seconds)


def _total(recipe: Recipe, records: list[dict[str, Any]]) -> int | None:
    """Updates of the whole training, as any line of the journal tells."""
    if not records:
        return recipe.steps if not recipe.cooldown_epochs else None
    return Timeline(recipe, round(records[-1]["step"] / records[-1]["epoch"])).total


def _numbers(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("kind", "wall", "split")}


def _problems(run: SweepRun, state: RunState) -> list[str]:
    """Why the folder does not hold what the sweep describes, a line each."""
    if state.kind == "missing":
        others = set(_names_in(run.folder)) - {HALF_WRITTEN}
        hint = "move it away, or give another --out"
        return [f"{run.title}: {run.folder} is no run, but there is {min(others)} in it; {hint}"] if others else []
    before = recipe_of(run.folder)[1]
    hint = "give another --out, or the cell another name"
    if (before.name, before.task) != (run.recipe.name, run.recipe.task):
        return [f"{run.title}: {run.folder} was begun with the recipe {before.name}, not {run.recipe.name}; {hint}"]
    return [
        f"{run.title}: {run.folder} was begun with {name} = {_text(old)}, not {_text(new)}; {hint}"
        for name, (old, new) in _differences(before, run.recipe, state).items()
    ]


def _names_in(folder: Path) -> list[str]:
    if os.path.lexists(folder) and not folder.is_dir():
        return [folder.name]
    return os.listdir(folder) if folder.is_dir() else []


def _differences(before: Recipe, now: Recipe, state: RunState) -> dict[str, tuple[Any, Any]]:
    """The options on which results depend and that are not as before."""
    old, new = _values(before), _values(now)
    found = {name: (old[name], new[name]) for name in new if name not in FREE and old[name] != new[name]}
    # Data that were moved are compared when a run goes on; of a finished run, only their name is.
    if state.kind == "finished" and _name_of_data(before) != _name_of_data(now):
        found["data"] = before.data, now.data
    return found


def _values(recipe: Recipe) -> dict[str, Any]:
    """The options as JSON has them."""
    path = None if recipe.checkpoint is None else os.path.abspath(recipe.checkpoint)
    return dict(json.loads(json.dumps(as_values(recipe) | {"checkpoint": path})))


def _name_of_data(recipe: Recipe) -> str | None:
    return None if recipe.data is None else Path(recipe.data).name


def _text(value: Any) -> str:
    return "None" if value is None else json.dumps(value)
