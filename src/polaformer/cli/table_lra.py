"""`polaformer table lra`: the paper's table of the Long Range Arena beside our runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.table import Table

from polaformer.cli.errors import INCORRECT, UsageError
from polaformer.cli.output import load, new_table, prepare_folder, print_all, print_json
from polaformer.cli.sweep import check_jobs, threads_per_run, train_unfinished
from polaformer.data.sources.lra.datasets import DatasetName
from polaformer.errors import nearest, raise_all
from polaformer.recipes.lra import build_recipe
from polaformer.tasks.changes import with_changes
from polaformer.tasks.sequence.published import ROWS, SOURCES, TASKS, printed_accuracy
from polaformer.tasks.sequence.recipe import SequenceRecipe
from polaformer.tasks.sequence.rows import ARENA_ROWS
from polaformer.tasks.sweep import MAX_SEED, Cell, plan_runs
from polaformer.tasks.sweep_state import read_states
from polaformer.training.run import Run

if TYPE_CHECKING:
    from polaformer.analysis.lra_table import TableCell


WITHOUT_VALIDATION: tuple[DatasetName, ...] = ("text",)  # tasks without a validation split, for --selection
# What to change if --runs has a run of the same name with other settings.
OTHER_OPTIONS = "the --steps, --lr, --selection, --accumulation and --data that it was started with"


@dataclass(frozen=True)
class TableLra:
    """Show the paper's table of the Long Range Arena beside the accuracies of our own runs.

    Collects every finished run below --runs. With --run it first trains the cells that are missing, as a sweep does: each run
    is stored in RUNS/TASK-ROW/SEED, and the same command resumes what was interrupted.

    Example: polaformer table lra --runs runs/lra

    Example: polaformer table lra --run --tasks text --rows pola-a3 softmax --data text=aclImdb --steps 5000 --jobs 2
    """

    runs: tuple[str, ...] = ("runs/lra",)
    """Directories that hold runs; --run stores new ones in the first."""
    tasks: tuple[DatasetName, ...] = TASKS
    """Tasks to show."""
    rows: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: all)")] = ()
    """Rows to show, such as pola-a3 or softmax."""
    train: Annotated[bool, tyro.conf.arg(name="run")] = False
    """Train the missing cells first; needs --rows."""
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TASK=DIR", help_behavior_hint="(default: none)")] = ()
    """With --run: the data of each task, as in text=aclImdb."""
    seeds: tuple[int, ...] = (0,)
    """With --run: random seeds of each cell."""
    steps: int | None = None
    """With --run: updates of each run; by default 50,000, as published. The warm-up keeps its share of them."""
    lr: float | None = None
    """With --run: largest learning rate; by default as published. Those of the first and the last update change with it."""
    selection: Literal["published", "held-out"] | None = None
    """With --run: how the weights are chosen on Text, on the test set, as published, or on held-out training reviews."""
    accumulation: int | None = None
    """With --run: micro-batches per update; by default 1."""
    jobs: int = 1
    """With --run: number of runs to train at a time."""
    threads: int | None = None
    """With --run: threads per run; by default cores divided by jobs."""
    json: bool = False
    """Print the result as JSON on stdout, and nothing else."""

    def run(self) -> int:
        """Trains what is missing if asked to, and prints the table."""
        self._check()
        failures = self._train() if self.train else {}
        load("polaformer.analysis.lra_table")
        from polaformer.analysis.lra_table import collect, find_runs

        found = find_runs(Path(folder) for folder in self.runs if self.train or Path(folder).exists())
        cells = [one for one in collect(found) if self._shows(one.task, one.row)]
        unfinished = sum(one.state.kind != "finished" and self._shows(one.recipe.dataset, one.row) for one in found)
        if self.json:
            print_json({"command": "table lra", "cells": [one.as_record() for one in cells], "unfinished": unfinished})
        else:
            self._show(cells, unfinished)
        for name, reason in failures.items():
            print_all(f"{name} failed: {reason}")
        return INCORRECT if failures else 0

    def _shows(self, task: DatasetName, row: str) -> bool:
        return task in self.tasks and (not self.rows or row in self.rows)

    def _check(self) -> None:
        given: dict[str, Sequence[Any]] = {"--tasks": self.tasks, "--rows": self.rows, "--seeds": self.seeds}
        given["--data"] = [pair.partition("=")[0] for pair in self.data]
        known: dict[str, Sequence[str]] = {"--tasks": TASKS, "--rows": tuple(ARENA_ROWS), "--data": TASKS}
        for option, values in given.items():
            for index, value in enumerate(values):
                if option in known and value not in known[option]:
                    allowed = known[option]
                    raise UsageError(f"{option} has {value!r}; {nearest(value, allowed)}choose from {', '.join(allowed)}")
                if value in values[:index]:
                    raise UsageError(f"{option} has {value!r} twice; give it once")
        for pair in self.data:
            task, _, folder = pair.partition("=")
            if not folder:
                raise UsageError(f"--data has {pair!r}, which names no directory; give {task}=DIR")
        if not self.tasks:
            raise UsageError(f"--tasks is empty; choose from {', '.join(TASKS)}")
        if self.train:
            self._check_training()

    def _check_training(self) -> None:
        check_jobs(self.jobs, self.threads)
        if not self.rows:
            raise UsageError("--run trains the rows of --rows; give some, such as --rows pola-a3 softmax")
        if not self.runs:
            raise UsageError("--runs is empty; --run stores new runs in its first directory")
        if not self.seeds or not all(0 <= seed <= MAX_SEED for seed in self.seeds):
            raise UsageError(f"--seeds is {' '.join(map(str, self.seeds)) or 'empty'}; give integers from 0 to {MAX_SEED}")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"--steps is {self.steps}; give an integer ≥ 1")
        if self.lr is not None and not 0 < self.lr < inf:
            raise UsageError(f"--lr is {self.lr:g}; give a number > 0")
        if self.selection is not None and not set(WITHOUT_VALIDATION) & set(self.tasks):
            raise UsageError(
                "--selection is for text, the task without validation data, which is not among --tasks; leave it out"
            )
        absent = [f"{task}={folder}" for task, folder in self._folders.items() if not Path(folder).exists()]
        if absent:
            raise UsageError(f"--data has {absent[0]}, which does not exist; check the path")
        missing = [task for task in self.tasks if task not in self._folders]
        if missing:
            raise UsageError(f"--run needs the data of {', '.join(missing)}; give --data {missing[0]}=DIR, or fewer --tasks")

    @property
    def _folders(self) -> dict[str, str]:
        """The data by task."""
        return {name: folder for name, _, folder in (pair.partition("=") for pair in self.data)}

    def _train(self) -> dict[str, str]:
        """Trains the cells that have no finished run; returns the reasons of failures by name."""
        out = Path(self.runs[0])
        cells = [Cell(f"{task}-{row}", self._recipe(task, row), self.seeds) for task in self.tasks for row in self.rows]
        raise_all([f"{cell.name}: {problem}" for cell in cells for problem in cell.recipe.problems()])
        runs = plan_runs(cells, out)
        states = read_states(runs, out="--runs", other=OTHER_OPTIONS)
        prepare_folder(out, "--runs")
        with Run(out).lock():
            failed = train_unfinished(states, self.jobs, threads_per_run(self.jobs, self.threads))
        return {run.title: f"{reason} (log: {run.log})" for run, reason in failed.items()}

    def _recipe(self, task: DatasetName, row: str) -> SequenceRecipe:
        """The recipe of a cell; its warm-up is the same share of the steps as in the published schedule."""
        recipe = build_recipe(task, row)
        changes: dict[str, Any] = {"data": self._folders[task]}
        if self.steps is not None and recipe.steps is not None and recipe.warmup_steps is not None:
            changes |= {"steps": self.steps, "warmup_steps": max(1, round(recipe.warmup_steps * self.steps / recipe.steps))}
        given = {
            "accumulation": self.accumulation,
            "lr": self.lr,
            "selection": self.selection if task in WITHOUT_VALIDATION else None,
        }
        return with_changes(recipe, changes | {name: value for name, value in given.items() if value is not None})

    def _show(self, cells: "list[TableCell]", unfinished: int) -> None:
        notes = [f"{letter}  {text}" for letter, text in SOURCES.items()]
        if unfinished:
            runs = "1 run is" if unfinished == 1 else f"{unfinished} runs are"
            notes.append(f"{runs} not finished and not shown; `polaformer resume RUN` resumes one.")
        if not cells:
            notes.append("There are no finished runs below --runs; --run trains some.")
        title = "Where the paper's numbers come from, by the letter behind them:"
        print_all(self._table(cells), *_setups(cells), f"\n{title}", *notes)

    def _table(self, cells: "list[TableCell]") -> Table:
        """A line per mechanism, setup and number of steps, two columns per task: the paper's accuracy, and ours."""
        columns = [column for task in self.tasks for column in (f"{task}\npaper", "\nours")]
        whole = len(self.tasks) == len(TASKS)
        columns += ["average\npaper", "\nours"] if whole else []
        found = new_table("Long Range Arena: accuracy in %", "row", *columns)
        for row in dict.fromkeys([*(self.rows or ARENA_ROWS), *(cell.row for cell in cells)]):
            for setup, ours in _lines([cell for cell in cells if cell.row == row], printed=row in ROWS):
                mark = f" [{_setup_names(cells).index(setup) + 1}]" if setup else ""
                texts = [text for task in self.tasks for text in (_printed(row, task), ours[task].text if task in ours else "")]
                found.add_row(row + mark, *texts, *(_averages(row, ours) if whole else ()))
        return found


