"""A separate program that trains or resumes one run of a sweep; the sweep's process is its parent.

Started as `python -m polaformer.cli.sweep_run` with a request as one line of JSON on stdin. The parent keeps stdin open: when
the parent ends, this process saves and ends, too. Writes events as lines of JSON to stdout; all other output of the training
run goes to stderr.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

from polaformer.cli.errors import EXPECTED, INCORRECT, exit_code
from polaformer.cli.output import load, print_line
from polaformer.cli.run_report import report_run
from polaformer.cli.training_view import TrainingView
from polaformer.errors import SettingsError
from polaformer.tasks.options import with_values
from polaformer.tasks.recipe import as_values
from polaformer.tasks.registry import find_task
from polaformer.tasks.sweep import SweepRun
from polaformer.tasks.sweep_state import CHANGEABLE, HALF_WRITTEN
from polaformer.training.metric import Metric
from polaformer.training.run import CONFIG, Run

SECONDS_BETWEEN_UPDATES = 0.2
SECONDS_TO_SAVE = 60.0  # after the parent has ended; then this process exits unconditionally
SECONDS_TO_WAIT = 90.0  # for a process of a killed sweep that is still saving


def encode_request(run: SweepRun) -> str:
    """The request to train the run, as one line of JSON."""
    recipe = run.recipe
    return json.dumps({"folder": str(run.folder), "task": recipe.task, "recipe": recipe.name, "options": as_values(recipe)})


def main() -> int:
    """Trains the run requested on stdin, and returns the exit code that `polaformer train` would."""
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    events = EventWriter(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    try:
        _train(request, events)
        return 0
    except EXPECTED as error:
        print_line(str(error), stderr=True)
        events.write("failed", text=str(error))
        return exit_code(error)
    except Exception as error:
        traceback.print_exc()
        events.write("failed", text=f"{type(error).__name__}: {error}")
        return INCORRECT


class EventWriter:
    """Sends events of the training loop to the parent process."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.last_update = stream, 0.0

    def write(self, event: str, **record: Any) -> None:
        """Writes one line; ignores that the parent has ended."""
        try:
            self.stream.write(json.dumps({"event": event, **record}) + "\n")
            self.stream.flush()
        except OSError:
            pass

    def forward(self, event: str, record: dict[str, Any], metric: Metric) -> None:
        """Sends one event of the loop; updates only a few times per second."""
        if event == "update":
            now = time.monotonic()
            if now - self.last_update >= SECONDS_BETWEEN_UPDATES or record["step"] == record["total"]:
                self.last_update = now
                self.write("update", step=record["step"], total=record["total"])
        elif event == "resumed":
            self.write("resumed", step=record["step"], total=record["total"])
        elif event == "eval":
            self.write("eval", value=record[metric.name])


def _train(request: dict[str, Any], events: EventWriter) -> None:
    load("polaformer.tasks.running")
    from polaformer.tasks.running import resume, train

    kind, folder = find_task(request["task"]).recipe, Path(request["folder"])
    recipe = with_values(kind(name=request["recipe"]), request["options"])
    with TrainingView(recipe.name, recipe) as view:

        def watch(event: str, record: dict[str, Any]) -> None:
            view(event, record)
            events.forward(event, record, recipe.terms.metric)

        if _can_resume(folder):
            values = as_values(recipe)
            changes = {name: values[name] for name in CHANGEABLE if values[name] is not None}
            finished = resume(folder, watch, changes)
        else:
            (folder / HALF_WRITTEN).unlink(missing_ok=True)
            finished = train(recipe, folder, watch)
    report_run(finished, command="train", json=False)


def _can_resume(folder: Path) -> bool:
    """Whether there is a run to resume; waits for a process of a killed sweep that has not yet ended."""
    deadline = time.monotonic() + SECONDS_TO_WAIT
    while (folder / CONFIG).exists():
        try:
            with Run(folder).lock():
                return True
        except SettingsError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    return False


def _stop_with_parent() -> None:
    """Stops training when stdin is closed, which happens when the parent process ends, for whatever reason."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_SAVE)
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
