"""What the benchmark commands share: options, the checks of them, timing, and how a report is drawn, printed and judged."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from rich.table import Table

from polaformer.cli.bench_tables import PASSES
from polaformer.cli.errors import INCORRECT, NOISY, UsageError
from polaformer.cli.options import NONE
from polaformer.cli.output import counted, load, prepare_folder, print_all, print_json, print_line, steps, threads_text
from polaformer.errors import nearest
from polaformer.extras import require
from polaformer.regular_files import writing

if TYPE_CHECKING:
    from polaformer.analysis.agreement import Shape
    from polaformer.bench.contenders import Contender
    from polaformer.bench.runner import BenchSettings, Measurement


Found = TypeVar("Found")
SHAPES = ("4,4,3136,32", "8,3,196,64", "1,8,16384,32", "1,4,65536,64")
MAX_HEAD_WIDTH = 1024
TENSORS = 16  # of a shape's size that are alive at the same time, about


class Report(NamedTuple):
    """What a benchmark found: the JSON record, what is printed instead, what decides the exit code, and the figure."""

    record: dict[str, Any]
    shown: Iterable[Table | str]
    rows: "Mapping[str, Mapping[str, Measurement]]"  # by table and name
    draw: Callable[[Path], None] = lambda _: None


@dataclass(frozen=True)
class Lengths:
    """The options of benchmarks against the number of tokens."""

    lengths: Annotated[tuple[int, ...], NONE] = ()
    """Two or more numbers of tokens to measure at, instead of --shapes."""
    batch: int = 1
    """Batch size at all --lengths."""
    heads: int = 4
    """Number of heads at all --lengths."""
    width: int = 32
    """Head width at all --lengths."""
    without: Annotated[tuple[str, ...], NONE] = ()
    """Rows to leave out, by a part of their name; for instance --without compile softmax."""

    @property
    def sizes(self) -> dict[str, Any]:
        """What all lengths share."""
        return {"batch": self.batch, "num_heads": self.heads, "width": self.width}

    @property
    def setting(self) -> str:
        """The same in words."""
        return f"batch {self.batch}, {self.heads} heads of width {self.width}"

    def checked_shapes(self, shapes: Sequence[str] = SHAPES) -> "list[Shape]":
        """The shapes as numbers, those of --lengths if given; raises UsageError for those that make no sense."""
        where, lengths = "--shapes has", sorted(set(self.lengths))
        if lengths:
            if tuple(shapes) != SHAPES:
                raise UsageError(
                    "--shapes and --lengths were both given; give shapes, or lengths with --batch, --heads, --width"
                )
            if len(lengths) < 2:
                needs = "a slope needs at least two different lengths, as in --lengths 64 128"
                raise UsageError(f"--lengths is {lengths[0]}; {needs}")
            where = "--lengths with --batch, --heads and --width makes"
            shapes = [shape_text((self.batch, self.heads, n, self.width)) for n in lengths]
        if not shapes:
            raise UsageError("--shapes is empty; give at least one, for instance --shapes 4,4,3136,32")
        return list(dict.fromkeys(_checked_shape(text, f"{where} '{text}'") for text in shapes))


@dataclass(frozen=True)
class Bench:
    """The options that all benchmarks share."""

    command: ClassVar[str]
    device: Literal["cpu", "cuda"] = "cpu"
    """The device to compute on."""
    seconds: float = 20.0
    """Seconds per shape, length, or model and size: slow calls get fewer rounds, and one that takes longer is skipped."""
    threads: int | None = None
    """Number of threads torch may use; by default torch's own choice."""
    figure: Path | None = None
    json: bool = False
    """Print the result as JSON on stdout, and nothing else."""

    def run(self) -> int:
        """Measure, draw and print; 0, or 1 if something is incorrect, or 75 if a table is too noisy, with why on stderr."""
        report = self.measure()
        from polaformer.analysis.timing import MAX_SPREAD
        from polaformer.bench.runner import TOO_NOISY

        if self.figure is not None:
            with writing(f"--figure {self.figure}"):
                report.draw(self.figure)
        if self.json:
            print_json(report.record)
        else:
            print_all(*report.shown, *([f"saved {self.figure.as_posix()}"] if self.figure else []))
        rows = [(where, row) for where, rows in report.rows.items() for row in rows.values()]
        noisy = dict.fromkeys(f"{where} is {row.skipped}" for where, row in rows if (row.skipped or "").startswith(TOO_NOISY))
        if noisy:
            print_line(
                f"polaformer bench: {'; '.join(noisy)}. × is high over low of the interval of a median over rounds, "
                f"and should be at most {MAX_SPREAD}; close other programs, or give more --rounds and --seconds",
                stderr=True,
            )
        return (NOISY if noisy else 0) if all(row.correct for _, row in rows) else INCORRECT

    def measure(self) -> Report:
        """Checks the options and measures; raises UsageError before any work starts."""
        raise NotImplementedError

    def check_common(self, figure_needs: str = "") -> None:
        """Raises UsageError for shared options that make no sense; figure_needs: what is missing for a figure."""
        cores = os.cpu_count() or 1
        if not (self.seconds > 0 and isfinite(self.seconds)):
            raise UsageError(f"--seconds is {self.seconds}; give a positive number")
        if self.threads is not None and not 1 <= self.threads <= cores:
            raise UsageError(f"--threads is {self.threads}; give 1 to {cores}, or leave it out for torch's own choice")
        if self.figure is None:
            return
        if figure_needs:
            raise UsageError(f"--figure {self.figure} {figure_needs}")
        if self.figure.suffix != ".png":
            raise UsageError(f"--figure is {self.figure}; give the name of a PNG file, as in --figure {self.figure.stem}.png")
        require("train", "matplotlib")
        prepare_folder(self.figure.parent, "--figure")

    def load(self, module: str) -> None:
        """Loads a module, and PyTorch with it; raises UsageError for CUDA if there is no such device."""
        with steps({"loading PyTorch": 3.0}) as begin:
            begin("loading PyTorch")
            load(module)
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError(
                "--device is cuda, but PyTorch finds no CUDA device here; use --device cpu or see `polaformer env`"
            )


