"""The progress of the runs of a sweep, read from their directories. Needs no PyTorch."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from polaformer.errors import DataError, SettingsError
from polaformer.tasks.recipe import Recipe, as_values
from polaformer.tasks.stored_recipe import load_recipe
from polaformer.tasks.sweep import SweepRun
from polaformer.training import checkpoint, journal
from polaformer.training.metric import VALIDATION
from polaformer.training.run import CONFIG, Run
from polaformer.training.timeline import Timeline

HALF_WRITTEN = f".{CONFIG}.tmp"  # left behind if the process is killed while writing the configuration
CHANGEABLE = ("data", "num_workers")  # options that may change between two calls, as they do not affect results


@dataclass(frozen=True)
class RunState:
    """The progress of a run.

    step: of the checkpoint to resume from, or the last step of a finished run; total: number of steps, None if not known yet.
    splits: of a finished run, the record of every split with the weights that were shipped. seconds: of training alone.
    """

    kind: Literal["missing", "begun", "finished"]
    step: int = 0
    total: int | None = None
    splits: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float | None = None

    @property
    def text(self) -> str:
        """The state in words."""
        if self.kind != "begun":
            return self.kind
        return f"begun, at step {self.step}" + (f" of {self.total}" if self.total else "")


def read_states(runs: Iterable[SweepRun], *, out: str = "--out", other: str = "rename the cell") -> dict[SweepRun, RunState]:
    """The states of all runs; raises SettingsError with all runs that were started with other options than planned now.

    out, other: what its message advises: another value of this option, which names the directory, or something else.
    """
    found, problems = {}, list[str]()
    for run in runs:
        found[run] = read_state(run)
        problems += _problems(run, found[run], out, other)
    if problems:
        raise SettingsError(problems)
    return found


def read_state(run: SweepRun) -> RunState:
    """The state of one run; raises DataError if its files are damaged."""
    if not os.path.lexists(run.folder / CONFIG):
        return RunState("missing", total=run.recipe.steps if not run.recipe.cooldown_epochs else None)
    records = journal.read(run.folder)
    try:
        return _state_from_journal(run, records)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError, ValueError) as error:
        raise DataError(f"{run.folder / journal.NAME} is damaged: {error!r}; restore it, or remove the run") from error


def _state_from_journal(run: SweepRun, records: list[dict[str, Any]]) -> RunState:
    total = _total_steps(run.recipe, records)
    seconds = records[-1]["wall"]["seconds"] if records else None
    evaluations = [record for record in records if record["kind"] == "eval" and record["step"] == total]
    if evaluations and total is not None and Run(run.folder).model.is_file():
        final = {record["split"]: _results(record) for record in records if record["kind"] == "final"}
        return RunState("finished", total, total, {VALIDATION: _results(evaluations[-1])} | final, seconds)
    saved = checkpoint.list_checkpoints(run.folder / "checkpoints")
    step = int(saved[-1].name.split("-")[1]) if saved else 0
    return RunState("begun", step, total, {}, seconds)


def _total_steps(recipe: Recipe, records: list[dict[str, Any]]) -> int | None:
    """Updates of the whole training run; any line of the journal determines it."""
    if not records:
        return recipe.steps if not recipe.cooldown_epochs else None
    return Timeline(recipe, round(records[-1]["step"] / records[-1]["epoch"])).total


def _results(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("kind", "wall", "split")}


def _problems(run: SweepRun, state: RunState, out: str, other: str) -> list[str]:
    """The differences between the run directory and what is planned, one line each."""
    if state.kind == "missing":
        others = set(_names_in(run.folder)) - {HALF_WRITTEN}
        hint = f"move it, or give another {out}"
        return [f"{run.title}: {run.folder} is not a run directory, but contains {min(others)}; {hint}"] if others else []
    before = load_recipe(run.folder)
    hint = f"give another {out}, or {other}"
    if (before.name, before.task) != (run.recipe.name, run.recipe.task):
        return [f"{run.title}: {run.folder} was started with the recipe {before.name}, not {run.recipe.name}; {hint}"]
    return [
        f"{run.title}: {run.folder} was started with {name} = {_format(old)}, not {_format(new)}; {hint}"
        for name, (old, new) in _differences(before, run.recipe, state).items()
    ]


def _names_in(folder: Path) -> list[str]:
    if os.path.lexists(folder) and not folder.is_dir():
        return [folder.name]
    return os.listdir(folder) if folder.is_dir() else []


def _differences(before: Recipe, now: Recipe, state: RunState) -> dict[str, tuple[Any, Any]]:
    """The options that affect results and have changed: name → (old value, new value)."""
    old, new = _values(before), _values(now)
    found = {name: (old[name], new[name]) for name in new if name not in CHANGEABLE and old[name] != new[name]}
    # Moved data are compared when a run resumes; for a finished run, only their name is.
    if state.kind == "finished" and _data_name(before) != _data_name(now):
        found["data"] = before.data, now.data
    return found


def _values(recipe: Recipe) -> dict[str, Any]:
    """The options as they are after a round trip through JSON."""
    path = None if recipe.checkpoint is None else os.path.abspath(recipe.checkpoint)
    return dict(json.loads(json.dumps(as_values(recipe) | {"checkpoint": path})))


def _data_name(recipe: Recipe) -> str | None:
    return None if recipe.data is None else Path(recipe.data).name


def _format(value: Any) -> str:
    return "None" if value is None else json.dumps(value)
