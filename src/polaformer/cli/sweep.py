"""`polaformer sweep`: many runs from a file, several at a time, and one table of their results."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from polaformer.cli.errors import INCORRECT, UsageError
from polaformer.cli.output import new_table, prepare_folder, print_all, print_json, print_line, to_json
from polaformer.cli.sweep_training import train_runs
from polaformer.cli.sweep_view import SweepView
from polaformer.extras import require
from polaformer.recipes.registry import find
from polaformer.regular_files import write_atomically, writing
from polaformer.tasks.recipe import Recipe
from polaformer.tasks.sweep import RESULTS, SweepRun, plan_runs, read_cells
from polaformer.tasks.sweep_results import CellResult, ResultTable, SweepResults
from polaformer.tasks.sweep_state import RunState, read_state, read_states
from polaformer.training.run import Run
from polaformer.training.settings import available_cores


@dataclass(frozen=True)
class Sweep:
    """Train every cell of a sweep with every seed, and print mean and spread in one table.

    A TOML file lists the cells: a name, a recipe, its options, its seeds (docs/sweeps shows one). Each run goes into
    OUT/CELL/SEED, what it prints into OUT/CELL/SEED.log. Only what is missing is trained: stopped or killed, the same command
    goes on where it was. A run that fails does not stop the others; the exit code is then 1.

    Example: polaformer sweep docs/sweeps/digits.toml --jobs 2

    Example: polaformer sweep ablation.toml rivals.toml --out sweeps/paper --dry-run
    """

    files: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE")]] = ()
    """Files that describe the cells; several are one sweep."""
    out: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder for the runs and the results; sweeps/NAME unless given, where NAME is that of the first file."""
    jobs: int = 1
    """Runs at a time."""
    threads: int | None = None
    """Threads of each run; the cores divided by the jobs unless given."""
    dry_run: bool = False
    """List the runs and how far each has come, and stop."""
    collect: bool = False
    """Train nothing, and print the table of what is there."""
    json: bool = False
    """Print the result as JSON on stdout and nothing else there."""

    def run(self) -> int:
        """Trains what is missing and prints the table; or lists, or collects."""
        self._check()
        runs = plan_runs(read_cells(self.files, self._find), self._folder)
        states = read_states(runs)
        if self.dry_run:
            return self._list(states)
        if self.collect:
            self._print(SweepResults(states, {}))
            return 0
        return self._train(states)

    @property
    def _folder(self) -> Path:
        return Path(self.out) if self.out else Path("sweeps") / Path(self.files[0]).stem

    @property
    def _threads(self) -> int:
        return max(1, available_cores() // self.jobs) if self.threads is None else self.threads

    def _check(self) -> None:
        if not self.files:
            raise UsageError("no file given; name one that describes a sweep, as in: polaformer sweep digits.toml")
        if self.jobs < 1:
            raise UsageError(f"--jobs is {self.jobs}; give a whole number of at least 1")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads is {self.threads}; give a whole number of at least 1")
        if self.dry_run and self.collect:
            raise UsageError("--dry-run and --collect are given; give one of them")
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise UsageError("a sweep starts its processes itself; run it without torchrun, in one task of SLURM")

    def _find(self, name: str) -> Recipe:
        """The recipe of that name, with no more processes that read data than there are cores for each run."""
        recipe = find(name)
        return replace(recipe, num_workers=min(recipe.num_workers, max(1, available_cores() // self.jobs)))

    def _train(self, states: dict[SweepRun, RunState]) -> int:
        require("train", "accelerate", "tensorboard", "matplotlib")
        missing = [run for run, state in states.items() if state.kind != "finished"]
        for line in dict.fromkeys(line for run in missing for line in run.recipe.before_training()):
            print_line(line, stderr=True)
        prepare_folder(self._folder, "--out")
        with Run(self._folder).lock():
            failures = {}
            if missing:
                with SweepView(states, self.jobs) as view:
                    failures = train_runs(_first_seeds_first(missing), self.jobs, self._threads, view)
            results = SweepResults({run: read_state(run) for run in states}, failures)
            self._write(results)
        self._print(results)
        return INCORRECT if failures else 0

    def _list(self, states: Mapping[SweepRun, RunState]) -> int:
        if self.json:
            print_json({"command": "sweep", "out": str(self._folder), **SweepResults(states, {}).record()})
            return 0
        table = new_table(f"{len(states)} runs in {self._folder}", "cell", "seed", "recipe", "state")
        for run, state in states.items():
            table.add_row(run.cell, str(run.seed), run.recipe.name, state.text)
        print_all(table, "Nothing was trained; the same command without --dry-run trains what is not finished.")
        return 0

    def _write(self, results: SweepResults) -> None:
        as_json, as_csv = (self._folder / name for name in RESULTS)
        with writing(self._folder):
            write_atomically(as_json, to_json({"command": "sweep", "out": str(self._folder), **results.record()}))
            write_atomically(as_csv, results.csv())

    def _print(self, results: SweepResults) -> None:
        if self.json:
            print_json({"command": "sweep", "out": str(self._folder), **results.record()})
            return
        for table in results.tables():
            _print_table(table)
        for run, reason in results.failures.items():
            print_all(f"{run.title} failed: {reason} (log: {run.log})")
        others = sum(state.kind != "finished" for state in results.states.values()) - len(results.failures)
        if others:
            print_all(
                f"{others} of {len(results.states)} runs are not finished; the same command without --collect trains them."
            )
        if not self.collect:
            print_all(*(f"saved {self._folder / name}" for name in RESULTS))


def _first_seeds_first(runs: list[SweepRun]) -> list[SweepRun]:
    """The first seed of every cell, then the second of each: the table and the time left are soon known in outline."""
    seen: dict[str, int] = {}
    places = {}
    for run in runs:
        places[run] = seen[run.cell] = seen.get(run.cell, -1) + 1
    return sorted(runs, key=places.__getitem__)


def _print_table(found: ResultTable) -> None:
    metric = found.metric
    unit = f", {metric.unit}" if metric.unit else ""
    caption = "± is the standard deviation over the seeds, with n − 1"
    table = new_table(
        f"{metric.label} on {found.split}{unit}", "cell", "mean", "±", "seeds", "best", "worst", "failed", caption=caption
    )
    for row in found.rows:
        table.add_row(row.cell, *_texts(row, metric.digits))
    print_all(table)


def _texts(row: CellResult, digits: int) -> list[str]:
    mean, spread, best, worst = (
        "–" if value is None else f"{value:.{digits}f}" for value in (row.mean, row.standard_deviation, row.best, row.worst)
    )
    seeds = f"{row.seeds}" if row.seeds == row.planned else f"{row.seeds} of {row.planned}"
    return [mean, spread, seeds, best, worst, f"{row.failed or ''}"]