@dataclass(frozen=True)
class OfOperator(Bench, Lengths):
    """The options of benchmarks of the operator."""

    shapes: tuple[str, ...] = SHAPES
    """Batch, heads, tokens and head width, separated by commas; several shapes are separated by spaces."""

    def prepared(
        self, measured: str, *, backward: bool = True, for_memory: bool = False
    ) -> "tuple[list[Shape], dict[str, Contender], list[str]]":
        """The shapes, the working contenders without those to leave out, and a line per backend that fails.

        for_memory: include those that are compared for memory only. Raises UsageError for options that make no sense.
        """
        shapes = self.checked_shapes(self.shapes)
        needs = f"draws {measured} against the number of tokens; give --lengths too, for instance --lengths 1024 4096 16384"
        self.check_common("" if self.lengths else needs)
        self.load("polaformer.bench.op")
        from polaformer.bench.contenders import BASELINE, CONTENDERS, FOR_MEMORY, working

        more = FOR_MEMORY if for_memory else {}
        names = [*CONTENDERS, *more]
        for part in self.without:
            if not any(part in name for name in names):
                hint = nearest(part, " ".join(names).replace("(", " ").replace(")", " ").split())
                among = f"{hint}there are: {'; '.join(names)}"
                raise UsageError(f"--without has {part!r}, which is not part of any name; {among}")
            if part in BASELINE:
                raise UsageError(f"--without has {part!r}, but {BASELINE} is what the others are compared with; leave it in")
        with steps({"checking backends": 3.0}) as begin:
            begin("checking backends")  # one may be built now
            there, notes = working(self.device, backward=backward)
        chosen = {name: one for name, one in (there | more).items() if not any(part in name for part in self.without)}
        return shapes, chosen, notes


@dataclass(frozen=True)
class Timed(Bench):
    """The options of benchmarks that time."""

    mode: str = ""
    rounds: int = 30
    """Maximum number of timing rounds."""

    def check_common(self, figure_needs: str = "") -> None:
        """Also raises UsageError for a bad number of rounds."""
        if self.rounds < 1:
            raise UsageError(f"--rounds is {self.rounds}; give at least 1")
        super().check_common(figure_needs)

    def time(
        self, jobs: "Mapping[str, Callable[[BenchSettings], Found]]", calls: int, **sizes: Any
    ) -> tuple[dict[str, Found], dict[str, Any]]:
        """What `run_jobs` finds, and the beginning of the record; sizes: of the settings."""
        from polaformer.analysis.machine import described
        from polaformer.bench.runner import BenchSettings

        settings = BenchSettings(self.mode in ("both", "train"), self.rounds, self.seconds, self.device, self.threads, **sizes)
        with described(self.threads) as machine:
            found = run_jobs(jobs, settings, calls)
        return found, {"command": self.command, "mode": self.mode, "device": self.device, **sizes, "machine": machine}

    def in_words(self, sizes: str, machine: dict[str, Any]) -> str:
        """What was timed, in words."""
        return f"{PASSES[self.mode]}, {sizes}, float32, {threads_text(machine)}"


def run_jobs(jobs: "Mapping[str, Callable[[BenchSettings], Found]]", settings: "BenchSettings", calls: int) -> dict[str, Found]:
    """What each job finds, by name; calls: about how many each of them makes, for the progress bar."""
    with counted(calls, len(jobs)) as begin:
        return {name: job(replace(settings, on_call=begin(name))) for name, job in jobs.items()}


def records(rows: Mapping[str, Found], as_record: Callable[[Found], dict[str, Any]]) -> dict[str, Any]:
    """The rows for JSON, by name."""
    return {name: as_record(row) for name, row in rows.items()}


def shape_text(shape: "Shape") -> str:
    """The shape as it is given on the command line."""
    return ",".join(str(size) for size in shape)


def _checked_shape(text: str, where: str) -> "Shape":
    try:
        batch, heads, tokens, width = shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        wanted = "four integers separated by commas: batch,heads,tokens,head width, as in 4,4,3136,32"
        raise UsageError(f"{where}; give {wanted}") from None
    if min(batch, heads, tokens) < 1 or not 2 <= width <= MAX_HEAD_WIDTH:
        raise UsageError(f"{where}; batch, heads and tokens must be at least 1, the head width between 2 and {MAX_HEAD_WIDTH}")
    needed = TENSORS * 4 * prod(shape)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else needed
    if needed > memory:
        sizes = f"needs about {needed / 1e9:.0f} GB, but this machine has {memory / 1e9:.0f} GB"
        raise UsageError(f"{where}, which {sizes}; give a smaller one")
    return batch, heads, tokens, width
