"""Trains the runs of a sweep, several at a time, each in a process of its own. Needs no PyTorch itself."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from selectors import EVENT_READ, DefaultSelector
from typing import Any, Protocol

from polaformer.cli.sweep_run import request
from polaformer.errors import DataError, StoppedError
from polaformer.regular_files import open_to_write, writing
from polaformer.tasks.sweep import SweepRun
from polaformer.tasks.sweep_state import RunState, read_state
from polaformer.training.stopping import Stop

SECONDS_BETWEEN_LOOKS = 0.1


class SweepWatch(Protocol):
    """What is told of a sweep while it is trained."""

    def started(self, run: SweepRun) -> None:
        """A process was started for the run."""
        ...

    def happened(self, run: SweepRun, event: dict[str, Any]) -> None:
        """The process tells of an "update", an "eval", or that it "resumed"."""
        ...

    def finished(self, run: SweepRun, state: RunState) -> None:
        """The run is trained to its end."""
        ...

    def failed(self, run: SweepRun, reason: str) -> None:
        """The run cannot be trained to its end."""
        ...

    def stopping(self, running: int) -> None:
        """So many processes were asked to save and to end."""
        ...

    def refresh(self) -> None:
        """Some time has passed."""
        ...


def train_runs(runs: Sequence[SweepRun], jobs: int, threads: int, watch: SweepWatch) -> dict[SweepRun, str]:
    """Trains the runs to their end, `jobs` at a time with so many threads each, and returns why some failed.

    One that fails does not keep the others from being trained. SIGINT and SIGTERM end all processes after they have saved, and
    raise StoppedError; the same call goes on later.
    """
    failures: dict[SweepRun, str] = {}
    waiting, running = list(runs), list[_Process]()
    try:
        with Stop() as stop:
            while running or (waiting and not stop.number):
                while waiting and len(running) < jobs and not stop.number:
                    running.append(_Process(waiting.pop(0), threads))
                    watch.started(running[-1].run)
                _look(running, watch)
                for process in [one for one in running if one.has_ended]:
                    running.remove(process)
                    _ended(process, watch, failures, stopped=stop.number > 0)
                told = [process.terminate() for process in running if stop.number]
                if any(told):
                    watch.stopping(len(running))
                watch.refresh()
    finally:
        for process in running:  # only where something went wrong here
            process.terminate()
            process.wait()
    if stop.number:
        raise _stopped(stop.number)
    return failures


def _look(running: Iterable["_Process"], watch: SweepWatch) -> None:
    """Waits a moment for what the processes tell, and passes it on."""
    with DefaultSelector() as selector:
        for process in running:
            if process.tells:
                selector.register(process.events, EVENT_READ, process)
        if not selector.get_map():
            time.sleep(SECONDS_BETWEEN_LOOKS)
            return
        for key, _ in selector.select(SECONDS_BETWEEN_LOOKS):
            for event in key.data.read():
                watch.happened(key.data.run, event)


def _ended(process: "_Process", watch: SweepWatch, failures: dict[SweepRun, str], *, stopped: bool) -> None:
    for event in process.read():
        watch.happened(process.run, event)
    try:
        state = read_state(process.run)
        reason = process.reason() if process.code or state.kind != "finished" else None
    except DataError as error:
        reason = str(error)
    if reason is None:
        watch.finished(process.run, state)
    elif not (stopped and process.was_stopped):
        failures[process.run] = reason
        watch.failed(process.run, reason)
    process.close()


def _stopped(number: int) -> StoppedError:
    name = signal.Signals(number).name
    return StoppedError(f"{name}: all runs that were begun are saved; go on with the same command", number)


class _Process:
    """A process that trains one run; in a session of its own, so that Ctrl-C reaches it through this process alone."""

    def __init__(self, run: SweepRun, threads: int) -> None:
        self.run, self.is_terminated, self.tells = run, False, True
        self._rest, self._failure = b"", ""
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        with writing(run.log):
            run.log.parent.mkdir(parents=True, exist_ok=True)
            log = open_to_write(run.log)
            os.lseek(log, 0, os.SEEK_END)
        # -P: modules in the current folder do not stand in for those that are installed.
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
            self._popen.stdin.write(request(run).encode() + b"\n")
            self._popen.stdin.flush()  # and left open: its end would tell that this process is gone
        except BrokenPipeError:
            pass  # it has ended already, and its exit code tells why

    @property
    def has_ended(self) -> bool:
        """Whether it has ended; its workers, which may hold its pipe open, are not waited for."""
        return self._popen.poll() is not None

    @property
    def code(self) -> int:
        """The exit code of a process that has ended."""
        return int(self._popen.returncode)

    @property
    def was_stopped(self) -> bool:
        """Whether it ended because it was asked to."""
        return self.code in (128 + signal.SIGTERM, -signal.SIGTERM)

    def read(self) -> list[dict[str, Any]]:
        """The events that it has told of since the last time."""
        while True:
            try:
                found = os.read(self.events.fileno(), 2**16)
            except BlockingIOError:
                break
            self.tells = bool(found)
            if not found:
                break
            self._rest += found
        *lines, self._rest = self._rest.split(b"\n")
        events = [json.loads(line) for line in lines]
        self._failure = next((event["text"] for event in events if event["event"] == "failed"), self._failure)
        return [event for event in events if event["event"] != "failed"]

    def reason(self) -> str:
        """Why it has failed."""
        if self._failure:
            return self._failure
        ended = f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with code {self.code}"
        return f"its process {ended} and said no more"

    def terminate(self) -> bool:
        """Asks it to save and to end, once: a second time would end it at once. Returns whether it was asked now."""
        if self.is_terminated or self.has_ended:
            return False
        self.is_terminated = True
        self._popen.terminate()
        return True

    def wait(self) -> None:
        """Waits for its end."""
        self._popen.wait()
        self.close()

    def close(self) -> None:
        """Closes the pipes of a process that has ended."""
        for stream in (self._popen.stdin, self._popen.stdout):
            if stream is not None:
                stream.close()
