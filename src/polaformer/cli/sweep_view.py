"""What a sweep shows while it is trained: a bar over all runs and one for each current one, or lines without a terminal."""

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
class _Tracked:
    """How far a run is. launched: when its process was started; loading: how many seconds later it told of a first update.

    made: updates since then; first: when that was; last: when it was over.
    """

    step: int
    total: int | None
    is_over: bool
    launched: float | None = None
    loading: float | None = None
    first: float | None = None
    last: float | None = None
    made: int = 0


class Pace:
    """How fast the runs of a sweep go, and when all will be done; `clock` counts seconds."""

    def __init__(self, states: Mapping[SweepRun, RunState], jobs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.jobs, self.clock = jobs, clock
        self.runs = {run: _Tracked(one.step, one.total, one.kind == "finished") for run, one in states.items()}

    def start(self, run: SweepRun) -> None:
        """Its process was started."""
        self.runs[run].launched = self.clock()

    def resume(self, run: SweepRun, step: int, total: int) -> None:
        """It goes on from a step, which may not be the one that it was last seen at."""
        self.runs[run].step, self.runs[run].total = step, total

    def update(self, run: SweepRun, step: int, total: int) -> None:
        """So many of its updates are made."""
        one = self.runs[run]
        if one.first is None:
            one.first = self.clock()
            one.loading = one.first - one.launched if one.launched is not None else None
        else:
            one.made += step - one.step
        one.step, one.total = step, total

    def end(self, run: SweepRun) -> None:
        """It is over, in whatever way."""
        self.runs[run].last, self.runs[run].is_over = self.clock(), True

    @property
    def num_over(self) -> int:
        """Runs that need no more training."""
        return sum(one.is_over for one in self.runs.values())

    def share(self) -> float:
        """Of all updates, those that are made, or that a failed run will not make; 0 where no total is known yet."""
        totals = {run: self._total(run) for run in self.runs}
        whole = sum(totals.values())
        return 1 - sum(totals[run] - one.step for run, one in self.runs.items() if not one.is_over) / whole if whole else 0.0

    def updates_per_second(self) -> float:
        """Over all runs that are trained now."""
        current = [one for one in self.runs.values() if not one.is_over and one.made]
        return sum(one.made / self._spent(one) for one in current if self._spent(one) > 0)

    def seconds_left(self) -> float | None:
        """Until all runs are over, if each cell goes on as fast as it did; None while nothing is known."""
        left = {run: self._total(run) - one.step for run, one in self.runs.items() if not one.is_over}
        if not left:
            return 0.0
        everywhere = self._seconds_per_update(list(self.runs))
        if everywhere is None:
            return None
        seconds = self._loading() * sum(self.runs[run].loading is None for run in left)
        for run, updates in left.items():
            of_cell = self._seconds_per_update([one for one in self.runs if one.cell == run.cell])
            seconds += updates * (everywhere if of_cell is None else of_cell)
        return seconds / min(self.jobs, len(left))

    def _loading(self) -> float:
        """Seconds that a process takes before its first update, on average."""
        known = [one.loading for one in self.runs.values() if one.loading is not None]
        return sum(known) / len(known) if known else 0.0

    def _total(self, run: SweepRun) -> float:
        """Its updates; where they are not known yet, those of other runs: of the same cell, or else of all on average."""
        of_run = self.runs[run].total
        if of_run is not None:
            return of_run
        known = {one: tracked.total for one, tracked in self.runs.items() if tracked.total is not None}
        same = [total for one, total in known.items() if one.cell == run.cell]
        return same[0] if same else sum(known.values()) / len(known) if known else 0

    def _seconds_per_update(self, runs: list[SweepRun]) -> float | None:
        made = sum(self.runs[run].made for run in runs)
        return sum(self._spent(self.runs[run]) for run in runs) / made if made else None

    def _spent(self, one: _Tracked) -> float:
        """Seconds since its first update."""
        return 0.0 if one.first is None else (self.clock() if one.last is None else one.last) - one.first


class SweepView:
    """Tells of a sweep on stderr; give it to `train_runs`."""

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

    def happened(self, run: SweepRun, event: dict[str, Any]) -> None:
        """Its process tells of an update, an evaluation, or that it goes on from a checkpoint."""
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
        """The run is trained to its end."""
        metric = run.recipe.terms.metric
        value = state.splits[VALIDATION].get(metric.name)
        score = f"{metric.label} {metric.text(value)}" if value is not None else f"no {metric.label}"
        self._over(run, score)

    def failed(self, run: SweepRun, reason: str) -> None:
        """The run cannot be trained to its end."""
        self._over(run, f"failed: {reason} (log: {run.log})")

    def stopping(self, running: int) -> None:
        """So many processes were asked to save and to end."""
        self.bar.say(f"stopping: {running} {'run is' if running == 1 else 'runs are'} being saved; once more ends at once")

    def refresh(self) -> None:
        """Shows the numbers of now."""
        title = f"{self.pace.num_over} of {len(self.pace.runs)} runs"
        numbers = f"{self.pace.updates_per_second():,.1f} updates/s{self._left()}, spent"
        self.bar.update(self.whole, description=title, completed=self.pace.share(), numbers=numbers)

    def _over(self, run: SweepRun, what: str) -> None:
        self.pace.end(run)
        self.bar.remove_task(self.current.pop(run))
        self.bar.say(f"{run.title}: {what}; {self.pace.num_over} of {len(self.pace.runs)} runs{self._left()}")

    def _left(self) -> str:
        left = self.pace.seconds_left()
        return "" if left is None else f", {duration(left)} left"
