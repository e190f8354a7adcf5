"""Output shared by all commands: tables and results on stdout, progress on stderr, files."""

import importlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, Task, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from polaformer.errors import printable
from polaformer.regular_files import writing

BUSY = 0.1  # fraction of the processor that other programs may use before timings get a warning


class Terminal(Console):
    """Prints all output except JSON: strings verbatim, but with the control characters of class and file names escaped."""

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escapes every string that enters the layout."""
        return super().render_str(escaped(text), **options)


class ProgressText(TextColumn):
    """A text column of a progress bar, escaped."""

    def render(self, task: Task) -> Text:
        """The escaped text for the task."""
        return Text(escaped(self.text_format.format(task=task)))


class LiveProgress(Progress):
    """Bars on stderr, each with a description, `numbers` and elapsed time; without a terminal, only the lines of `say`."""

    def __init__(self, *, is_silent: bool = False) -> None:
        terminal = Terminal(stderr=True)
        self.is_shown = terminal.is_terminal and not is_silent
        columns = (ProgressText("{task.description}"), BarColumn(bar_width=24), ProgressText("{task.fields[numbers]}"))
        super().__init__(*columns, TimeElapsedColumn(), console=terminal, disable=not self.is_shown)

    def say(self, text: str) -> None:
        """Prints a line above the bars."""
        if self.is_shown:
            self.console.print(printable(text))
        else:
            print_line(printable(text), stderr=True)
            sys.stderr.flush()


def escaped(text: str) -> str:
    """The text with everything unprintable escaped, except line breaks."""
    return "\n".join(printable(line) for line in text.split("\n"))


def load(*modules: str) -> None:
    """Imports the modules with Ctrl-C blocked: a library that is interrupted while loading may abort or fail unpredictably."""
    held = hasattr(signal, "pthread_sigmask")
    if held:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        if held:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def progress_bar() -> Progress:
    """A bar on stderr with the name of the step, the percentage done, the elapsed time and the time left."""
    columns = (ProgressText("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("left"))
    is_silent = os.environ.get("RANK", "0") != "0"  # only one of several processes prints
    return Progress(*columns, TimeRemainingColumn(), console=Terminal(stderr=True), disable=is_silent)


@contextmanager
def steps(plan: Mapping[str, float]) -> Iterator[Callable[[str], None]]:
    """A progress bar over the steps of `plan` (name → expected seconds); yields a function to call as each step begins."""
    with progress_bar() as bar:
        task = bar.add_task("", total=sum(plan.values()))
        running: list[str] = []

        def begin(name: str) -> None:
            bar.update(task, description=name, advance=sum(plan[done] for done in running))
            running[:] = [name]

        yield begin
        bar.update(task, description="done", completed=sum(plan.values()))


@contextmanager
def counted(calls: int, parts: int) -> Iterator[Callable[[str], Callable[[str], None]]]:
    """A progress bar over `parts` parts of about `calls` calls each.

    Yields a function to call with the name of each part as it begins; it returns one to call with the name of each call.
    """
    with progress_bar() as bar:
        task, begun = bar.add_task("", total=calls * parts), 0

        def begin(part: str) -> Callable[[str], None]:
            nonlocal begun
            bar.update(task, description=part, completed=calls * begun)
            begun += 1
            return lambda name: bar.update(task, description=f"{part}: {name}", advance=1)

        yield begin
        bar.update(task, description="done", completed=calls * parts)


class NamesTable(Table):
    """A table that escapes line breaks in cells, so that each cell is one line."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Adds a row of escaped cells."""
        super().add_row(*(printable(cell) if isinstance(cell, str) else cell for cell in cells), **options)


def new_table(title: str, *columns: str, caption: str | None = None) -> Table:
    """An empty table with a blank line above it; the first column is for names, the others for numbers."""
    title = printable(title)
    wide_enough = min(len(title), 78)  # for the title, which otherwise wraps at the width of the table
    above = f"\n{title}"
    table = NamesTable(title=above, caption=caption, title_justify="left", caption_justify="left", min_width=wide_enough)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def print_all(*parts: Table | str) -> None:
    """Prints tables and lines on stdout."""
    with writing("standard output"):
        for part in parts:
            print_line(part) if isinstance(part, str) else _print_table(part)
        sys.stdout.flush()


def _print_table(table: Table) -> None:
    """Prints at the width of the terminal, or at full width into a pipe or a file."""
    console = Terminal()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        wide = Terminal(width=1000)
        console = Terminal(width=max(console.width, Measurement.get(wide, wide.options, table).maximum))
    console.print(table)


def print_line(text: str, *, stderr: bool = False) -> None:
    """Prints one line, unwrapped."""
    Terminal(stderr=stderr).print(text, soft_wrap=True)


def print_json(result: dict[str, Any]) -> None:
    """Prints the result as JSON on stdout."""
    with writing("standard output"):
        sys.stdout.write(to_json(result))
        sys.stdout.flush()


def to_json(result: dict[str, Any]) -> str:
    """Strict JSON: non-finite numbers become null, and unprintable characters are escaped."""
    text = json.dumps(_without_nan(result), indent=2, ensure_ascii=False, allow_nan=False)
    return re.sub(r"[^\n -~]", lambda one: one[0] if one[0].isprintable() else json.dumps(one[0])[1:-1], text) + "\n"


def prepare_folder(path: Path, option: str) -> None:
    """Creates the directory and tries to write in it, so that a command fails before its work rather than after."""
    with writing(f"{option} {path}"):
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass


def threads_text(machine: dict[str, Any]) -> str:
    """The number of threads that torch used, as text."""
    return "one thread" if machine["torch_threads"] == 1 else f"{machine['torch_threads']} threads"


def machine_lines(machine: dict[str, Any]) -> list[str]:
    """The machine that timings are for, and a warning if other programs kept it busy."""
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    processor = f"{machine['cpu']}, {machine['cores']} cores{gpu}, {threads_text(machine)}"
    versions = f"torch {machine['torch']}, Python {machine['python']}, {machine['os']}"
    return [f"\nTimings are for this machine: {processor}, {versions}", *_busy_lines(machine)]


def figure_title(text: str, machine: dict[str, Any]) -> str:
    """The title of a figure with timings, and below it a warning if other programs kept the machine busy."""
    return "\n".join([text, *_busy_lines(machine)])


def _busy_lines(machine: dict[str, Any]) -> list[str]:
    """A warning if other programs kept the machine busy during the measurement."""
    others = machine["used_by_others"]
    if others is None or others <= BUSY:
        return []
    return [f"Other programs used {100 * others:.0f} % of the processor meanwhile: repeat on an idle machine."]


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value
