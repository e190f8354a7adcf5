"""`polaformer bench op`: the speed of the operator on this machine, as ratios first."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polaformer.cli import bench_options as options
from polaformer.cli import bench_tables as tables
from polaformer.cli.bench_options import Shape, shape_text
from polaformer.cli.errors import INCORRECT
from polaformer.cli.output import busy_lines, counted, print_json, threads_text
from polaformer.regular_files import writing

if TYPE_CHECKING:
    from polaformer.bench.contenders import Contender
    from polaformer.bench.length import Curve
    from polaformer.bench.op import Result


@dataclass(frozen=True)
class BenchOp:
    """Time the operator on each backend against the published form, linear attention and softmax.

    All of them in turns, in one run, in float32. A number is shown only for what agrees with a slow float64 form, output and
    gradients; if one does not, the exit code is 1. What would take too long or too much memory is skipped, and says so. A shape
    whose rounds disagree too much gets no number, and the exit code is 75.

    Example: polaformer bench op --shapes 4,4,3136,32 8,3,196,64 --mode both

    Example: polaformer bench op --lengths 4096 8192 16384 32768 --figure time.png
    """

    shapes: tuple[str, ...] = options.SHAPES
    """Batch, heads, tokens and head width, with commas; several with spaces between them."""
    lengths: tuple[int, ...] = ()
    """Numbers of tokens to time at instead of --shapes, all in turns; shows how time grows with each doubling."""
    batch: int = 1
    """Batch size for --lengths."""
    heads: int = 4
    """Number of heads for --lengths."""
    width: int = 32
    """Head width for --lengths."""
    mode: Literal["forward", "both"] = "forward"
    """The forward pass alone, or forward and backward together."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to compute."""
    without: tuple[str, ...] = ()
    """Rows to leave out, by a part of their name; for instance --without compile softmax."""
    rounds: int = 30
    """How often each is timed, at most."""
    seconds: float = 20.0
    """Time for each shape: the slow get fewer rounds, and what takes longer than this for a single call is skipped."""
    threads: int | None = None
    """How many threads torch may use; its own choice unless given."""
    figure: Path | None = None
    """PNG file to draw time against the number of tokens in; needs --lengths."""
    json: bool = False
    """Print the result as JSON on stdout and nothing else there."""

    def run(self) -> int:
        """Checks the options, measures, prints."""
        shapes = self.checked_shapes()
        contenders, notes = options.contenders_for(self.device, self.without, backward=self.mode == "both")
        return self._run_lengths(contenders, notes) if self.lengths else self._run_shapes(shapes, contenders, notes)

    def checked_shapes(self) -> list[Shape]:
        """The shapes as numbers; raises UsageError for any option that makes no sense."""
        shapes = options.shapes_of(self.shapes, self.lengths, self.batch, self.heads, self.width)
        options.check_repeats(self.rounds, self.seconds)
        options.check_threads(self.threads)
        needs = "draws time against the number of tokens; give --lengths too, for instance --lengths 4096 8192 16384"
        options.check_figure(self.figure, possible=bool(self.lengths), needs=needs)
        return shapes

    def _run_shapes(self, shapes: list[Shape], contenders: "dict[str, Contender]", notes: list[str]) -> int:
        from polaformer.bench.machine import described
        from polaformer.bench.op import benchmark

        found: dict[Shape, Result] = {}
        with described(self.threads) as machine, counted((len(contenders) + 1) * (self.rounds + 2), len(shapes)) as begin:
            for shape in shapes:
                found[shape] = benchmark(shape, contenders=contenders, on_call=begin(shape_text(shape)), **self._settings())
        notes = list(dict.fromkeys([*notes, *(note for one in found.values() for note in one.notes)]))
        if self.json:
            records = [{"shape": shape} | result.as_record() for shape, result in found.items()]
            print_json(self._record(machine, notes) | {"shapes": records})
        else:
            tables.show(found, self.mode, machine, notes)
        rows = {shape_text(shape): one.rows.values() for shape, one in found.items()}
        reasons = {shape: [row.skipped for row in some] for shape, some in rows.items()}
        return tables.exit_code(reasons, correct=all(row.correct for some in rows.values() for row in some))

    def _run_lengths(self, contenders: "dict[str, Contender]", notes: list[str]) -> int:
        from polaformer.bench.length import time_lengths
        from polaformer.bench.machine import described

        # One row a mechanism, and no compiler at every length.
        contenders = {name: one for name, one in contenders.items() if one.is_safe and not one.is_compiled}
        sizes: dict[str, Any] = {"batch": self.batch, "num_heads": self.heads, "width": self.width}
        calls = len(contenders) * (self.rounds + 1) * len(set(self.lengths))
        with described(self.threads) as machine, counted(calls, 1) as begin:
            curves = time_lengths(self.lengths, contenders, on_call=begin("lengths"), **sizes, **self._settings())
        if self.figure is not None:
            self._draw(curves, machine)
        if self.json:
            records = {name: curve.as_record() for name, curve in curves.items()}
            print_json(self._record(machine, notes) | sizes | {"lengths": sorted(set(self.lengths)), "rows": records})
        else:
            saved = [] if self.figure is None else [f"saved {self.figure.as_posix()}"]
            tables.show_lengths(curves, self._setting(machine), machine, [*notes, *saved])
        return 0 if all(curve.correct for curve in curves.values()) else INCORRECT

    def _settings(self) -> dict[str, Any]:
        """The options that all measurements share."""
        backward = self.mode == "both"
        return {"backward": backward, "rounds": self.rounds, "seconds": self.seconds, "device": self.device}

    def _record(self, machine: dict[str, Any], notes: list[str]) -> dict[str, Any]:
        return {"command": "bench op", "mode": self.mode, "device": self.device, "machine": machine, "notes": notes}

    def _setting(self, machine: dict[str, Any]) -> str:
        sizes = f"batch {self.batch}, {self.heads} heads of width {self.width}"
        return f"{tables.PASSES[self.mode]}, {sizes}, float32, {threads_text(machine)}"

    def _draw(self, curves: "dict[str, Curve]", machine: dict[str, Any]) -> None:
        from polaformer.analysis.bench_figures import save_times

        assert self.figure is not None
        with writing(f"--figure {self.figure}"):
            title = "\n".join([self._setting(machine).capitalize(), *busy_lines(machine)])
            times = {name: dict(zip(curve.timings, curve.medians, strict=True)) for name, curve in curves.items()}
            save_times(self.figure, times, {name: curve.slope for name, curve in curves.items()}, title=title)
