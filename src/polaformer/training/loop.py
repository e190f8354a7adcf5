"""The loop: updates, journal, evaluations, checkpoints; the same for every task, one process or many, begun or resumed."""

import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from polaformer.data.batch import Batch
from polaformer.errors import DataError, DivergedError, SampleError, StoppedError
from polaformer.regular_files import writing
from polaformer.training import checkpoint, divergence
from polaformer.training.engine import Engine, NonFiniteError, Progress, Update, taken
from polaformer.training.job import Job
from polaformer.training.journal import Board, Journal, write_csv
from polaformer.training.processes import sum_over
from polaformer.training.run import Run
from polaformer.training.settings import Settings
from polaformer.training.stopping import Stop
from polaformer.training.timeline import Timeline
from polaformer.training.words import Words

Watch = Callable[[str, dict[str, Any]], None]
RESERVED = {
    "kind",
    "step",
    "epoch",
    "wall",
    "unreadable",
    "split",
    "best_step",
}  # names of the journal's own


class Training:
    """One run of one job. `watch` is told of what happens, in every process: a word and a record."""

    def __init__(self, job: Job, settings: Settings, run: Run, accelerator: Accelerator, watch: Watch, words: Words) -> None:
        self.job, self.settings, self.run, self.accelerator, self.watch = job, settings, run, accelerator, watch
        self.words = words
        self.rank, self.world, self.is_main = accelerator.process_index, accelerator.num_processes, accelerator.is_main_process
        self.timeline = Timeline(settings, job.steps_per_epoch)
        self.total = self.timeline.total
        self.engine = Engine(job.model, job.objective, settings, job.steps_per_epoch, accelerator)
        self.progress, self.seconds, self.saved = Progress(), 0.0, -1
        self.stop = Stop()
        self.problem: DataError | None = None  # what this process cannot read

    def train(self) -> dict[str, Any]:
        """Begins or resumes, goes on to the end, and returns the counts of every split, with the weights that are shipped.

        Raises StoppedError after a signal, DivergedError at a loss that is not finite, DataError for data that cannot be used,
        CannotWriteError where there is no room; the state is saved wherever it can be.
        """
        with ExitStack() as stack:
            stack.enter_context(self.stop)
            if self.is_main:
                stack.enter_context(self.run.alone())
            self._resume()
            self._open_journal(stack)
            return self._loop(stack.enter_context(closing(self._batches())))

    def _batches(self) -> Generator[Batch, None, None]:
        return self.job.training_batches(self.progress.step, self.rank, self.world)

    def _loop(self, batches: Iterator[Batch]) -> dict[str, Any]:
        counts, stopping = None, False
        self.clock = time.perf_counter()
        waiting = self._next(batches, self.progress.step)
        if self._anyone(self.problem is not None):
            raise self._ended()
        while True:
            if not stopping and self._evaluation_is_due():
                counts, stopping = self._evaluate()
            if stopping or self.progress.step == self.total:
                break
            # The parts of the next update are fetched before this one, so that all processes learn in time if one has none.
            parts, waiting = waiting, self._next(batches, self.progress.step + 1)
            stopping = self._update(parts)
            if not stopping and self.timeline.saves_after(self.progress.step):
                self._save()
        if stopping:
            raise self._ended()
        return self._final_counts(counts)

    def _next(self, batches: Iterator[Batch], step: int) -> list[Batch]:
        """The parts of update `step`; none after the last, and none, and a problem to tell, where the data cannot be read."""
        try:
            return taken(batches, self.settings.accumulation) if step < self.total else []
        except DataError as error:
            self.problem = error
            return []

    def _update(self, parts: list[Batch]) -> bool:
        """One update and what belongs to it; returns whether the run is to end here."""
        wants_to_end = self.stop.number > 0 or self.problem is not None
        try:
            update = self.engine.update(parts, self.progress.step, stop=wants_to_end)
        except NonFiniteError as error:
            raise self._diverged(parts, error) from error
        self.progress.step += 1
        self.progress.loss += update.loss
        self.progress.updates += 1
        self.progress.bad += [line for part in parts for line in part.bad]
        self._tick(running=True)
        self.watch("update", {"step": self.progress.step, "loss": update.loss, "lr": update.lr, "total": self.total})
        if self.timeline.logs_after(self.progress.step):
            self._log_update(update)
        too_many = self.timeline.ends_epoch(self.progress.step) and self._log_bad_samples()
        return update.stop or too_many

    def _log_update(self, update: Update) -> None:
        record = {"kind": "train", "loss": self.progress.loss / self.progress.updates}
        self.progress.loss, self.progress.updates = 0.0, 0
        self._log(record | {"grad_norm": update.grad_norm, "lr": update.lr})

    def _log_bad_samples(self) -> bool:
        """At the end of an epoch, lists the samples that could not be used; returns whether there were too many."""
        most = self.job.most_bad()
        if most is None:
            return False
        bad, self.progress.bad = sorted(self._gathered(self.progress.bad)), []
        if bad:
            self._log({"kind": f"bad {self.words.noun}", self.words.noun: bad})
            self.watch("bad samples", {"samples": bad})
        if len(bad) > most:
            hint = f" ({self.words.allow_option})" if self.words.allow_option else ""
            self.problem = DataError(
                f"{len(bad)} {self.words.noun} of this epoch could not be used, more than the {most} allowed{hint}; first: "
                f"{bad[0]}. `polaformer check` lists them all"
            )
        return len(bad) > most

    def _evaluation_is_due(self) -> bool:
        return self.progress.evaluated < self.progress.step and self.timeline.evaluates_after(self.progress.step)

    def _evaluate(self) -> tuple[Any, bool]:
        """The counts of an evaluation, and whether to stop: then they are thrown away, and counted again after resuming."""
        self._tick(running=True)
        self.watch("evaluation", {"step": self.progress.step})
        counts = self._count(self.job.splits[0])
        if counts is None:
            return None, True
        self._tick(running=False)
        record = counts.record()
        self._log({"kind": "eval", **record, "unreadable": len(counts.bad)})
        self.progress.evaluated = self.progress.step
        self._keep_best(float(record[self.words.metric.name]))
        self._write_csv()
        return counts, False

    def _count(self, split: str) -> Any:
        """The counts of a split; None where the run is to end instead."""
        with closing(self.job.evaluation_batches(split, self.rank, self.world)) as batches:
            counts = self.engine.count(self._until_end(batches))
        return None if self._anyone(self.stop.number > 0 or self.problem is not None) else counts

    def _keep_best(self, value: float) -> None:
        if self.settings.ship == "best" and self.words.metric.is_better(value, self.progress.best):
            self.progress.best, self.progress.best_step = value, self.progress.step
            self.engine.keep_best()

    def _final_counts(self, last: Any) -> dict[str, Any]:
        """The counts of the weights that are shipped on every split; `last` are those of the last evaluation.

        They are lines of the journal too, but for those that the last evaluation has written already.
        """
        first, *others = self.job.splits
        found = {first: last}
        if self.engine.best is not None and self.progress.best_step != self.progress.step:
            self.engine.take_best()
            others = [first, *others]
        for split in others:
            self.watch("evaluation", {"step": self.progress.step})
            found[split] = self._count(split)
            if found[split] is None:
                raise self._ended()
            record = {"kind": "final", "split": split, **found[split].record(), "unreadable": len(found[split].bad)}
            self._log(record | ({"best_step": self.progress.best_step} if self.engine.best is not None else {}))
        self._write_csv()
        return found

    def _write_csv(self) -> None:
        if self.is_main:
            with writing(self.run.folder):
                write_csv(self.run.folder)

    def _log(self, record: dict[str, Any]) -> None:
        # JSON has no word for what is not finite; with fp16 the gradient of a skipped update may be.
        record = {name: value if not isinstance(value, float) or isfinite(value) else None for name, value in record.items()}
        record |= {"step": self.progress.step, "epoch": self.progress.step / self.job.steps_per_epoch}
        record["wall"] = {"seconds": round(self.seconds, 3)}
        self.watch(record["kind"], record)
        if self.is_main:
            with writing(self.run.folder):
                self.journal.write(record)
                self.board.write(record)

    def _save(self) -> None:
        if self.saved == self.progress.step:
            return
        self._tick(running=True)
        bad = self._gathered(self.progress.bad) if self.job.most_bad() is not None else []
        if self.is_main:
            with writing(self.run.checkpoints):
                self.journal.sync()
                progress = replace(self.progress, journal=self.journal.size, bad=bad)
                files = self.engine.files(progress, self.job.metadata(), seconds=self.seconds)
                checkpoint.write(self.run.checkpoints, self.progress.step, files, keep=self.settings.keep)
        self.saved = self.progress.step
        self.accelerator.wait_for_everyone()
        self._tick(running=False)

    def _resume(self) -> None:
        """Takes the state from the newest valid checkpoint, where there is one."""
        found = checkpoint.newest(self.run.checkpoints)
        names = self._gathered(["none" if found is None else found.path.name])
        if len(set(names)) > 1:
            seen = ", ".join(names)
            raise DataError(
                f"processes see different checkpoints in {self.run.folder} ({seen}); all nodes must share the folder"
            )
        if found is None:
            return
        self.progress, about = self.engine.restore(found.files)
        self.seconds, self.saved = about["seconds"], self.progress.step
        if not self.is_main:
            self.progress.bad = []
            return
        for path, problem in found.damaged.items():
            self.watch("note", {"text": f"{problem} (passed over, and renamed)"})
            checkpoint.set_aside(path)
        self.watch("resumed", {"step": self.progress.step, "path": str(found.path), "total": self.total})
        if about["processes"] != self.world:
            text = f"it had {about['processes']} processes and now has {self.world}: it goes on, but not to the same last bit"
            self.watch("note", {"text": text})

    def _open_journal(self, stack: ExitStack) -> None:
        if not self.is_main:
            return
        with writing(self.run.folder):
            self.journal = stack.enter_context(closing(Journal(self.run.folder, self.progress.journal)))
            self.board = stack.enter_context(closing(Board(self.run.folder, self.progress.step + 1)))

    def _ended(self) -> StoppedError | DataError:
        """Saves, and says why the run ends before its end: a signal, or data that cannot be read, in any of the processes."""
        self._save()
        go_on = f"saved at step {self.progress.step} of {self.total}; go on with `polaformer resume {self.run.folder}`"
        problems = self._gathered([] if self.problem is None else [str(self.problem)])
        if problems:
            kind = type(self.problem) if isinstance(self.problem, SampleError) else DataError
            hint = f", which also takes {self.words.skip_option}" if self.words.skip_option else ""
            return kind(f"{problems[0]} (the run is {go_on}{hint})")
        number = self.stop.number or signal.SIGTERM
        return StoppedError(f"{signal.Signals(number).name}: {go_on}", number)

    def _diverged(self, parts: list[Batch], error: NonFiniteError) -> DivergedError:
        step = self.progress.step
        names = [self.job.name(int(index)) for part in parts for index in part.indices]
        if error.mine:
            about = {"step": step, "rank": self.rank, "seed": self.settings.seed}
            divergence.leave_behind(self.run.folder, parts, names, error, about)
        self._save()
        return DivergedError(
            f"at step {step}, with learning rate {error.lr:g}, {error}; nothing was updated. The batch is kept in "
            f"{self.run.folder / divergence.FOLDER}: `polaformer resume {self.run.folder} --replay` runs it again. "
            f"{divergence.advice(self.settings)}"
        )

    def _anyone(self, here: bool) -> bool:
        """Whether it is so in any of the processes."""
        return float(sum_over(self.accelerator, torch.tensor([float(here)], dtype=torch.float64))) > 0

    def _until_end(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches, until there is a reason to end the run."""
        try:
            for batch in batches:
                if self.stop.number:
                    return
                yield batch
        except DataError as error:
            self.problem = error

    def _gathered(self, lines: list[str]) -> list[str]:
        return list(gather_object(lines)) if self.world > 1 else lines

    def _tick(self, *, running: bool) -> None:
        """Counts the time since the last call as time of training, or not: evaluations and checkpoints do not count."""
        now = time.perf_counter()
        self.seconds += (now - self.clock) if running else 0.0
        self.clock = now
