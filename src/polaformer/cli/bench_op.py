"""`polaformer bench op`: the speed of the operator on this machine, as ratios first."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.table import Table

from polaformer.cli.bench_options import OfOperator, Report, Timed, records, shape_text
from polaformer.cli.bench_tables import IN_BRACKETS, PASSES, TIMES, Columns, cell, mebibytes, number, ratio_text, table
from polaformer.cli.options import NONE
from polaformer.cli.output import figure_title, machine_lines, threads_text

if TYPE_CHECKING:
    from polaformer.bench.op import OpMeasurement, OpResult
    from polaformer.bench.runner import LengthCurve

MEDIAN = "median (ms)"
COLUMNS: Columns = {
    **TIMES,
    MEDIAN: lambda row: TIMES[MEDIAN](row) or ("skipped" if row.correct else "incorrect"),
    "error vs float64": lambda row: f"{row.error:.1e}",
    "GFLOP/s": lambda row: number(row.gflops, ".1f"),
    "of sgemm": lambda row: number(row.share_of_sgemm, ".0%").replace("%", " %"),
}
SAVED: Columns = {"saved (MiB)": lambda row: mebibytes(row.saved_bytes), "of published": lambda row: number(row.saved_ratio)}


@dataclass(frozen=True)
class BenchOp(Timed, OfOperator):
    """Time the operator on each backend against the published form, linear attention and softmax.

    All implementations are timed in interleaved rounds, in float32. Only one whose output and gradients agree with a slow
    float64 form gets numbers; if any does not, the exit code is 1. One that would take too long or need too much memory is
    skipped, with the reason. If the rounds at a shape or length vary too much, it gets no numbers, and the exit code is 75.
    --lengths leaves out the compiled and the unshifted form.

    Example: polaformer bench op --shapes 4,4,3136,32 8,3,196,64 --mode both

    Example: polaformer bench op --lengths 4096 8192 16384 32768 --figure time.png
    """

    lengths: Annotated[tuple[int, ...], NONE] = ()
    """Two or more numbers of tokens to time at instead of --shapes, interleaved; shows how time grows per doubling."""
    mode: Literal["forward", "both"] = "forward"
    """The forward pass alone, or forward and backward together."""
    figure: Path | None = None
    """Plot time against the number of tokens into this PNG file; needs --lengths."""

    def measure(self) -> Report:
        """Checks the options and times at all shapes, or at all lengths together."""
        shapes, contenders, notes = self.prepared("time", backward=self.mode == "both")
        from polaformer.analysis.bench_figures import save_times
        from polaformer.bench.op import benchmark, curves

        jobs = {shape_text(shape): partial(benchmark, [shape], contenders) for shape in shapes}
        if self.lengths:  # one row per mechanism, and no compiler at every length
            contenders = {name: one for name, one in contenders.items() if one.is_safe and not one.is_compiled}
            jobs = {"lengths": partial(benchmark, shapes, contenders)}
        results, machine = self.time(jobs, (len(contenders) + 1) * (self.rounds + 2) * len(shapes) // len(jobs))
        found = [result for one in results.values() for result in one.values()]
        notes = list(dict.fromkeys([*notes, *(note for one in found for note in one.notes)]))
        record: dict[str, Any] = {"command": "bench op", "mode": self.mode, "device": self.device}
        record |= {"machine": machine, "notes": notes}
        if not self.lengths:
            record["shapes"] = [{"shape": shape} | one.as_record() for shape, one in zip(shapes, found, strict=True)]
            by_shape = dict(zip(jobs, found, strict=True))
            shown = [*shape_tables(by_shape, self.mode), *machine_lines(machine), *notes]
            return Report(record, shown, lambda _: None, {shape: one.rows for shape, one in by_shape.items()})
        by_length = results["lengths"]
        by_name, setting = curves(by_length), f"{PASSES[self.mode]}, {self.setting}, {threads_text(machine)}"
        record |= self.sizes | {"lengths": list(by_length), "rows": records(by_name)}
        shown = [*_length_tables(by_name, list(by_length), setting), *machine_lines(machine), *notes]
        draw = partial(save_times, curves=by_name, title=figure_title(setting.capitalize(), machine))
        return Report(record, shown, draw, {f"N = {n}": one.rows for n, one in by_length.items()})


def shape_tables(found: "dict[str, OpResult]", mode: str) -> list[Table | str]:
    """Ratios, then what safety costs, then absolute numbers."""
    names = dict.fromkeys(name for result in found.values() for name in result.rows)
    with_saved = any(row.saved_bytes for result in found.values() for row in result.rows.values())
    columns: Columns = {shape: itemgetter(shape) for shape in found}

    def rows(text: "Callable[[OpResult, OpMeasurement], str]", label: str = "") -> dict[str, dict[str, str]]:
        return {
            label + name: {n: text(one, one.rows[name]) if name in one.rows else "not compiled" for n, one in found.items()}
            for name in names
        }

    title = f"Speed relative to the published form, {PASSES[mode]}"
    caption = f"more than 1: faster; {IN_BRACKETS}; shapes are batch,heads,tokens,head width"
    speedups = rows(lambda _, row: cell(row, ratio_text(row.speedup)))
    parts: list[Table | str] = [table(title, columns, speedups, first="shape", caption=caption)]
    if any(result.fastest for result in found.values()):
        title = f"Our fastest against each of the others, {PASSES[mode]}"
        caption = f"how many times longer the other takes; {IN_BRACKETS}"
        caption += "; bytes: what ours saves for backward relative to the other" if with_saved else ""
        fastest = {"our fastest": {shape: result.fastest or "" for shape, result in found.items()}}
        over = rows(lambda _, row: cell(row, ratio_text(row.fastest_over)))
        saved = rows(_saved, "bytes: ") if with_saved else {}
        parts.append(table(title, columns, fastest, over, saved, first="shape", caption=caption))
    safe = {shape: result.safe_over_unsafe for shape, result in found.items()}
    costs = [f"{ratio_text(ratio)} at {shape}" for shape, ratio in safe.items() if ratio is not None]
    if costs:
        parts.append(f"\nSafe against unsafe (time of the cpu kernel with its shifts over without them): {', '.join(costs)}")
    for shape, result in found.items():
        rate, more = result.sgemm_gflops, SAVED if any(row.saved_bytes is not None for row in result.rows.values()) else {}
        sgemm = "" if rate is None else f"; sgemm of 2048×2048 in the same rounds: {rate:.0f} GFLOP/s at best"
        caption = f"GFLOP/s: dense matmuls alone, at best{sgemm}"
        parts.append(table(f"Shape {shape}, {PASSES[mode]}", {**COLUMNS, **more}, result.rows, caption=caption))
    return parts


def _saved(result: "OpResult", row: "OpMeasurement") -> str:
    """What our fastest saves for backward relative to the other."""
    ours = result.rows[result.fastest].saved_bytes if result.fastest else None
    return number(ours / row.saved_bytes if ours and row.saved_bytes else None, ".3f")


def _length_tables(curves: "dict[str, LengthCurve]", lengths: list[int], setting: str) -> list[Table | str]:
    """Growth, then times."""

    def doubling(place: int, curve: "LengthCurve") -> str:
        return ratio_text(curve.doublings[place], "") if curve.correct else "incorrect"

    def time(length: int, curve: "LengthCurve") -> str:
        point = curve.points[length]
        median, best = point.median, point.timing and point.timing.best
        return cell(point, f"{1e3 * median:.4g} ({1e3 * best:.4g})" if median and best else "skipped")

    steps = {f"{few} →\n{many}": partial(doubling, place) for place, (few, many) in enumerate(pairwise(lengths))}
    growth: Columns = steps | {"slope": lambda curve: number(curve.slope())}
    times: Columns = {str(n): partial(time, n) for n in lengths} | {"error vs float64": lambda curve: f"{curve.error:.1e}"}
    caption = f"how many times longer per doubling of the tokens, {IN_BRACKETS}; slope: a of time ∝ N^a, fitted to medians"
    grown = table(f"Growth of time with the number of tokens, {setting}", growth, curves, caption=caption)
    return [grown, table(f"Milliseconds, median (best), {setting}", times, curves)]
