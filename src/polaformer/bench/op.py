"""The operator on each backend against its published form, linear attention and softmax, in one run.

What is compared is defined in polaformer.bench.contenders. At a single shape all are timed interleaved; against the number
of tokens, at all lengths together, which shows where softmax departs from linear growth.

# B batch, H heads, N queries and keys, D head width
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from polaformer.analysis.agreement import Pass, Shape, largest, random_inputs
from polaformer.analysis.call_memory import allocated_peak, saved_bytes
from polaformer.analysis.timing import Ratio, quickest, slowdown
from polaformer.bench.contenders import BASELINE, SAFE, UNSAFE, Contender, noting_failure
from polaformer.bench.correctness import TOLERANCE, cut, relative_error, relative_error_at_length
from polaformer.bench.runner import BenchSettings, Cost, LengthCurve, Measurement, time_in_turns

SGEMM, SGEMM_SIZE = "sgemm", 2048
MIN_FLOPS = 10**8  # per call: below it the cost of calls dominates, and a share of sgemm's rate means nothing
# Of the record of a row: attributes of a Measurement.
KEYS = ("correct", "error", "speedup", "timing", "skipped", "gflops", "share_of_sgemm", "saved_bytes", "saved_ratio")
BACKWARD = 3  # forward and backward take this many times the matmuls of forward; recomputation is not counted


class OpResult(NamedTuple):
    """Everything measured at one shape."""

    rows: dict[str, Measurement]
    sgemm_gflops: float | None  # at best
    fastest: str | None  # of ours
    notes: list[str]

    @property
    def safe_over_unsafe(self) -> Ratio | None:
        """What safety costs: time with the shifts over time without them."""
        return slowdown(*(self.rows[name].timing if name in self.rows else None for name in (SAFE, UNSAFE)))

    def as_record(self) -> dict[str, Any]:
        """The result for JSON."""
        rows, over = ({name: row.as_record(*KEYS) for name, row in self.rows.items()}, self.safe_over_unsafe)
        ratios = {name: row.fastest_over.median for name, row in self.rows.items() if row.fastest_over}
        record = {"rows": rows, "sgemm_gflops": self.sgemm_gflops, "fastest": self.fastest, "fastest_over": ratios}
        return {**record, "safe_over_unsafe": over and over.median, "notes": self.notes}


def benchmark(shapes: Sequence[Shape], contenders: Mapping[str, Contender], settings: BenchSettings) -> dict[int, OpResult]:
    """The results by number of tokens, in which several shapes differ: check, forecast, time all of them interleaved.

    Shapes are compared within rounds, so that transient load affects all of them. At a single one, a large matmul
    is timed too. With the backward pass, the bytes saved for it are counted.
    """
    errors, notes = check(contenders, shapes, settings)
    prepared = {shape: prepare(contenders, shape, settings, errors, notes) for shape in shapes}
    rows: dict[int, dict[str, Measurement]] = {}
    calls: dict[int, dict[str, Callable[[], object]]] = {}
    for shape, (passes, reasons) in prepared.items():
        right = {name: one for name, one in passes.items() if name in errors and errors[name] <= TOLERANCE}
        sizes = {name: {"saved": saved_bytes(one.recorded)} for name, one in right.items() if settings.backward}
        times = BACKWARD if settings.backward else 1
        named = rows[shape[2]] = {
            name: Measurement(
                error, skipped=reasons.get(name), sizes=sizes.get(name, {}), work=times * contenders[name].flops(shape)
            )
            for name, error in errors.items()
        }
        calls[shape[2]] = {**right}
        if len(shapes) == 1 and right and max(row.work or 0 for row in named.values()) >= MIN_FLOPS:
            named[SGEMM] = Measurement(work=2 * SGEMM_SIZE**3)
            calls[shape[2]][SGEMM] = partial(torch.matmul, *torch.ones(2, SGEMM_SIZE, SGEMM_SIZE, device=settings.device))
    timed = time_in_turns(calls, rows, BASELINE, settings)
    ours = [name for name in errors if contenders[name].is_ours]
    return {n: _compared(named, ours, notes) for n, named in timed.items()}


def check(
    contenders: Mapping[str, Contender], shapes: Sequence[Shape], settings: BenchSettings
) -> tuple[dict[str, float], list[str]]:
    """The worst error of each contender over the shapes, and a note for each that could not be compiled."""
    errors: dict[str, float] = {}
    notes: list[str] = []
    for name, contender in contenders.items():
        settings.on_call(f"checking {name}")
        with noting_failure(name, notes) if contender.is_compiled else nullcontext():
            checked = {cut(shape) for shape in shapes}
            errors[name] = largest(*(relative_error(contender, shape, settings.device) for shape in checked))
    return errors, notes


def forecast(contenders: Mapping[str, Contender], shape: Shape, short: Shape, settings: BenchSettings) -> dict[str, str]:
    """Why contenders are not worth trying, by name: one call would take too long or more memory than is free.

    Judged by a call at the shape with fewer tokens, `short`; time grows as matmuls do, memory as tokens or maps do. A compiled
    contender gets the forecast of the published form, from which it is compiled.
    """
    found: dict[str, str | None] = {}
    if shape == short:
        return {}
    for name, contender in contenders.items():
        if not contender.is_compiled:
            one = Pass(contender.build(short), random_inputs(short, device=settings.device), settings.backward)
            size = allocated_peak(one, settings.device)  # this call also warms up
            growth = contender.flops(shape) / contender.flops(short)
            cost = Cost(short[2], quickest(one, settings.seconds / growth), size, 2.0 if contender.holds_maps else 1.0)
            found[name] = cost.skip_reason(shape[2], growth, settings)
    found |= {name: found.get(BASELINE) for name, one in contenders.items() if one.is_compiled}
    return {name: reason for name, reason in found.items() if reason is not None}


def prepare(
    contenders: Mapping[str, Contender], shape: Shape, settings: BenchSettings, errors: dict[str, float], notes: list[str]
) -> tuple[dict[str, Pass], dict[str, str]]:
    """What is to be timed of the correct contenders, and why others are not worth trying, both by name.

    Compiles what has to be, and checks again at the length that is timed; updates `errors`, and `notes` of failures to compile.
    """
    inputs = random_inputs(shape, device=settings.device)  # before the forecast: they take memory too
    right = {name: contenders[name] for name, error in errors.items() if error <= TOLERANCE}
    passes, reasons = dict[str, Pass](), forecast(right, shape, cut(shape), settings)
    for name in [name for name in right if name not in reasons]:
        one = Pass(right[name].build(shape), inputs, settings.backward)
        with noting_failure(name, notes):
            if right[name].is_compiled:
                one()
            passes[name] = one
        if name in passes:
            errors[name] = largest(errors[name], relative_error_at_length(right[name], one))
        else:
            del errors[name]
    return passes, reasons


def curves(results: Mapping[int, OpResult]) -> dict[str, LengthCurve]:
    """The measurements of each contender at all lengths, by name."""
    names = next(iter(results.values())).rows
    return {name: LengthCurve({n: result.rows[name] for n, result in results.items()}) for name in names}


def as_record(curve: LengthCurve) -> dict[str, Any]:
    """The curve for JSON."""
    times = {str(n): point.timing and point.timing.as_record() for n, point in curve.points.items()}
    skipped = {str(n): point.skipped for n, point in curve.points.items() if point.skipped}
    shape = {"slope": curve.slope(), "per_doubling": [one and one.median for one in curve.doublings]}
    return {"correct": curve.correct, "error": curve.error, **shape, "times": times, "skipped": skipped}


def _compared(rows: dict[str, Measurement], ours: Sequence[str], notes: list[str]) -> OpResult:
    """The result with the ratios to our fastest and to sgemm."""
    rate = rows.pop(SGEMM).gflops if SGEMM in rows else None
    fastest = min((name for name in ours if rows[name].median), key=lambda name: rows[name].median or 0.0, default=None)
    for name, row in rows.items():
        over = slowdown(row.timing, rows[fastest].timing) if fastest else None
        share = row.gflops / rate if row.gflops and rate else None
        rows[name] = replace(row, fastest_over=over, share_of_sgemm=share)
    return OpResult(rows, rate, fastest, notes)
