"""Train the runs of a sweep, several at a time, each in a separate process. Does not load PyTorch itself."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from selectors import EVENT_READ, DefaultSelector
from typing import Any, Protocol

from polaformer.cli.sweep_run import encode_request
from polaformer.errors import DataError, StoppedError
from polaformer.regular_files import open_to_write, writing
from polaformer.tasks.sweep import SweepRun
from polaformer.tasks.sweep_state import RunState, read_state
from polaformer.training.stopping import Stop

SECONDS_BETWEEN_POLLS = 0.1


class SweepObserver(Protocol):
    """Is notified of the progress of a sweep."""

    def started(self, run: SweepRun) -> None:
        """A process was started for the run."""
        ...

    def reported(self, run: SweepRun, event: dict[str, Any]) -> None:
        """The process reports an "update", an "eval", or that it "resumed"."""
        ...

    def finished(self, run: SweepRun, state: RunState) -> None:
        """The run has finished."""
        ...

    def failed(self, run: SweepRun, reason: str) -> None:
        """The run has failed."""
        ...

    def stopping(self, running: int) -> None:
        """This number of processes was asked to save and end."""
        ...

    def refresh(self) -> None:
        """Called several times per second, to update what is shown."""
        ...


def train_runs(runs: Sequence[SweepRun], jobs: int, threads: int, observer: SweepObserver) -> dict[SweepRun, str]:
    """Trains the runs, `jobs` at a time with `threads` threads each, and returns the failed ones with the reasons.

    A failed run does not stop the others. On SIGINT and SIGTERM, all processes save and end, and StoppedError is raised; the
    same call resumes them later.
    """
    failures: dict[SweepRun, str] = {}
    waiting, running = list(runs), list[_Process]()
    try:
        with Stop() as stop:
            while running or (waiting and not stop.number):
                while waiting and len(running) < jobs and not stop.number:
                    running.append(_Process(waiting.pop(0), threads))
                    observer.started(running[-1].run)
                _forward_events(running, observer)
                for process in [one for one in running if one.has_ended]:
                    running.remove(process)
                    _close_ended(process, observer, failures, stopped=stop.number > 0)
                terminated = [process.terminate() for process in running if stop.number]
                if any(terminated):
                    observer.stopping(len(running))
                observer.refresh()
    finally:
        for process in running:  # there are some only after an exception
            process.terminate()
            process.wait()
    if stop.number:
        raise _stopped_error(stop.number)
    return failures


def _forward_events(running: Iterable["_Process"], observer: SweepObserver) -> None:
    """Waits briefly for events of the processes, and passes them on."""
    with DefaultSelector() as selector:
        for process in running:
            if process.is_readable:
                selector.register(process.events, EVENT_READ, process)
        if not selector.get_map():
            time.sleep(SECONDS_BETWEEN_POLLS)
            return
        for key, _ in selector.select(SECONDS_BETWEEN_POLLS):
            for event in key.data.read():
                observer.reported(key.data.run, event)


def _close_ended(process: "_Process", observer: SweepObserver, failures: dict[SweepRun, str], *, stopped: bool) -> None:
    for event in process.read():
        observer.reported(process.run, event)
    try:
        state = read_state(process.run)
        reason = process.reason() if process.code or state.kind != "finished" else None
    except DataError as error:
        reason = str(error)
    if reason is None:
        observer.finished(process.run, state)
    elif not (stopped and process.was_stopped):
        failures[process.run] = reason
        observer.failed(process.run, reason)
    process.close()


def _stopped_error(number: int) -> StoppedError:
    name = signal.Signals(number).name
    return StoppedError(f"{name}: all started runs are saved; resume with the same command", number)


class _Process:
    """A process that trains one run; in a separate session, so that Ctrl-C reaches it only through this process."""

    def __init__(self, run: SweepRun, threads: int) -> None:
        self.run, self.is_terminated, self.is_readable = run, False, True
        self._unread, self._failure = b"", ""
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        with writing(run.log):
            run.log.parent.mkdir(parents=True, exist_ok=True)
            log = open_to_write(run.log)
            os.lseek(log, 0, os.SEEK_END)
        # -P: modules in the current directory do not shadow installed ones.
        command = [sys.executable, "-P", "-m", "polaformer.cli.sweep_run"]
        pipe = subprocess.PIPE
        try:
            self._popen = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=log, env=environment, start_new_session=True
            )
        finally:
            os.close(log)
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self.events = self._popen.stdout
        os.set_blocking(self.events.fileno(), False)
        try:
            self._popen.stdin.write(encode_request(run).encode() + b"\n")
            self._popen.stdin.flush()  # and stays open: closing it would mean that this process has ended
        except BrokenPipeError:
            pass  # the process has already ended; its exit code gives the reason

    @property
    def has_ended(self) -> bool:
        """Whether it has ended; does not wait for its data workers, which may keep its pipe open."""
        return self._popen.poll() is not None

    @property
    def code(self) -> int:
        """The exit code of a process that has ended."""
        return int(self._popen.returncode)

    @property
    def was_stopped(self) -> bool:
        """Whether SIGTERM ended it."""
        return self.code in (128 + signal.SIGTERM, -signal.SIGTERM)

    def read(self) -> list[dict[str, Any]]:
        """The events that it has written since the last call."""
        while True:
            try:
                found = os.read(self.events.fileno(), 2**16)
            except BlockingIOError:
                break
            self.is_readable = bool(found)
            if not found:
                break
            self._unread += found
        *lines, self._unread = self._unread.split(b"\n")
        events = [json.loads(line) for line in lines]
        self._failure = next((event["text"] for event in events if event["event"] == "failed"), self._failure)
        return [event for event in events if event["event"] != "failed"]

    def reason(self) -> str:
        """The reason of its failure."""
        if self._failure:
            return self._failure
        ended = f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with code {self.code}"
        return f"its process {ended} without an error message"

    def terminate(self) -> bool:
        """Asks it to save and end, once, since a second signal would end it at once. Returns whether this call asked."""
        if self.is_terminated or self.has_ended:
            return False
        self.is_terminated = True
        self._popen.terminate()
        return True

    def wait(self) -> None:
        """Waits until it has ended."""
        self._popen.wait()
        self.close()

    def close(self) -> None:
        """Closes the pipes of an ended process."""
        for stream in (self._popen.stdin, self._popen.stdout):
            if stream is not None:
                stream.close()
