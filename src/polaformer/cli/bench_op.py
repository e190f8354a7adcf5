"""`polaformer bench op`: the speed of the operator on this machine, as ratios first."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from polaformer.cli.bench_options import Bench, Lengths, Report, Rounds, Shape, Shapes, shape_text
from polaformer.cli.bench_tables import IN_BRACKETS, PASSES, cell, mebibytes, milliseconds, number, ratio_text, table
from polaformer.cli.output import busy_lines, counted, machine_lines, threads_text

if TYPE_CHECKING:
    from polaformer.bench.contenders import Contender
    from polaformer.bench.length import Curve
    from polaformer.bench.measure import Ratio
    from polaformer.bench.op import Result, Row
    from polaformer.bench.runner import Settings


@dataclass(frozen=True)
class BenchOp(Bench, Rounds, Lengths, Shapes):
    """Time the operator on each backend against the published form, linear attention and softmax.

    All of them take turns in one run, in float32. A number is shown only for an implementation that agrees with a slow float64
    form, output and gradients; if one does not, the exit code is 1. One that would take too long or too much memory is skipped
    with the reason. A shape whose rounds disagree too much gets no numbers, and the exit code is 75.

    Example: polaformer bench op --shapes 4,4,3136,32 8,3,196,64 --mode both

    Example: polaformer bench op --lengths 4096 8192 16384 32768 --figure time.png
    """

    lengths: tuple[int, ...] = ()
    """Numbers of tokens to time at instead of --shapes, all in turns; shows how time grows with each doubling."""
    mode: Literal["forward", "both"] = "forward"
    """The forward pass alone, or forward and backward together."""
    figure: Path | None = None
    """PNG file to draw time against the number of tokens in; needs --lengths."""

    def measure(self) -> Report:
        """Check the options and time at all shapes, or at all lengths together."""
        shapes = self.checked_shapes(self.shapes)
        needs = "draws time against the number of tokens; give --lengths too, for instance --lengths 4096 8192 16384"
        self.check_common(self.rounds, figure_needs=None if self.lengths else needs)
        is_both = self.mode == "both"
        contenders, notes = self.contenders(self.without, backward=is_both)
        from polaformer.bench.runner import Settings

        settings = Settings(is_both, self.rounds, self.seconds, self.device)
        return (self._at_lengths if self.lengths else self._at_shapes)(shapes, contenders, notes, settings)

    def _at_shapes(
        self, shapes: list[Shape], contenders: "dict[str, Contender]", notes: list[str], settings: "Settings"
    ) -> Report:
        from polaformer.bench.machine import described
        from polaformer.bench.op import benchmark

        found: dict[Shape, Result] = {}
        with described(self.threads) as machine, counted((len(contenders) + 1) * (self.rounds + 2), len(shapes)) as begin:
            for shape in shapes:
                found[shape] = benchmark(shape, contenders, replace(settings, on_call=begin(shape_text(shape))))
        notes = list(dict.fromkeys([*notes, *(note for one in found.values() for note in one.notes)]))
        record = self._record(machine, notes)
        record["shapes"] = [{"shape": shape} | result.as_record() for shape, result in found.items()]
        shown = [*shape_tables(found, self.mode), *machine_lines(machine), *notes]
        skipped = {shape_text(shape): [row.skipped for row in one.rows.values()] for shape, one in found.items()}
        correct = all(row.correct for one in found.values() for row in one.rows.values())
        return Report(record, shown, lambda _: None, correct, skipped)

    def _at_lengths(
        self, shapes: list[Shape], contenders: "dict[str, Contender]", notes: list[str], settings: "Settings"
    ) -> Report:
        from polaformer.bench.length import time_lengths
        from polaformer.bench.machine import described

        # One row per mechanism, and no compiler at every length.
        contenders = {name: one for name, one in contenders.items() if one.is_safe and not one.is_compiled}
        lengths = [shape[2] for shape in shapes]
        calls = len(contenders) * (self.rounds + 1) * len(lengths)
        with described(self.threads) as machine, counted(calls, 1) as begin:
            curves = time_lengths(lengths, contenders, replace(settings, on_call=begin("lengths")), **self.sizes)
        setting = f"{PASSES[self.mode]}, {self.setting}, {threads_text(machine)}"

        def draw(path: Path) -> None:
            from polaformer.analysis.bench_figures import save_times

            title = "\n".join([setting.capitalize(), *busy_lines(machine)])
            times, slopes = ({name: getattr(one, what) for name, one in curves.items()} for what in ("medians", "slope"))
            save_times(path, times, slopes, title=title)

        rows = {name: curve.as_record() for name, curve in curves.items()}
        record = self._record(machine, notes) | self.sizes | {"lengths": lengths, "rows": rows}
        shown: list[Table | str] = [*_length_tables(curves, lengths, setting), *machine_lines(machine), *notes]
        return Report(record, shown, draw, all(curve.correct for curve in curves.values()))

    def _record(self, machine: dict[str, Any], notes: list[str]) -> dict[str, Any]:
        return {"command": "bench op", "mode": self.mode, "device": self.device, "machine": machine, "notes": notes}


def shape_tables(found: "dict[Shape, Result]", mode: str) -> list[Table | str]:
    """Ratios, then what safety costs, then absolute numbers."""
    shapes = [shape_text(shape) for shape in found]
    names = list(dict.fromkeys(name for result in found.values() for name in result.rows))
    with_saved = any(row.saved_bytes for result in found.values() for row in result.rows.values())

    def rows(text: "Callable[[Result, str], str]", label: str = "") -> dict[str, list[str]]:
        def cells(name: str) -> list[str]:
            return [text(result, name) if name in result.rows else "not compiled" for result in found.values()]

        return {label + name: cells(name) for name in names}

    shown: list[Table | str] = []
    if names:
        title = f"Speed relative to the published form, {PASSES[mode]}"
        caption = f"more than 1: faster; {IN_BRACKETS}; shapes are batch,heads,tokens,head width"
        shown.append(table(title, shapes, rows(_speedup), first="shape", caption=caption))
    if any(result.fastest for result in found.values()):
        title = f"Our fastest against each of the others, {PASSES[mode]}"
        caption = f"how many times longer the other takes; {IN_BRACKETS}"
        caption += "; bytes: what ours saves for backward relative to the other" if with_saved else ""
        fastest = {"our fastest": [result.fastest or "" for result in found.values()]}
        saved = rows(_saved, "bytes: ") if with_saved else {}
        shown.append(table(title, shapes, fastest, rows(_over), saved, first="shape", caption=caption))
    safe = {text: result.safe_over_unsafe for text, result in zip(shapes, found.values(), strict=True)}
    costs = [f"{ratio_text(ratio)} at {text}" for text, ratio in safe.items() if ratio is not None]
    if costs:
        shown.append(f"\nSafe against unsafe (time of the cpu kernel with its shifts over without them): {', '.join(costs)}")
    return [*shown, *(_absolutes(f"Shape {shape_text(shape)}, {PASSES[mode]}", one) for shape, one in found.items())]


def _speedup(result: "Result", name: str) -> str:
    return _cell(result.rows[name], result.rows[name].speedup)


def _over(result: "Result", name: str) -> str:
    return _cell(result.rows[name], result.fastest_over.get(name))


def _saved(result: "Result", name: str) -> str:
    """What our fastest saves for backward relative to the other."""
    ours, other = (result.rows[one].saved_bytes if one else None for one in (result.fastest, name))
    return number(ours / other if ours and other else None, ".3f")


def _cell(row: "Row", ratio: "Ratio | None") -> str:
    return cell(ratio_text(ratio), correct=row.correct, skipped=row.skipped, timing=row.timing)


def _absolutes(title: str, result: "Result") -> Table:
    rate = result.sgemm_gflops
    sgemm = "" if rate is None else f"; sgemm of 2048×2048 in the same rounds: {rate:.0f} GFLOP/s at best"
    with_saved = any(row.saved_bytes is not None for row in result.rows.values())
    columns = ["median (ms)", "best (ms)", "rounds", "error vs float64", "GFLOP/s", "of sgemm"]
    columns += ["saved (MiB)", "of published"] if with_saved else []

    def cells(row: "Row") -> list[str]:
        times = milliseconds(row.timing) if row.correct else ("incorrect", "", "")
        found = [*times, f"{row.error:.1e}", number(row.gflops, ".1f"), number(row.share_of_sgemm, ".0%").replace("%", " %")]
        return [*found, mebibytes(row.saved_bytes), number(row.saved_ratio)] if with_saved else found

    rows = {name: cells(row) for name, row in result.rows.items()}
    return table(title, columns, rows, caption=f"GFLOP/s: dense matmuls alone, at best{sgemm}")


def _length_tables(curves: "dict[str, Curve]", lengths: list[int], setting: str) -> list[Table]:
    steps = [f"{few} →\n{many}" for few, many in pairwise(lengths)]
    growth, times = {}, {}
    for name, curve in curves.items():
        doublings = [ratio_text(one, "") if curve.correct else "incorrect" for one in curve.doublings]
        growth[name] = [*doublings, number(curve.slope)]
        times[name] = [*(_time_cell(curve, n) for n in lengths), f"{curve.error:.1e}"]
    caption = f"how many times longer per doubling of the tokens, {IN_BRACKETS}; slope: a of time ∝ N^a, fitted to medians"
    grown = table(f"Growth of time with the number of tokens, {setting}", [*steps, "slope"], growth, caption=caption)
    columns = [*(str(n) for n in lengths), "error vs float64"]
    return [grown, table(f"Milliseconds, median (best), {setting}", columns, times)]


def _time_cell(curve: "Curve", length: int) -> str:
    timing = curve.timings[length]
    text = f"{1e3 * timing.median:.4g} ({1e3 * timing.best:.4g})" if timing and timing.median and timing.best else "skipped"
    return cell(text, correct=curve.correct, skipped=curve.skipped.get(length), timing=timing)
