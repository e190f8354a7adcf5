"""Progress of a sweep: a bar over all runs and one per current run, or lines if there is no terminal."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rich.progress import TaskID

from polaformer.cli.output import LiveProgress
from polaformer.cli.training_view import duration
from polaformer.tasks.sweep import SweepRun
from polaformer.tasks.sweep_state import RunState
from polaformer.training.metric import VALIDATION


@dataclass
class _Progress:
    """Progress of one run; times are those of the clock, in seconds."""

    step: int
    total: int | None
    is_over: bool
    launched: float | None = None  # when its process was started
    startup: float | None = None  # seconds from there to the first reported update
    first: float | None = None  # time of that update …
    num_timed: int = 0  # … and updates since then
    ended: float | None = None


class Pace:
    """Speed of the runs of a sweep and estimated time left; `clock` counts seconds."""

    def __init__(self, states: Mapping[SweepRun, RunState], jobs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.jobs, self.clock = jobs, clock
        self.runs = {run: _Progress(one.step, one.total, one.kind == "finished") for run, one in states.items()}

    def start(self, run: SweepRun) -> None:
        """The process of the run was started."""
        self.runs[run].launched = self.clock()

    def resume(self, run: SweepRun, step: int, total: int) -> None:
        """The run resumes from a step, which may not be the last one that was reported."""
        self.runs[run].step, self.runs[run].total = step, total

    def update(self, run: SweepRun, step: int, total: int) -> None:
        """The run has reached a step."""
        one = self.runs[run]
        if one.first is None:
            one.first = self.clock()
            one.startup = one.first - one.launched if one.launched is not None else None
        else:
            one.num_timed += step - one.step
        one.step, one.total = step, total

    def end(self, run: SweepRun) -> None:
        """The run has finished or failed."""
        self.runs[run].ended, self.runs[run].is_over = self.clock(), True

    @property
    def num_over(self) -> int:
        """Runs that need no more training."""
        return sum(one.is_over for one in self.runs.values())

    def share(self) -> float:
        """The fraction of updates done, or dropped with a failed run; 0 while no total is known."""
        totals = {run: self._total(run) for run in self.runs}
        whole = sum(totals.values())
        return 1 - sum(totals[run] - one.step for run, one in self.runs.items() if not one.is_over) / whole if whole else 0.0

    def updates_per_second(self) -> float:
        """Updates per second, summed over the current runs."""
        current = [one for one in self.runs.values() if not one.is_over and one.num_timed]
        return sum(one.num_timed / self._timed_seconds(one) for one in current if self._timed_seconds(one) > 0)

    def seconds_left(self) -> float | None:
        """Seconds until all runs are over, if each cell keeps its speed; None while no speed is known."""
        left = {run: self._total(run) - one.step for run, one in self.runs.items() if not one.is_over}
        if not left:
            return 0.0
        of_all = self._seconds_per_update(list(self.runs))
        if of_all is None:
            return None
        seconds = self._mean_startup() * sum(self.runs[run].startup is None for run in left)
        for run, updates in left.items():
            of_cell = self._seconds_per_update([one for one in self.runs if one.cell == run.cell])
            seconds += updates * (of_all if of_cell is None else of_cell)
        return seconds / min(self.jobs, len(left))

    def _mean_startup(self) -> float:
        """Mean seconds that a process takes before its first update."""
        known = [one.startup for one in self.runs.values() if one.startup is not None]
        return sum(known) / len(known) if known else 0.0

    def _total(self, run: SweepRun) -> float:
        """Its number of updates; while unknown, that of another run of its cell, or else the mean over all known runs."""
        of_run = self.runs[run].total
        if of_run is not None:
            return of_run
        known = {other: progress.total for other, progress in self.runs.items() if progress.total is not None}
        same = [total for other, total in known.items() if other.cell == run.cell]
        return same[0] if same else sum(known.values()) / len(known) if known else 0

    def _seconds_per_update(self, runs: list[SweepRun]) -> float | None:
        updates = sum(self.runs[run].num_timed for run in runs)
        return sum(self._timed_seconds(self.runs[run]) for run in runs) / updates if updates else None

    def _timed_seconds(self, one: _Progress) -> float:
        """Seconds from its first update until now, or until it ended."""
        return 0.0 if one.first is None else (self.clock() if one.ended is None else one.ended) - one.first


class SweepView:
    """Shows the progress of a sweep on stderr; pass it to `train_runs`."""

    def __init__(self, states: Mapping[SweepRun, RunState], jobs: int) -> None:
        self.pace = Pace(states, jobs)
        self.bar = LiveProgress()
        self.whole = self.bar.add_task("", total=1.0, numbers="")
        self.current: dict[SweepRun, TaskID] = {}
        self.scores: dict[SweepRun, str] = {}

    def __enter__(self) -> "SweepView":
        self.refresh()
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def started(self, run: SweepRun) -> None:
        """A process was started for the run."""
        self.pace.start(run)
        self.current[run] = self.bar.add_task(f"  {run.title}", total=None, numbers="starting")

    def reported(self, run: SweepRun, event: dict[str, Any]) -> None:
        """Its process reports an update, an evaluation, or that it resumed from a checkpoint."""
        if event["event"] == "eval":
            metric = run.recipe.terms.metric
            self.scores[run] = f", {metric.label} {metric.text(event['value'])}" if event["value"] is not None else ""
        elif event["event"] == "resumed":
            self.pace.resume(run, event["step"], event["total"])
        else:
            self.pace.update(run, event["step"], event["total"])
        one = self.pace.runs[run]
        numbers = f"{one.step:,}/{one.total or 0:,}{self.scores.get(run, '')}"
        self.bar.update(self.current[run], completed=one.step, total=one.total, numbers=numbers)

    def finished(self, run: SweepRun, state: RunState) -> None:
        """The run has finished."""
        metric = run.recipe.terms.metric
        value = state.splits[VALIDATION].get(metric.name)
        score = f"{metric.label} {metric.text(value)}" if value is not None else f"no {metric.label}"
        self._over(run, score)

    def failed(self, run: SweepRun, reason: str) -> None:
        """The run has failed."""
        self._over(run, f"failed: {reason} (log: {run.log})")

    def stopping(self, running: int) -> None:
        """This number of processes was asked to save and end."""
        self.bar.say(f"stopping: {running} {'run is' if running == 1 else 'runs are'} being saved; signal again to exit now")

    def refresh(self) -> None:
        """Updates the bar over all runs."""
        title = f"{self.pace.num_over} of {len(self.pace.runs)} runs"
        numbers = f"{self.pace.updates_per_second():,.1f} updates/s{self._left()}, elapsed"
        self.bar.update(self.whole, description=title, completed=self.pace.share(), numbers=numbers)

    def _over(self, run: SweepRun, result: str) -> None:
        self.pace.end(run)
        self.bar.remove_task(self.current.pop(run))
        self.bar.say(f"{run.title}: {result}; {self.pace.num_over} of {len(self.pace.runs)} runs{self._left()}")

    def _left(self) -> str:
        left = self.pace.seconds_left()
        return "" if left is None else f", {duration(left)} left"