def _lines(cells: "list[TableCell]", *, printed: bool) -> "list[tuple[str, dict[DatasetName, TableCell]]]":
    """The lines of a row: setup, and the cells by task; without any cell, one line for what the paper prints."""
    found: dict[tuple[str, int], dict[DatasetName, TableCell]] = {}
    for cell in cells:
        found.setdefault((cell.setup, cell.steps), {})[cell.task] = cell
    return [(setup, ours) for (setup, _), ours in found.items()] or [("", {})] * printed


def _printed(row: str, task: DatasetName) -> str:
    accuracy = printed_accuracy(row, task)
    return "" if accuracy is None else f"{accuracy:.2f} {ROWS[row].source}"


def _averages(row: str, ours: "dict[DatasetName, TableCell]") -> tuple[str, str]:
    """The averages over all tasks: the paper's, and ours if there is a run of each."""
    printed = f"{sum(ROWS[row].accuracies) / len(TASKS):.2f}" if row in ROWS else ""
    return printed, f"{sum(cell.mean for cell in ours.values()) / len(TASKS):.2f}" if len(ours) == len(TASKS) else ""


def _setup_names(cells: "list[TableCell]") -> list[str]:
    return list(dict.fromkeys(cell.setup for cell in cells if cell.setup))


def _setups(cells: "list[TableCell]") -> list[str]:
    """What differs from the published settings, for each mark in the table."""
    return [f"[{number}] {text}" for number, text in enumerate(_setup_names(cells), start=1)]
