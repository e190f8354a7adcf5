"""Progress of a training run: a bar with throughput, loss, metric and time left, or lines if there is no terminal."""

import os
import time
from types import TracebackType
from typing import Any

from rich.progress import TaskID

from polaformer.cli.output import LiveProgress
from polaformer.tasks.recipe import Recipe


class TrainingView:
    """Shows training progress on stderr; pass it to the loop as `watch`. epochs: None if the budget is in updates."""

    def __init__(self, name: str, recipe: Recipe) -> None:
        self.name, self.batch_size, self.terms = name, recipe.batch_size, recipe.terms
        self.epochs = recipe.num_epochs
        self.is_silent = os.environ.get("RANK", "0") != "0"  # only one of several processes prints
        self.bar = LiveProgress(is_silent=self.is_silent)
        self.task: TaskID | None = None
        self.score = ""
        self.loss = 0.0
        self.started: tuple[float, int] | None = None

    def __enter__(self) -> "TrainingView":
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def __call__(self, event: str, record: dict[str, Any]) -> None:
        """Handles one event of the training loop."""
        if self.is_silent:
            return
        if event == "update":
            self._update(record)
        elif event == "eval":
            self._evaluated(record)
        elif event == "evaluation" and self.task is not None:
            self.bar.update(self.task, description=f"{self._title(record['step'], self.total)}, evaluating")
        elif event == "resumed":
            self.bar.say(f"resumed from {record['path']}, step {record['step']} of {record['total']}")
        elif event == "note":
            self.bar.say(record["text"])
        elif event == "bad samples":
            found = record["samples"]
            self.bar.say(f"{len(found)} {self.terms.sample_noun} of this epoch could not be used: " + "; ".join(found[:3]))

    def _update(self, record: dict[str, Any]) -> None:
        step, total = record["step"], record["total"]
        now = time.monotonic()
        if self.started is None:
            self.started = now, step
        self.loss = record["loss"]
        self.step, self.total = step, total
        if not self.bar.is_shown:
            return
        if self.task is None:
            self.task = self.bar.add_task(self.name, total=total, numbers="")
        self.bar.update(self.task, completed=step, description=self._title(step, total), numbers=self._numbers())

    def _title(self, step: int, total: int) -> str:
        if self.epochs is None:
            return f"{self.name}, update {step:,}/{total:,}"
        epoch = min(self.epochs, 1 + (step - 1) * self.epochs // total)
        return f"{self.name}, epoch {epoch}/{self.epochs}"

    def _numbers(self) -> str:
        assert self.started is not None
        start_time, first_step = self.started
        done, seconds = self.step - first_step, time.monotonic() - start_time
        if not done or not seconds:
            return f"loss {self.loss:.3f}"
        left = seconds / done * (self.total - self.step)
        rate = done * self.batch_size / seconds
        speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
        return f"{speed} {self.terms.sample_noun}/s, loss {self.loss:.3f}{self.score}, {duration(left)} left, elapsed"

    def _evaluated(self, record: dict[str, Any]) -> None:
        metric = self.terms.metric
        self.score = f", {metric.label} {metric.text(record[metric.name])}"
        if not self.bar.is_shown and self.started is not None:
            self.bar.say(f"{self._title(record['step'], self.total)}: {self._numbers().removesuffix(', elapsed')}")


def duration(seconds: float) -> str:
    """Seconds in readable form, such as 1:02:03 or 2 d 4 h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
