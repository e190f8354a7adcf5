"""`polaformer bench attention`: all attention mechanisms side by side, as ratios first."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from polaformer.cli import bench_options as options
from polaformer.cli.bench_tables import IN_BRACKETS, MEBI, PASSES, exit_code, number, ratio_text, skipped_text
from polaformer.cli.errors import UsageError
from polaformer.cli.output import (
    busy_lines,
    counted,
    load,
    machine_lines,
    new_table,
    print_all,
    print_json,
    steps,
    threads_text,
)
from polaformer.errors import nearest
from polaformer.regular_files import writing

if TYPE_CHECKING:
    from polaformer.bench.attention import Point, Row, Setup

YARDSTICK = "softmax"
KINDS = ("forward", "both", "saved")  # of memory, as polaformer.bench.attention calls them
EXPLAINED = (
    "Memory: peaks of live bytes of PyTorch's allocator beyond inputs and parameters; saved: what autograd keeps for backward,",
    "inputs among it, parameters not. What a native kernel allocates itself, as pola's on a CPU does, is in none of them;",
    "`polaformer bench memory` measures that too.",
)
IN_FIGURE = "Memory: tensors of the forward pass; what pola's native kernel allocates itself is not in it."


@dataclass(frozen=True)
class BenchAttention:
    """Compare all attention mechanisms: time and memory against the number of tokens.

    All of them in turns at each length, in one run, in float32. A number is shown only for what agrees, output and gradients,
    with the mechanism's own maps in float64; if one does not, the exit code is 1. What would take too long or too much memory,
    by how it grew so far, is skipped, and says so. A length whose rounds disagree too much gets no number, and the exit code is
    75.

    Example: polaformer bench attention --figure attention.png

    Example: polaformer bench attention --only pola linear nystrom --lengths 1024 4096 16384 65536 --mode both
    """

    lengths: tuple[int, ...] = (256, 1024, 4096, 16384)
    """Numbers of tokens to measure at."""
    batch: int = 1
    """Batch size."""
    heads: int = 4
    """Number of heads."""
    width: int = 32
    """Head width."""
    mode: Literal["forward", "both"] = "forward"
    """What is timed: the forward pass alone, or forward and backward together; memory is measured of both."""
    only: tuple[str, ...] = ()
    """Mechanisms to compare, all unless given; softmax, which they are compared with, is always among them."""
    without: tuple[str, ...] = ()
    """Mechanisms to leave out; for instance --without kernelized synthesizer."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to compute."""
    rounds: int = 40
    """How often each is timed, at most."""
    seconds: float = 60.0
    """Time for each length: the slow get fewer rounds, and what takes longer than this for a single call is skipped."""
    threads: int | None = None
    """How many threads torch may use; its own choice unless given."""
    figure: Path | None = None
    """PNG file to draw time and memory against the number of tokens in."""
    json: bool = False
    """Print the result as JSON on stdout and nothing else there."""

    def run(self) -> int:
        """Checks the options, measures, prints."""
        self.check_options()
        names = self.checked_names()
        from polaformer.bench.attention import compare
        from polaformer.bench.machine import described

        calls = len(names) * (1 + (self.rounds + 2) * len(set(self.lengths)))
        with described(self.threads) as machine, counted(calls, 1) as begin:
            rows = compare(self.lengths, names, self._setup(), on_call=begin("lengths"))
        if self.figure is not None:
            self._draw(rows, machine)
        if self.json:
            print_json(self._record(rows, machine))
        else:
            self._show(rows, machine)
        reasons = {
            f"N = {n}": [row.points[n].skipped.get(self.mode) for row in rows.values()] for n in sorted(set(self.lengths))
        }
        return exit_code(reasons, correct=all(row.correct for row in rows.values()))

    def check_options(self) -> None:
        """Raises UsageError for any option that makes no sense, names of mechanisms apart."""
        if not self.lengths:
            raise UsageError("--lengths is empty; give at least two, for instance --lengths 1024 4096")
        options.shapes_of(options.SHAPES, self.lengths, self.batch, self.heads, self.width)
        options.check_repeats(self.rounds, self.seconds)
        options.check_threads(self.threads)
        options.check_figure(self.figure, possible=True, needs="")

    def checked_names(self) -> list[str]:
        """Loads PyTorch and gives the mechanisms that were asked for; raises UsageError for one that there is not."""
        with steps({"loading PyTorch": 3.0}) as begin:
            begin("loading PyTorch")
            load("polaformer.bench.attention")
        from polaformer.attention import names

        options.check_device(self.device)
        return chosen(names(), self.only, self.without)

    def _setup(self) -> "Setup":
        from polaformer.bench.attention import Setup

        is_both = self.mode == "both"
        return Setup(self.batch, self.heads, self.width, is_both, self.rounds, self.seconds, self.device)

    def _setting(self, machine: dict[str, Any]) -> str:
        sizes = f"batch {self.batch}, {self.heads} heads of width {self.width}"
        return f"{PASSES[self.mode]}, {sizes}, float32, {threads_text(machine)}"

    def _show(self, rows: "dict[str, Row]", machine: dict[str, Any]) -> None:
        setting = self._setting(machine)
        tables = [_ratios(rows, setting, self.mode), _times(rows, setting, self.mode), _memory(rows)]
        saved = [] if self.figure is None else [f"saved {self.figure.as_posix()}"]
        print_all(*tables, *EXPLAINED, *machine_lines(machine), *saved)

    def _record(self, rows: "dict[str, Row]", machine: dict[str, Any]) -> dict[str, Any]:
        sizes = {"batch": self.batch, "num_heads": self.heads, "width": self.width, "lengths": sorted(set(self.lengths))}
        settings = {"mode": self.mode, "device": self.device, **sizes, "machine": machine, "notes": [" ".join(EXPLAINED)]}
        return {"command": "bench attention", **settings, "rows": {name: row.as_record() for name, row in rows.items()}}

    def _draw(self, rows: "dict[str, Row]", machine: dict[str, Any]) -> None:
        from polaformer.analysis.attention_figures import save_mechanisms

        assert self.figure is not None
        with writing(f"--figure {self.figure}"):
            title = "\n".join([f"Time: {self._setting(machine)}.", IN_FIGURE, *busy_lines(machine)])
            times = {name: row.medians for name, row in rows.items()}
            save_mechanisms(self.figure, times, {name: row.peaks("forward") for name, row in rows.items()}, title=title)


