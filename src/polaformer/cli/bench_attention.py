"""`polaformer bench attention`: all attention mechanisms side by side, as ratios first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.table import Table

from polaformer.cli.bench_options import Lengths, Report, Timed, records
from polaformer.cli.bench_tables import IN_BRACKETS, Columns, cell, mebibytes, number, ratio_text, skipped_text, table
from polaformer.cli.errors import UsageError
from polaformer.cli.options import NONE
from polaformer.cli.output import figure_title, machine_lines
from polaformer.errors import nearest

if TYPE_CHECKING:
    from polaformer.bench.runner import LengthCurve, Measurement

EXPLAINED = (
    "Memory: peaks of live bytes of PyTorch's allocator beyond inputs and parameters; saved: what autograd saves for backward,",
    "including inputs but not parameters. They do not include what a native kernel allocates itself, as pola's does on a CPU;",
    "`polaformer bench memory` measures that too.",
)
IN_FIGURE = "Memory: tensors of the forward pass, without what pola's native kernel allocates itself."
SPEED = (
    "how many times faster than softmax at the same length; more than 1: faster; {}. rank: best to worst place "
    "that it may have at N = {}, at 95 % for each pair; none for fewer than 6 rounds. result: exact if it "
    "is the mechanism's own formula, otherwise what it approximates. draws: random if each call draws new random numbers"
)
TIME = "of the same rounds as the ratios; in brackets how many. slope: a of time ∝ N^a, fitted to medians"


@dataclass(frozen=True)
class BenchAttention(Timed, Lengths):
    """Compare all attention mechanisms: time and memory against the number of tokens.

    All mechanisms are timed in interleaved rounds at each length, in float32. Only one whose output and gradients agree
    with those from its explicit attention maps in float64 gets numbers; if any does not, the exit code is 1. One that would
    take too long or need too much memory, judging by its growth so far, is skipped, with the reason. If the rounds at a length
    vary too much, it gets no numbers, and the exit code is 75.

    Example: polaformer bench attention --figure attention.png

    Example: polaformer bench attention --only pola linear nystrom --lengths 1024 4096 16384 65536 --mode both
    """

    lengths: tuple[int, ...] = (256, 1024, 4096, 16384)
    """Two or more numbers of tokens to measure at."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: all)")] = ()
    """Mechanisms to compare; softmax, which they are compared with, is always included."""
    without: Annotated[tuple[str, ...], NONE] = ()
    """Mechanisms to leave out; for instance --without kernelized synthesizer."""
    mode: Literal["forward", "both"] = "forward"
    """What is timed: the forward pass alone, or forward and backward together; memory is always measured in both modes."""
    rounds: int = 40
    seconds: float = 60.0
    figure: Path | None = None
    """Plot time and memory against the number of tokens into this PNG file."""
    command = "bench attention"

    def measure(self) -> Report:
        """Checks the options and measures."""
        if not self.lengths:
            raise UsageError("--lengths is empty; give at least two, for instance --lengths 1024 4096")
        lengths = [shape[2] for shape in self.checked_shapes()]
        self.check_common()
        self.load("polaformer.bench.attention")
        from polaformer.analysis.attention_figures import save_mechanisms
        from polaformer.attention import names
        from polaformer.bench.attention import as_record, benchmark

        compared = chosen(names(), self.only, self.without)
        calls = len(compared) * (1 + (self.rounds + 2) * len(lengths))
        found, record = self.time({"lengths": partial(benchmark, lengths, compared)}, calls, **self.sizes)
        rows, machine = found["lengths"], record["machine"]
        record |= {"lengths": lengths, "notes": [" ".join(EXPLAINED)], "rows": records(rows, as_record)}
        setting = self.in_words(self.setting, machine)
        draw = partial(save_mechanisms, mechanisms=rows, title=figure_title(f"Time: {setting}.\n{IN_FIGURE}", machine))
        points = {f"N = {n}": {name: row.points[n] for name, row in rows.items()} for n in lengths}
        return Report(record, [*_tables(rows, lengths, setting), *EXPLAINED, *machine_lines(machine)], points, draw)


def chosen(names: Sequence[str], only: Sequence[str], without: Sequence[str]) -> list[str]:
    """The names to compare, including softmax; raises UsageError for unknown ones."""
    from polaformer.bench.attention import BASELINE

    for option, given in (("--only", only), ("--without", without)):
        for name in given:
            if name not in names:
                raise UsageError(f"{option} has {name!r}; {nearest(name, names)}choose among: {', '.join(names)}")
    if BASELINE in without:
        raise UsageError(f"--without has {BASELINE!r}, which the others are compared with; leave it in")
    both = [name for name in only if name in without]
    if both:
        raise UsageError(f"--only and --without both have {both[0]!r}; take it out of one of them")
    return [name for name in names if (not only or name in (*only, BASELINE)) and name not in without]


def _tables(rows: "dict[str, LengthCurve]", lengths: Sequence[int], setting: str) -> list[Table | str]:
    """Ratios, times and memory."""
    from polaformer.bench.attention import KINDS

    def columns(text: "Callable[[Measurement], str]") -> Columns:
        return {f"N = {n}": partial(lambda n, row: text(row.points[n]), n) for n in lengths}

    def memory(point: "Measurement") -> str:
        """Three numbers; or those that were measured, and why the others were not."""
        there = [point.sizes[kind] or 0 for kind in KINDS if kind in point.sizes]
        texts = [mebibytes(size, ".3g" if size < 1000 * 2**20 else ".0f") for size in there]
        why = [skipped_text(reason) for kind, reason in point.reasons.items() if kind not in point.sizes][:1]
        return " / ".join([*texts, *why]) if point.correct else "incorrect"

    def time(point: "Measurement") -> str:
        median = point.median
        return cell(point, f"{1e3 * median:.4g} ({len(point.timing.samples)})" if median and point.timing else "–")

    ratios: Columns = {
        "rank": lambda row: "–".join(str(place) for place in sorted(set(row.points[lengths[-1]].rank or ()))),
        **columns(lambda point: cell(point, ratio_text(point.speedup))),
        "cost": lambda row: row.facts.cost,
        "result": lambda row: "exact" if row.facts.approximates is None else f"for {row.facts.approximates}",
        "draws": lambda row: "random" if row.facts.stochastic else "",
    }
    times = {**columns(time), "slope": lambda row: number(row.slope()), "error vs float64": lambda row: f"{row.error:.1e}"}
    slopes = {"slopes": lambda row: " / ".join(number(row.slope(kind)) or "–" for kind in KINDS) if row.correct else ""}
    kinds = "Memory, MiB: forward / forward and backward / saved for backward"
    return [
        table(f"Speed relative to softmax, {setting}", ratios, rows, caption=SPEED.format(IN_BRACKETS, lengths[-1])),
        table(f"Milliseconds, median, {setting}", times, rows, caption=TIME),
        table(kinds, {**columns(memory), **slopes}, rows, caption="slopes: a of memory ∝ N^a for each of the three"),
    ]
