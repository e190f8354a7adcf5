"""What `polaformer data listops` and `polaformer data pathfinder` share: options, progress, and the table of statistics."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from polaformer.cli.data import convert, statistics_table
from polaformer.cli.errors import UsageError
from polaformer.cli.output import prepare_folder, print_all, print_json, progress_bar

MAX_WORKERS = 256
OF_CONVERSIONS = ("out", "source", "overwrite", "json")  # options that also apply to SOURCE; the others are the generator's


@dataclass(frozen=True)
class Generation:
    """The options of every command that generates data; a subclass names the dataset."""

    dataset: ClassVar[str]

    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Output directory; after an interruption, the same command resumes there."""
    source: tyro.conf.Positional[Annotated[Path | None, tyro.conf.arg(metavar="[SOURCE]", help_behavior_hint="")]] = None
    """Released data to convert to the prepared form, instead of generating new data."""
    seed: int = 0
    """Random seed of the data; the same seed gives the same files, whatever the number of workers."""
    workers: int = 2
    """Number of processes."""
    overwrite: bool = False
    """Replace data in DIR that were generated with other options."""
    json: bool = False
    """Print the result as JSON on stdout, and nothing else."""

    def run(self) -> int:
        """Generate, or convert what is given, and print statistics of each split."""
        if self.source is not None:
            self._check_conversion(self.source)
            return convert(self.dataset, self.source, self.out, overwrite=self.overwrite, as_json=self.json)
        return self.generate()

    def generate(self) -> int:
        """Generates what is missing, and prints statistics of each split."""
        raise NotImplementedError

    def _check_conversion(self, source: Path) -> None:
        """Raises UsageError for options that have no effect on released data."""
        changed = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        found = [f"--{name.replace('_', '-')}" for name in changed if name not in OF_CONVERSIONS]
        if found:
            raise UsageError(f"{source} is converted, so that nothing is generated; leave out {', '.join(found)}, or {source}")

    def prepare(self, numbers: Mapping[str, int], least: int) -> None:
        """Checks the options, of which `numbers` must not be below `least`, and creates the directory."""
        for name, number in numbers.items():
            if number < least:
                raise UsageError(f"--{name} is {number}; give an integer ≥ {least}")
        if self.seed < 0:
            raise UsageError(f"--seed is {self.seed}; give an integer ≥ 0")
        if not 1 <= self.workers <= MAX_WORKERS:
            raise UsageError(f"--workers is {self.workers}; give an integer from 1 to {MAX_WORKERS}")
        prepare_folder(self.out, "--out")

    def report(self, manifest: Mapping[str, Any]) -> int:
        """Prints the statistics of each split, and returns the exit code."""
        if self.json:
            print_json({"command": f"data {manifest['dataset']}", "out": str(self.out), **manifest})
        else:
            print_all(statistics_table(self.out, manifest))
        return 0


@contextmanager
def stages(noun: str) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """A progress bar per stage with rate and time left. noun: what the first stage counts.

    Yields a function to call with the name of each stage as it begins; it returns one to call with what is done and the total.
    """
    with progress_bar() as bar:

        def begin(name: str) -> Callable[[int, int], None]:
            task, started, first = bar.add_task(name, total=None), time.monotonic(), None

            def advance(done: int, total: int) -> None:
                nonlocal first
                first = done if first is None else first  # of a resumed generator
                rate = (done - first) / max(time.monotonic() - started, 1e-3)
                text = f"{name}, {rate:,.0f} {noun}/s" if name == "generating" else name
                bar.update(task, completed=done, total=total, description=text)

            return advance

        yield begin