def chosen(names: Sequence[str], only: Sequence[str], without: Sequence[str]) -> list[str]:
    """The names that are asked for, softmax among them; raises UsageError for those that there are not."""
    for option, given in (("--only", only), ("--without", without)):
        for name in given:
            if name not in names:
                raise UsageError(f"{option} has {name!r}; {nearest(name, names)}choose among: {', '.join(names)}")
    if YARDSTICK in without:
        raise UsageError(f"--without has {YARDSTICK!r}, which the others are compared with; leave it in")
    both = [name for name in only if name in without]
    if both:
        raise UsageError(f"--only and --without both have {both[0]!r}; take it out of one of them")
    return [name for name in names if (not only or name in (*only, YARDSTICK)) and name not in without]


def _ratios(rows: "dict[str, Row]", setting: str, mode: str) -> Table:
    lengths = list(next(iter(rows.values())).points)
    caption = (
        f"how many times faster than softmax at the same length; more than 1: faster; {IN_BRACKETS}. rank: first to last place "
        f"that it may have at N = {lengths[-1]}, at 95 % for each pair; none for fewer than 6 rounds. result: exact where it "
        "is the mechanism's own formula, else what it stands for. draws: random if each call draws numbers anew"
    )
    columns = ("rank", *(f"N = {n}" for n in lengths), "cost", "result", "draws")
    table = new_table(f"Speed relative to softmax, {setting}", "", *columns, caption=caption)
    for name, row in rows.items():
        rank = "–".join(str(place) for place in sorted(set(row.points[lengths[-1]].rank or ())))
        cells = [rank, *(_cell(row, n, mode, ratio_text(row.points[n].speedup)) for n in lengths)]
        result = "exact" if row.facts.approximates is None else f"for {row.facts.approximates}"
        table.add_row(name, *cells, row.facts.cost, result, "random" if row.facts.stochastic else "")
    return table


def _times(rows: "dict[str, Row]", setting: str, mode: str) -> Table:
    lengths = list(next(iter(rows.values())).points)
    columns = (*(f"N = {n}" for n in lengths), "slope", "error vs float64")
    caption = "of the same rounds as the ratios; in brackets how many. slope: a of time ∝ N^a, fitted to medians"
    table = new_table(f"Milliseconds, median, {setting}", "", *columns, caption=caption)
    for name, row in rows.items():
        cells = [_cell(row, n, mode, _time(row.points[n])) for n in lengths]
        table.add_row(name, *cells, number(row.slope), f"{row.error:.1e}")
    return table


def _memory(rows: "dict[str, Row]") -> Table:
    lengths = list(next(iter(rows.values())).points)
    columns = (*(f"N = {n}" for n in lengths), "slopes")
    title = "Memory, MiB: forward / forward and backward / saved for backward"
    table = new_table(title, "", *columns, caption="slopes: a of memory ∝ N^a for each of the three")
    for name, row in rows.items():
        cells = [_memory_cell(row.points[n]) if row.correct else "incorrect" for n in lengths]
        table.add_row(name, *cells, " / ".join(number(row.memory_slope(kind)) or "–" for kind in KINDS) if row.correct else "")
    return table


def _cell(row: "Row", length: int, mode: str, text: str) -> str:
    """The text, or why there is none."""
    point = row.points[length]
    if not row.correct:
        return "incorrect"
    if mode in point.skipped:
        return skipped_text(point.skipped[mode])
    if point.timing is not None and not point.timing.samples:
        return f"skipped: one call took {point.timing.first:.1f} s"
    return text


def _memory_cell(point: "Point") -> str:
    """Three numbers; or what there is of them, and why there is no more."""
    there = [_mebi(point.peaks[kind]) for kind in KINDS if kind in point.peaks]
    missing = [skipped_text(point.skipped[kind]) for kind in ("forward", "both") if kind not in point.peaks]
    return " / ".join([*there, *missing[:1]])


def _mebi(size: int) -> str:
    return f"{size / MEBI:.3g}" if size < 1000 * MEBI else f"{size / MEBI:.0f}"


def _time(point: "Point") -> str:
    timing = point.timing
    return "–" if timing is None or timing.median is None else f"{1e3 * timing.median:.4g} ({len(timing.samples)})"
