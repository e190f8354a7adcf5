"""A program of its own: one run of a sweep, begun or resumed, for the process that trains the sweep.

Called as `python -m polaformer.cli.sweep_run` with a request as one line of JSON on stdin, which stays open for as long as the
other process lives: when it ends, so does this one, after saving. Tells what happens in lines of JSON on stdout; all that a
training prints goes to stderr.
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
from polaformer.cli.run_report import report
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
SECONDS_TO_SAVE = 60.0  # when the other process is gone; then this one ends, whatever it does
SECONDS_TO_WAIT = 90.0  # for a process of a sweep that was killed, which is still saving


def request(run: SweepRun) -> str:
    """What the program is asked, as one line."""
    recipe = run.recipe
    return json.dumps({"folder": str(run.folder), "task": recipe.task, "recipe": recipe.name, "options": as_values(recipe)})


def main() -> int:
    """Trains what stdin asks for, and returns the exit code that `polaformer train` would have."""
    asked = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_the_other, daemon=True).start()
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    teller = Teller(events)
    try:
        _train(asked, teller)
        return 0
    except EXPECTED as error:
        print_line(str(error), stderr=True)
        teller.tell("failed", text=str(error))
        return exit_code(error)
    except Exception as error:
        traceback.print_exc()
        teller.tell("failed", text=f"{type(error).__name__}: {error}")
        return INCORRECT


class Teller:
    """Tells the other process what happens; give it to the loop as `watch`, with a view of the same."""

    def __init__(self, events: TextIO) -> None:
        self.events, self.told = events, 0.0

    def tell(self, event: str, **record: Any) -> None:
        """Writes one line; if the other process is gone, there is nobody to tell."""
        try:
            self.events.write(json.dumps({"event": event, **record}) + "\n")
            self.events.flush()
        except OSError:
            pass

    def happened(self, event: str, record: dict[str, Any], metric: Metric) -> None:
        """One thing that happened in the loop; of updates, a few per second are told."""
        if event == "update":
            now = time.monotonic()
            if now - self.told >= SECONDS_BETWEEN_UPDATES or record["step"] == record["total"]:
                self.told = now
                self.tell("update", step=record["step"], total=record["total"])
        elif event == "resumed":
            self.tell("resumed", step=record["step"], total=record["total"])
        elif event == "eval":
            self.tell("eval", value=record[metric.name])


def _train(asked: dict[str, Any], teller: Teller) -> None:
    load("polaformer.tasks.running")
    from polaformer.tasks.running import resume, train

    kind, folder = find_task(asked["task"]).recipe, Path(asked["folder"])
    recipe = with_values(kind(name=asked["recipe"]), asked["options"])
    with TrainingView(recipe.name, recipe) as view:

        def watch(event: str, record: dict[str, Any]) -> None:
            view(event, record)
            teller.happened(event, record, recipe.terms.metric)

        if _is_begun(folder):
            values = as_values(recipe)
            changes = {name: values[name] for name in CHANGEABLE if values[name] is not None}
            finished = resume(folder, watch, changes)
        else:
            (folder / HALF_WRITTEN).unlink(missing_ok=True)
            finished = train(recipe, folder, watch)
    report(finished, command="train", json=False)


def _is_begun(folder: Path) -> bool:
    """Whether there is something to resume; waits for a process of a killed sweep that has not yet ended."""
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


def _end_with_the_other() -> None:
    """Stops the training when stdin ends, which it does when the other process ends in whatever way."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_SAVE)
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
