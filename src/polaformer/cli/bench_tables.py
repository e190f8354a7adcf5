"""The findings of `polaformer bench op` as tables."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.table import Table

from polaformer.cli.bench_options import Shape, shape_text
from polaformer.cli.errors import INCORRECT, NOISY
from polaformer.cli.output import machine_lines, new_table, print_all, print_line

if TYPE_CHECKING:
    from polaformer.bench.length import Curve
    from polaformer.bench.measure import Ratio, Timing
    from polaformer.bench.op import Result, Row

    Found = dict[Shape, Result]

PASSES = {"forward": "forward pass", "both": "forward and backward pass"}
MEBI = 2**20
IN_BRACKETS = "in brackets the 95 % interval of the median over rounds, all rounds where there are fewer than 6"


def exit_code(reasons: "Mapping[str, Iterable[str | None]]", *, correct: bool) -> int:
    """0, or 1 if something is incorrect, or 75 if a table was too noisy, which is then said; reasons: of what was skipped."""
    from polaformer.bench.measure import TOO_NOISY, WIDEST

    noisy = [
        f"{where} is {reason}"
        for where, told in reasons.items()
        for reason in sorted({one for one in told if one and one.startswith(TOO_NOISY)})  # one at most
    ]
    if noisy:
        print_line(
            f"polaformer bench: {'; '.join(noisy)}. × is high over low of the interval of a median over rounds, "
            f"and should be at most {WIDEST}; end other programs, or give more --rounds and --seconds",
            stderr=True,
        )
    return (NOISY if noisy else 0) if correct else INCORRECT


def skipped_text(reason: str | None) -> str:
    """Why there is no number."""
    from polaformer.bench.measure import TOO_NOISY

    return f"skipped: {reason}" if reason is None or not reason.startswith(TOO_NOISY) else reason


def ratio_text(ratio: "Ratio | None", missing: str = "–") -> str:
    """The median and its interval; the interval alone where it is too wide."""
    if ratio is None:
        return missing
    interval = f"{ratio.low:.3g}–{ratio.high:.3g}"
    return f"noisy: {interval}" if ratio.is_noisy else f"{ratio.median:.2f} ({interval})"


def show(found: "Found", mode: str, machine: dict[str, Any], notes: Sequence[str]) -> None:
    """Ratios, then absolute numbers, then the machine."""
    tables = [_ratios(found, PASSES[mode]), _against_ours(found, PASSES[mode])]
    absolutes = [_absolutes(shape, result, PASSES[mode]) for shape, result in found.items()]
    print_all(*(table for table in tables if table.row_count), *_safety(found), *absolutes, *machine_lines(machine), *notes)


def show_lengths(curves: "dict[str, Curve]", setting: str, machine: dict[str, Any], notes: Sequence[str]) -> None:
    """How time grows, then the times, then the machine."""
    print_all(_growth(curves, setting), _times_by_length(curves, setting), *machine_lines(machine), *notes)


def milliseconds(timing: "Timing | None") -> tuple[str, str, str]:
    """Median, best and rounds."""
    if timing is None:
        return "", "", ""
    if timing.median is None or timing.best is None:
        return "skipped", "", "0"
    return f"{1e3 * timing.median:.2f}", f"{1e3 * timing.best:.2f}", str(len(timing.samples))


def number(value: float | None, form: str = ".2f") -> str:
    """The number, or nothing."""
    return "" if value is None else format(value, form)


def _ratios(found: "Found", passes: str) -> Table:
    table = new_table(
        f"Speed relative to the published form, {passes}",
        "shape",
        *(shape_text(shape) for shape in found),
        caption=f"more than 1: faster; {IN_BRACKETS}; shapes are batch,heads,tokens,head width",
    )
    for name in _names(found):
        table.add_row(name, *(_cell(result, name, _speedup(result, name)) for result in found.values()))
    return table


def _against_ours(found: "Found", passes: str) -> Table:
    with_saved = any(row.saved_bytes for result in found.values() for row in result.rows.values())
    caption = f"how many times longer the other takes; {IN_BRACKETS}"
    caption += "; bytes: what ours saves for backward, in what the other saves" if with_saved else ""
    shapes = (shape_text(shape) for shape in found)
    table = new_table(f"Our fastest against each of the others, {passes}", "shape", *shapes, caption=caption)
    if not any(result.fastest for result in found.values()):
        return table
    table.add_row("our fastest", *(result.fastest or "" for result in found.values()), end_section=True)
    for name in _names(found):
        table.add_row(name, *(_cell(result, name, result.fastest_over.get(name)) for result in found.values()))
    if with_saved:
        table.add_section()
        for name in _names(found):
            table.add_row(f"bytes: {name}", *(_saved_cell(result, name) for result in found.values()))
    return table


def _speedup(result: "Result", name: str) -> "Ratio | None":
    row = result.rows.get(name)
    return None if row is None else row.speedup


def _saved_cell(result: "Result", name: str) -> str:
    """What our fastest saves for backward in what the other saves."""
    other = result.rows.get(name)
    if other is None:
        return "not compiled"
    ours = result.rows[result.fastest].saved_bytes if result.fastest else None
    return number(ours / other.saved_bytes if ours and other.saved_bytes else None, ".3f")


def _safety(found: "Found") -> list[str]:
    costs = [
        f"{ratio_text(result.safe_over_unsafe)} at {shape_text(shape)}"
        for shape, result in found.items()
        if result.safe_over_unsafe is not None
    ]
    told = "Safe against unsafe (the cpu kernel with its shifts, in the time that it takes without)"
    return [f"\n{told}: {', '.join(costs)}"] if costs else []


def _absolutes(shape: Shape, result: "Result", passes: str) -> Table:
    rate = result.sgemm_gflops
    sgemm = "" if rate is None else f"; sgemm of 2048×2048 in the same rounds: {rate:.0f} GFLOP/s at best"
    with_saved = any(row.saved_bytes is not None for row in result.rows.values())
    columns = ("median (ms)", "best (ms)", "rounds", "error vs float64", "GFLOP/s", "of sgemm")
    saved = ("saved (MiB)", "of published") if with_saved else ()
    caption = f"GFLOP/s: dense products of matrices alone, at best{sgemm}"
    table = new_table(f"Shape {shape_text(shape)}, {passes}", "", *columns, *saved, caption=caption)
    for name, row in result.rows.items():
        share = "" if row.share_of_sgemm is None else f"{100 * row.share_of_sgemm:.0f} %"
        cells = [*_times(row), f"{row.error:.1e}", number(row.gflops, ".1f"), share]
        if with_saved:
            mebi = None if row.saved_bytes is None else row.saved_bytes / MEBI
            cells += [number(mebi, ".4g"), number(row.saved_ratio)]
        table.add_row(name, *cells)
    return table


def _names(found: "Found") -> list[str]:
    """Of all rows; one that could not be compiled at a shape is not in it."""
    return list(dict.fromkeys(name for result in found.values() for name in result.rows))


def _cell(result: "Result", name: str, value: "Ratio | None") -> str:
    """The number, or why there is none."""
    row = result.rows.get(name)
    if row is None:
        return "not compiled"
    if not row.correct:
        return "incorrect"
    if row.skipped is not None:
        return skipped_text(row.skipped)
    if row.timing is not None and not row.timing.samples:
        return f"skipped: one call took {row.timing.first:.1f} s"
    return ratio_text(value)


def _times(row: "Row") -> tuple[str, str, str]:
    if not row.correct:
        return "incorrect", "", ""
    return ("skipped", "", "0") if row.timing is None else milliseconds(row.timing)


def _growth(curves: "dict[str, Curve]", setting: str) -> Table:
    lengths = list(next(iter(curves.values())).timings)
    columns = [f"{few} →\n{many}" for few, many in pairwise(lengths)]
    caption = f"how many times longer for each doubling of the tokens, {IN_BRACKETS}; slope: a of time ∝ N^a, fitted to medians"
    table = new_table(f"Growth of time with the number of tokens, {setting}", "", *columns, "slope", caption=caption)
    for name, curve in curves.items():
        wrong = ["incorrect"] * len(columns)
        table.add_row(
            name, *([ratio_text(one, "") for one in curve.doublings] if curve.correct else wrong), number(curve.slope)
        )
    return table


def _times_by_length(curves: "dict[str, Curve]", setting: str) -> Table:
    lengths = list(next(iter(curves.values())).timings)
    table = new_table(f"Milliseconds, median (best), {setting}", "", *(str(n) for n in lengths), "error vs float64")
    for name, curve in curves.items():
        table.add_row(name, *(_time_cell(curve, n) for n in lengths), f"{curve.error:.1e}")
    return table


def _time_cell(curve: "Curve", length: int) -> str:
    timing = curve.timings[length]
    if not curve.correct:
        return "incorrect"
    if length in curve.skipped:
        return f"skipped: {curve.skipped[length]}"
    if timing is None or timing.median is None or timing.best is None:
        return "skipped" if timing is None else f"skipped: one call took {timing.first:.1f} s"
    return f"{1e3 * timing.median:.4g} ({1e3 * timing.best:.4g})"
