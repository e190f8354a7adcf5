"""`polaformer sweep`: train the runs that a file describes, several at a time, and tabulate their results."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from polaformer.cli.command import REQUIRED
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


def check_jobs(jobs: int, threads: int | None) -> None:
    """Raises UsageError unless that many runs can be trained at a time."""
    if jobs < 1:
        raise UsageError(f"--jobs is {jobs}; give an integer ≥ 1")
    if threads is not None and threads < 1:
        raise UsageError(f"--threads is {threads}; give an integer ≥ 1")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError("a sweep starts its own processes; run it without torchrun, in a single SLURM task")


def threads_per_run(jobs: int, threads: int | None) -> int:
    """The given number of threads, or cores divided by jobs."""
    return max(1, available_cores() // jobs) if threads is None else threads


def train_unfinished(states: Mapping[SweepRun, RunState], jobs: int, threads: int) -> dict[SweepRun, str]:
    """Trains the runs that are not finished, showing progress; returns those that failed with the reasons."""
    require("train", "accelerate", "tensorboard", "matplotlib")
    unfinished = [run for run, state in states.items() if state.kind != "finished"]
    for line in dict.fromkeys(line for run in unfinished for line in run.recipe.before_training()):
        print_line(line, stderr=True)
    if not unfinished:
        return {}
    with SweepView(states, jobs) as view:
        return train_runs(_first_seeds_first(unfinished), jobs, threads, view)


@dataclass(frozen=True)
class Sweep:
    """Train every cell of a sweep with every seed, and tabulate the mean and standard deviation.

    A TOML file lists the cells: name, recipe, options and seeds of each (docs/sweeps has an example). Each run is stored in
    OUT/CELL/SEED and its output in OUT/CELL/SEED.log. Finished runs are not trained again: after an interruption, the same
    command resumes the sweep. A failed run does not stop the others, but makes the exit code 1.

    Example: polaformer sweep docs/sweeps/digits.toml --jobs 2

    Example: polaformer sweep ablation.toml rivals.toml --out sweeps/paper --dry-run
    """

    files: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE", help_behavior_hint=REQUIRED)]] = ()
    """Files that describe the cells; several files form one sweep."""
    out: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory for runs and results; sweeps/NAME if not given, where NAME is the first file without .toml."""
    jobs: int = 1
    """Number of runs to train at a time."""
    threads: int | None = None
    """Threads per run; cores divided by jobs if not given."""
    dry_run: bool = False
    """List the runs and the progress of each, and stop."""
    collect: bool = False
    """Train nothing; tabulate the finished runs."""
    json: bool = False
    """Print the result as JSON on stdout, and nothing else."""

    def run(self) -> int:
        """Trains the unfinished runs and prints the table; or only lists or collects them."""
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
        return threads_per_run(self.jobs, self.threads)

    def _check(self) -> None:
        if not self.files:
            raise UsageError("no file given; name a file that describes a sweep, as in: polaformer sweep digits.toml")
        if self.dry_run and self.collect:
            raise UsageError("--dry-run and --collect are both given; give only one")
        check_jobs(self.jobs, self.threads)

    def _find(self, name: str) -> Recipe:
        """The recipe of that name, with no more data workers than there are cores per run."""
        recipe = find(name)
        return replace(recipe, num_workers=min(recipe.num_workers, max(1, available_cores() // self.jobs)))

    def _train(self, states: dict[SweepRun, RunState]) -> int:
        prepare_folder(self._folder, "--out")
        with Run(self._folder).lock():
            failures = train_unfinished(states, self.jobs, self._threads)
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
        print_all(table, "Nothing was trained; the same command without --dry-run trains the unfinished runs.")
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
        unfinished = sum(state.kind != "finished" for state in results.states.values()) - len(results.failures)
        if unfinished:
            print_all(
                f"{unfinished} of {len(results.states)} runs are not finished; the same command without --collect trains them."
            )
        if not self.collect:
            print_all(*(f"saved {self._folder / name}" for name in RESULTS))


def _first_seeds_first(runs: list[SweepRun]) -> list[SweepRun]:
    """The first seed of every cell, then the second of each: this soon gives rough results and a rough time left."""
    seen: dict[str, int] = {}
    ranks = {}
    for run in runs:
        ranks[run] = seen[run.cell] = seen.get(run.cell, -1) + 1
    return sorted(runs, key=ranks.__getitem__)


def _print_table(results: ResultTable) -> None:
    metric = results.metric
    unit = f", {metric.unit}" if metric.unit else ""
    caption = "±: sample standard deviation over the seeds (n − 1)"
    table = new_table(
        f"{metric.label} on {results.split}{unit}", "cell", "mean", "±", "seeds", "best", "worst", "failed", caption=caption
    )
    for row in results.rows:
        table.add_row(row.cell, *_columns(row, metric.digits))
    print_all(table)


def _columns(row: CellResult, digits: int) -> list[str]:
    mean, spread, best, worst = (
        "–" if value is None else f"{value:.{digits}f}" for value in (row.mean, row.standard_deviation, row.best, row.worst)
    )
    seeds = f"{row.seeds}" if row.seeds == row.planned else f"{row.seeds} of {row.planned}"
    return [mean, spread, seeds, best, worst, f"{row.failed or ''}"]
