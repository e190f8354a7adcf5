"""What the commands `polaformer data …` share: converting a dataset from the form it is released in to the prepared one."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro
from rich.table import Table

from polaformer.cli.errors import UsageError
from polaformer.cli.output import load, new_table, prepare_folder, print_all, print_json, print_line, progress_bar
from polaformer.errors import printable
from polaformer.regular_files import writing

INTERVAL = 0.1  # seconds between two updates of the progress bar


@dataclass(frozen=True)
class Conversion:
    """The options of a command that only converts; a subclass names the dataset."""

    dataset: ClassVar[str]

    source: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="SOURCE")]]
    """The file or folder to read."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Output directory; left as it is if it is complete and from the same source."""
    overwrite: bool = False
    """Replace a prepared directory that exists."""
    json: bool = False
    """Print the result as JSON on stdout, and nothing else."""

    def run(self) -> int:
        """Convert, and print statistics of each split."""
        return convert(self.dataset, self.source, self.out, overwrite=self.overwrite, as_json=self.json)


def convert(dataset: str, source: Path, out: Path, *, overwrite: bool = False, as_json: bool = False) -> int:
    """Converts a dataset to the prepared form, prints statistics of each split, and returns the exit code."""
    _check(source, out)
    load("polaformer.data.sources.lra.opening", f"polaformer.data.sources.lra.{dataset}")
    from polaformer.data.sources.lra.opening import find_dataset, open_sequences
    from polaformer.data.sources.lra.prepared import existing, holds, write

    module = find_dataset(dataset)
    if holds(source):
        raise UsageError(f"{source} is already prepared; give it to --data directly")
    if not module.holds(source):
        open_sequences(source, dataset)  # raises, and says what is wrong
    about = describe_source(source)
    manifest = existing(out, dataset, about, overwrite=overwrite)
    if manifest is None:
        with _created(out), reading(source) as advance:
            splits = module.load(source, advance)
            with writing(out):
                manifest = write(splits, out, dataset, about, statistics=module.statistics, overwrite=overwrite)
    elif not as_json:
        print_line(f"{printable(out)} is already complete; --overwrite writes it again", stderr=True)
    report(out, manifest, as_json=as_json, source=source)
    return 0


def describe_source(source: Path) -> dict[str, Any]:
    """Identifies a source and its version: path, number of files, bytes, newest file."""
    files = [source] if not source.is_dir() else [Path(folder, name) for folder, _, names in os.walk(source) for name in names]
    statuses = []
    for file in files:
        with suppress(OSError):  # a dangling link; reading reports it if it matters
            statuses.append(file.stat())
    newest = datetime.fromtimestamp(max((status.st_mtime for status in statuses), default=0), UTC)
    size = sum(status.st_size for status in statuses)
    return {"source": str(source.absolute()), "files": len(statuses), "bytes": size, "modified": newest.isoformat()}


@contextmanager
def reading(source: Path) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with rate and time left; yields a function to call with the bytes read, and with all of them."""
    with progress_bar() as bar:
        task, started, shown = bar.add_task(f"reading {source.name}", total=None), time.monotonic(), 0.0

        def advance(done: int, total: int) -> None:
            nonlocal shown
            now = time.monotonic()
            if now - shown < INTERVAL and done < total:
                return
            shown = now
            rate = done / 1e6 / max(now - started, 1e-3)
            bar.update(task, completed=done, total=total, description=f"reading {source.name}, {rate:.1f} MB/s")

        yield advance


def report(out: Path, manifest: Mapping[str, Any], *, as_json: bool, **more: Any) -> None:
    """Prints what a prepared directory holds: a table with one column per split, or JSON."""
    splits = manifest["splits"]
    if as_json:
        given = {name: str(value) for name, value in more.items()}
        print_json({"command": f"data {manifest['dataset']}", **given, "out": str(out), "splits": splits})
        return
    print_all(
        statistics_table(out, manifest), *(f"{out / about['file']}: {about['bytes'] / 1e6:.1f} MB" for about in splits.values())
    )


def statistics_table(out: Path, manifest: Mapping[str, Any]) -> Table:
    """The statistics of a dataset, one column per split."""
    columns = {name: dict(_flat(about["statistics"])) for name, about in manifest["splits"].items()}
    table = new_table(f"{manifest['dataset']} in {out}", "", *columns)
    for row in dict.fromkeys(row for facts in columns.values() for row in facts):
        table.add_row(row, *(str(facts.get(row, "")) for facts in columns.values()))
    return table


def _flat(statistics: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values without nesting: "length, mean" and its value."""
    for name, value in statistics.items():
        words = before + name.replace("_", " ")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{words}, ")
        else:
            yield words, value


def _check(source: Path, out: Path) -> None:
    if not source.exists():
        raise UsageError(f"there is no file or folder {source}; check the path")
    where, target = source.resolve(), out.resolve()
    if target == where or where in target.parents:
        raise UsageError(f"--out {out} is inside the source {source}; give a directory outside it")


@contextmanager
def _created(out: Path) -> Iterator[None]:
    """A directory that can be written to; removed again if it was created here and nothing was written to it."""
    is_new = not out.exists()
    prepare_folder(out, "--out")
    try:
        yield
    except BaseException:
        if is_new:
            with suppress(OSError):
                out.rmdir()
        raise
