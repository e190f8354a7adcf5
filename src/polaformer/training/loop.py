"""The training loop: updates, journal, evaluations and checkpoints, for every task and any number of processes."""

import signal
import time
from collections.abc import Callable, Iterator
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
from polaformer.training.engine import Engine, NonFiniteError, Progress, Update, take_batches
from polaformer.training.job import Job
from polaformer.training.journal import Journal, TensorBoardLog, write_csv
from polaformer.training.metric import TaskTerms
from polaformer.training.processes import sum_over_processes
from polaformer.training.run import Run
from polaformer.training.settings import Settings
from polaformer.training.stopping import Stop
from polaformer.training.timeline import Timeline

Watch = Callable[[str, dict[str, Any]], None]  # called with the name of an event and its record
# Journal keys that the loop writes itself; the record of an evaluation must not use them.
RESERVED = {"kind", "step", "epoch", "wall", "unreadable", "split", "best_step"}


class Training:
    """One training run of one job. Calls `watch` at every event, in every process."""

    def __init__(
        self, job: Job, settings: Settings, run: Run, accelerator: Accelerator, watch: Watch, terms: TaskTerms
    ) -> None:
        self.job, self.settings, self.run, self.accelerator = job, settings, run, accelerator
        self.watch, self.terms = watch, terms
        self.rank, self.world, self.is_main = accelerator.process_index, accelerator.num_processes, accelerator.is_main_process
        self.timeline = Timeline(settings, job.steps_per_epoch)
        self.total = self.timeline.total
        self.engine = Engine(job.model, job.objective, settings, job.steps_per_epoch, accelerator)
        self.progress, self.seconds, self.saved = Progress(), 0.0, -1
        self.stop = Stop()
        self.problem: DataError | None = None  # why this process cannot read its data

    def train(self) -> dict[str, Any]:
        """Starts or resumes the run, trains to the end, and returns the counts of every split for the weights that are shipped.

        Raises StoppedError after a signal, DivergedError if a loss or gradient is not finite, DataError if data cannot be used
        and CannotWriteError if the disk is full. The state is saved whenever that is possible.
        """
        with ExitStack() as stack:
            stack.enter_context(self.stop)
            if self.is_main:
                stack.enter_context(self.run.lock())
            self._resume()
            self._open_journal(stack)
            batches = self.job.training_batches(self.progress.step, self.rank, self.world)
            return self._loop(stack.enter_context(closing(batches)))

    def _loop(self, batches: Iterator[Batch]) -> dict[str, Any]:
        counts = None
        self.clock = time.perf_counter()
        next_parts = self._fetch(batches, self.progress.step)
        if self._in_any_process(self.problem is not None):
            raise self._end_early()
        while True:
            if self._evaluation_is_due():
                counts = self._evaluate()
                if counts is None:
                    raise self._end_early()
            if self.progress.step == self.total:
                return self._final_counts(counts)
            # Fetch one update ahead: if one process has no data, all of them learn of it in the update before.
            parts, next_parts = next_parts, self._fetch(batches, self.progress.step + 1)
            if self._update(parts):
                raise self._end_early()
            if self.timeline.saves_after(self.progress.step):
                self._save()

    def _fetch(self, batches: Iterator[Batch], step: int) -> list[Batch]:
        """The parts of update `step`. Empty after the last update, and if the data cannot be read: `problem` then says why."""
        try:
            return take_batches(batches, self.settings.accumulation) if step < self.total else []
        except DataError as error:
            self.problem = error
            return []

    def _update(self, parts: list[Batch]) -> bool:
        """Makes one update, records it, and returns whether the run must end here."""
        try:
            update = self.engine.update(parts, self.progress.step, stop=self._must_end())
        except NonFiniteError as error:
            raise self._end_diverged(parts, error) from error
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
        """Lists the samples of an epoch that could not be used, and returns whether there were too many."""
        allowed = self.job.max_bad_samples()
        if allowed is None:
            return False
        noun, bad, self.progress.bad = self.terms.sample_noun, sorted(self._gather(self.progress.bad)), []
        if bad:
            self._log({"kind": f"bad {noun}", noun: bad})
            self.watch("bad samples", {"samples": bad})
        if len(bad) > allowed:
            hint = f" ({self.terms.allow_option})" if self.terms.allow_option else ""
            self.problem = DataError(
                f"{len(bad)} {noun} of this epoch could not be used, more than the {allowed} allowed{hint}; first: {bad[0]}. "
                "`polaformer check` lists them all"
            )
        return len(bad) > allowed

    def _evaluation_is_due(self) -> bool:
        return self.progress.evaluated < self.progress.step and self.timeline.evaluates_after(self.progress.step)

    def _evaluate(self) -> Any:
        """The counts of the validation split; None if the run must end: the evaluation is then repeated after resuming."""
        self._tick(running=True)
        self.watch("evaluation", {"step": self.progress.step})
        counts = self._count(self.job.splits[0])
        if counts is None:
            return None
        self._tick(running=False)
        record = counts.record()
        self._log({"kind": "eval", **record, "unreadable": len(counts.bad)})
        self.progress.evaluated = self.progress.step
        self._keep_best(float(record[self.terms.metric.name]))
        self._write_csv()
        return counts

    def _count(self, split: str) -> Any:
        """The counts of a split; None if the run must end instead."""
        with closing(self.job.evaluation_batches(split, self.rank, self.world)) as batches:
            counts = self.engine.count(self._until_stopped(batches))
        return None if self._in_any_process(self._must_end()) else counts

    def _keep_best(self, value: float) -> None:
        if self.settings.ship == "best" and self.terms.metric.is_better(value, self.progress.best):
            self.progress.best, self.progress.best_step = value, self.progress.step
            if self.progress.step >= self.settings.best_from * self.total:
                self.engine.keep_best()

    def _final_counts(self, last: Any) -> dict[str, Any]:
        """The counts of every split for the weights that are shipped; `last` are those of the last evaluation.

        Each becomes a line of the journal, except the last evaluation, which already has one.
        """
        first, *others = self.job.splits
        found = {first: last}
        if self.engine.best is not None and self.progress.best_step != self.progress.step:
            self.engine.load_best()
            others = [first, *others]
        for split in others:
            self.watch("evaluation", {"step": self.progress.step})
            found[split] = self._count(split)
            if found[split] is None:
                raise self._end_early()
            record = {"kind": "final", "split": split, **found[split].record(), "unreadable": len(found[split].bad)}
            self._log(record | ({"best_step": self.progress.best_step} if self.engine.best is not None else {}))
        self._write_csv()
        return found

    def _write_csv(self) -> None:
        if self.is_main:
            with writing(self.run.folder):
                write_csv(self.run.folder)

    def _log(self, record: dict[str, Any]) -> None:
        # JSON has no NaN or infinity, which the gradient norm of an update that fp16 skips may be.
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
        bad = self._gather(self.progress.bad) if self.job.max_bad_samples() is not None else []
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
        """Restores the state from the newest valid checkpoint, if there is one."""
        found = checkpoint.newest(self.run.checkpoints)
        names = self._gather(["none" if found is None else found.path.name])
        if len(set(names)) > 1:
            seen = f"{self.run.folder} ({', '.join(names)})"
            raise DataError(f"processes see different checkpoints in {seen}; all nodes must share the directory")
        if found is None:
            return
        self.progress, about = self.engine.restore(found.files)
        self.seconds, self.saved = about["seconds"], self.progress.step
        if not self.is_main:
            self.progress.bad = []
            return
        for path, problem in found.damaged.items():
            self.watch("note", {"text": f"{problem} (skipped and renamed)"})
            checkpoint.set_aside(path)
        self.watch("resumed", {"step": self.progress.step, "path": str(found.path), "total": self.total})
        if about["processes"] != self.world:
            text = f"the run had {about['processes']} processes and now has {self.world}: it resumes, but not bit-for-bit"
            self.watch("note", {"text": text})

    def _open_journal(self, stack: ExitStack) -> None:
        if not self.is_main:
            return
        with writing(self.run.folder):
            self.journal = stack.enter_context(closing(Journal(self.run.folder, self.progress.journal)))
            self.board = stack.enter_context(closing(TensorBoardLog(self.run.folder, self.progress.step + 1)))

    def _end_early(self) -> StoppedError | DataError:
        """Save, and return the error that says why the run ends: a signal or unusable data, in any of the processes."""
        self._save()
        saved = f"saved at step {self.progress.step} of {self.total}; resume with `polaformer resume {self.run.folder}`"
        problems = self._gather([] if self.problem is None else [str(self.problem)])
        if problems:
            kind = type(self.problem) if isinstance(self.problem, SampleError) else DataError
            hint = f", which also accepts {self.terms.skip_option}" if self.terms.skip_option else ""
            return kind(f"{problems[0]} (the run is {saved}{hint})")
        number = self.stop.number or signal.SIGTERM
        return StoppedError(f"{signal.Signals(number).name}: {saved}", number)

    def _end_diverged(self, parts: list[Batch], error: NonFiniteError) -> DivergedError:
        """Saves the state and the batch, and returns the error that says where they are."""
        step = self.progress.step
        names = [self.job.name(int(index)) for part in parts for index in part.indices]
        if error.is_local:
            about = {"step": step, "rank": self.rank, "seed": self.settings.seed}
            divergence.save_diverged_batch(self.run.folder, parts, names, error, about)
        self._save()
        return DivergedError(
            f"at step {step}, with learning rate {error.lr:g}, {error}; nothing was updated. The batch is kept in "
            f"{self.run.folder / divergence.FOLDER}: `polaformer resume {self.run.folder} --replay` runs it again. "
            f"{divergence.advice(self.settings)}"
        )

    def _must_end(self) -> bool:
        """Whether this process was asked to stop, or cannot read its data."""
        return self.stop.number > 0 or self.problem is not None

    def _in_any_process(self, here: bool) -> bool:
        """Whether `here` is true in any of the processes."""
        return float(sum_over_processes(self.accelerator, torch.tensor([float(here)], dtype=torch.float64))) > 0

    def _until_stopped(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches, until a signal arrives or the data cannot be read."""
        try:
            for batch in batches:
                if self.stop.number:
                    return
                yield batch
        except DataError as error:
            self.problem = error

    def _gather(self, lines: list[str]) -> list[str]:
        return list(gather_object(lines)) if self.world > 1 else lines

    def _tick(self, *, running: bool) -> None:
        """Restarts the clock; if `running`, adds its time to the training time, which excludes evaluations and checkpoints."""
        now = time.perf_counter()
        self.seconds += (now - self.clock) if running else 0.0
        self.clock = now
