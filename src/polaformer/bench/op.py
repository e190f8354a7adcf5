"""The operator on each backend against its published form, linear attention and softmax, in one run.

What is compared is defined in polaformer.bench.contenders. At single shapes all take turns; against the number of tokens they
take turns at all lengths together, which shows where softmax departs from linear growth.

# B batch, H heads, N queries and keys, D head width
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from polaformer.analysis.agreement import Pass, Shape, largest, random_inputs
from polaformer.analysis.call_memory import allocated_peak, saved_bytes
from polaformer.analysis.timing import Ratio, measure, quickest, slowdown
from polaformer.bench.contenders import BASELINE, SAFE, UNSAFE, Contender, noting_failure
from polaformer.bench.correctness import TOLERANCE, cut, relative_error, relative_error_at_length
from polaformer.bench.runner import BenchSettings, LengthCurve, Measurement, skip_reason, time_in_turns

SGEMM, SGEMM_SIZE = "sgemm", 2048
LEAST_FLOPS = 10**8  # per call: below it the cost of calls dominates, and a share of sgemm's rate means nothing
DEFAULTS = BenchSettings()
BACKWARD = 3  # forward and backward take this many times the matmuls of forward; recomputation is not counted


@dataclass(frozen=True)
class OpMeasurement(Measurement):
    """What was measured of one contender at one shape; the baseline is the published form."""

    flops: int | None = None  # of one call, matmuls alone
    fastest_over: Ratio | None = None  # how many times longer it takes than our fastest
    share_of_sgemm: float | None = None  # of the rate of a large matmul timed in the same rounds; best by best
    keys = ("correct", "error", "speedup", "timing", "skipped", "gflops", "share_of_sgemm", "saved_bytes", "saved_ratio")

    @property
    def gflops(self) -> float | None:
        """Billions of operations per second, at best."""
        best = self.timing and self.timing.best
        return None if best is None or self.flops is None else self.flops / best / 1e9


class OpResult(NamedTuple):
    """Everything measured at one shape."""

    rows: dict[str, OpMeasurement]
    sgemm_gflops: float | None  # at best
    fastest: str | None  # of ours
    notes: list[str]

    @property
    def safe_over_unsafe(self) -> Ratio | None:
        """What safety costs: time with the shifts over time without them."""
        return slowdown(*(self.rows[name].timing if name in self.rows else None for name in (SAFE, UNSAFE)))

    def as_record(self) -> dict[str, Any]:
        """The result for JSON."""
        rows, over = ({name: row.as_record() for name, row in self.rows.items()}, self.safe_over_unsafe)
        ratios = {name: row.fastest_over.median for name, row in self.rows.items() if row.fastest_over}
        record = {"rows": rows, "sgemm_gflops": self.sgemm_gflops, "fastest": self.fastest, "fastest_over": ratios}
        return {**record, "safe_over_unsafe": over and over.median, "notes": self.notes}


def benchmark(shape: Shape, contenders: Mapping[str, Contender], settings: BenchSettings = DEFAULTS) -> OpResult:
    """A row for each contender at the shape, by name: check all of them, then time the correct ones in turns.

    With the backward pass, also count the bytes saved for it. A contender that would take longer than settings.seconds for one
    call, or more memory than is free, is skipped with the reason; all are if the timings are too noisy.
    """
    prepared, passes, notes = prepare(contenders, [shape], settings)
    calls: dict[str, Callable[[], object]] = {name: one for (name, _), one in passes.items()}
    saved = {name: saved_bytes(one.recorded) for (name, _), one in passes.items()} if settings.backward else {}
    ratios = {name: size / saved[BASELINE] for name, size in saved.items() if BASELINE in saved}
    flops = {name: (BACKWARD if settings.backward else 1) * one.flops(shape) for name, one in contenders.items()}
    rows = {SGEMM: OpMeasurement(flops=2 * SGEMM_SIZE**3)}
    for (name, _), row in prepared.items():
        rows[name] = replace(row, flops=flops[name], saved_bytes=saved.get(name), saved_ratio=ratios.get(name))
    if calls and max(flops.values()) >= LEAST_FLOPS:
        left, right = (torch.ones(SGEMM_SIZE, SGEMM_SIZE, device=settings.device) for _ in range(2))
        calls[SGEMM] = lambda: left @ right
    rows = time_in_turns(calls, rows, BASELINE, settings)
    rate = rows.pop(SGEMM).gflops
    ours = [name for name, row in rows.items() if row.median is not None and contenders[name].is_ours]
    fastest = min(ours, key=lambda name: rows[name].median or 0.0, default=None)
    for name, row in rows.items():
        over = slowdown(row.timing, rows[fastest].timing) if fastest else None
        share = row.gflops / rate if row.gflops and rate else None
        rows[name] = replace(row, fastest_over=over, share_of_sgemm=share)
    return OpResult(rows, rate, fastest, notes)


def time_lengths(
    lengths: Sequence[int], contenders: Mapping[str, Contender], settings: BenchSettings
) -> dict[str, LengthCurve]:
    """A curve of each contender, by name: check all of them, then time them at all lengths in turns.

    Lengths are compared within a round, so that a busy spell of the machine affects all of them. A call
    that would take longer than settings.seconds, or more memory than is free, is skipped with the reason.
    """
    shapes = [settings.shape(n) for n in sorted(set(lengths))]
    rows, passes, _ = prepare(contenders, shapes, replace(settings, on_call=lambda _: None))
    calls = {f"{name}, {shape[2]} tokens": one for (name, shape), one in passes.items()}
    timings = measure(calls, rounds=settings.rounds, seconds=settings.seconds * len(shapes), on_call=settings.on_call)
    points: dict[str, dict[int, Measurement]] = {}
    for (name, shape), row in rows.items():
        points.setdefault(name, {})[shape[2]] = replace(row, timing=timings.get(f"{name}, {shape[2]} tokens"))
    return {name: LengthCurve(found) for name, found in points.items()}


def prepare(
    contenders: Mapping[str, Contender], shapes: Sequence[Shape], settings: BenchSettings
) -> tuple[dict[tuple[str, Shape], OpMeasurement], dict[tuple[str, Shape], Pass], list[str]]:
    """Rows without times, what is to be timed, both by name and shape, and a note for each that could not be compiled.

    Checks the contenders at all shapes, forecasts what is worth trying, and compiles and checks again what will be timed.
    """
    errors: dict[str, float] = {}
    passes: dict[tuple[str, Shape], Pass] = {}
    reasons: dict[Shape, dict[str, str]] = {}
    notes: list[str] = []
    for name, contender in contenders.items():
        settings.on_call(f"checking {name}")
        with noting_failure(name, notes) if contender.is_compiled else nullcontext():
            checked = {cut(shape) for shape in shapes}
            errors[name] = largest(*(relative_error(contender, shape, settings.device) for shape in checked))
    right = {name: contenders[name] for name, error in errors.items() if error <= TOLERANCE}
    for shape in shapes:
        inputs, reasons[shape] = random_inputs(shape, device=settings.device), skip_reasons(right, shape, settings)
        for name in [name for name in right if name in errors and name not in reasons[shape]]:
            one = Pass(right[name].build(shape), inputs, settings.backward)
            with noting_failure(name, notes):
                if right[name].is_compiled:
                    one()
                passes[name, shape] = one
            if (name, shape) in passes:
                errors[name] = largest(errors[name], relative_error_at_length(right[name], one))
            else:
                del errors[name]
    rows = {(name, shape): OpMeasurement(errors[name], skipped=reasons[shape].get(name)) for name in errors for shape in shapes}
    return rows, {key: one for key, one in passes.items() if key in rows and rows[key].correct}, notes


def skip_reasons(contenders: Mapping[str, Contender], shape: Shape, settings: BenchSettings) -> dict[str, str]:
    """Why contenders are not worth trying, by name: one call would take too long or more memory than is free.

    The forecast is from a call at LONGEST_CHECKED tokens, time growing as matmuls do and memory as tokens do; up to that length
    there is none. A compiled contender gets the forecast of the published form, from which it is compiled.
    """
    short, found = cut(shape), {}
    if shape == short:
        return {}
    for name, contender in contenders.items():
        if not contender.is_compiled:
            one = Pass(contender.build(short), random_inputs(short, device=settings.device), settings.backward)
            size = allocated_peak(one, settings.device) * shape[2] // short[2]  # this call also warms up
            longer = contender.flops(shape) / contender.flops(short)
            found[name] = skip_reason(size, longer * quickest(one, settings.seconds / longer), settings)
    found |= {name: found.get(BASELINE) for name, one in contenders.items() if one.is_compiled}
    return {name: reason for name, reason in found.items() if reason is not None}
