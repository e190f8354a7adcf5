"""The operator on each backend against the published form of itself, linear attention and softmax, in one run.

What is compared stands in polaformer.bench.contenders.

# B batch, H heads, N queries and keys, D head width
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from polaformer.bench.agreement import Inputs, Shape, random_inputs
from polaformer.bench.contenders import SAFE, UNSAFE, YARDSTICK, Contender, working
from polaformer.bench.correctness import correctness, correctness_at_length, largest
from polaformer.bench.forecast import why_not
from polaformer.bench.measure import Ratio, Timing, measure, noise, slowdown, speedup_record
from polaformer.bench.memory import saved_bytes
from polaformer.bench.passes import Pass

TOLERANCE = 1e-5  # of fp32 against float64; a right implementation stays near 1e-6
SGEMM, SGEMM_SIZE = "sgemm", 2048
LEAST_FLOPS = 10**8  # of a call: below it the cost of calls decides, and a share of the rate of sgemm says nothing
BACKWARD = 3  # forward and backward take so many times the products of forward: two for each; what is computed again is free


@dataclass(frozen=True)
class Row:
    """What was measured of one contender at one shape."""

    error: float  # the worst relative difference from the truth, over the output and all gradients
    timing: Timing | None = None  # None where the error was too large, or where it would have taken too much
    speedup: Ratio | None = None  # over the published form, from the rounds of the timing
    skipped: str | None = None  # why it was not timed although it is correct
    flops: int | None = None  # of one call, products of matrices alone
    share_of_sgemm: float | None = None  # of the best rate of a large product of matrices, measured in turns; best by best
    saved_bytes: int | None = None  # kept for the backward pass
    saved_ratio: float | None = None  # … against the published form

    @property
    def correct(self) -> bool:
        """Whether it computes what it should."""
        return self.error <= TOLERANCE  # an error of NaN does not pass

    @property
    def gflops(self) -> float | None:
        """Billions of operations in a second, at best."""
        best = None if self.timing is None else self.timing.best
        return None if best is None or self.flops is None else self.flops / best / 1e9

    def as_record(self) -> dict[str, Any]:
        """For JSON."""
        record: dict[str, Any] = {"correct": self.correct, "error": self.error} | speedup_record(self.speedup)
        record |= {} if self.timing is None else self.timing.as_record()
        record |= {"skipped": self.skipped, "gflops": self.gflops, "share_of_sgemm": self.share_of_sgemm}
        return record | {"saved_bytes": self.saved_bytes, "saved_ratio": self.saved_ratio}


class Result(NamedTuple):
    """Everything measured at one shape."""

    rows: dict[str, Row]
    sgemm_gflops: float | None  # at best
    fastest: str | None  # of ours
    fastest_over: dict[str, Ratio | None]  # how many times longer each other takes than our fastest
    safe_over_unsafe: Ratio | None  # what safety costs: time with the shifts over time without them
    notes: list[str]

    def as_record(self) -> dict[str, Any]:
        """For JSON."""
        over = {name: ratio and ratio.median for name, ratio in self.fastest_over.items()}
        ratios = {"fastest_over": over, "safe_over_unsafe": self.safe_over_unsafe and self.safe_over_unsafe.median}
        return self._asdict() | ratios | {"rows": {name: row.as_record() for name, row in self.rows.items()}}


def benchmark(
    shape: Shape,
    *,
    backward: bool = False,
    rounds: int = 15,
    seconds: float = 10.0,
    contenders: Mapping[str, Contender] | None = None,
    device: str = "cpu",
    on_call: Callable[[str], None] | None = None,
) -> Result:
    """Correctness of all contenders first, then the time of those that are correct, taken in turns.

    backward: time the forward and the backward pass together instead of the forward pass alone, and count what is saved.
    What would take longer than `seconds` for one call, or more memory than there is, is skipped with the reason; so are all
    if the machine is too noisy. rounds, seconds and on_call are those of `measure`; on_call is told of the checks too.
    """
    contenders = working(device, backward=backward)[0] if contenders is None else contenders
    errors, notes = check(contenders, shape, device, on_call)
    right = {name: contenders[name] for name, error in errors.items() if error <= TOLERANCE}
    skipped = why_not(right, shape, backward=backward, seconds=seconds, device=device)
    tried = {name: one for name, one in right.items() if name not in skipped}
    passes, failed = prepared(tried, shape, random_inputs(shape, device=device), backward)
    for name, one in list(passes.items()):
        errors[name] = largest(errors[name], correctness_at_length(tried[name], one))
        if not errors[name] <= TOLERANCE:
            del passes[name]
    saved = {name: saved_bytes(one.recorded) for name, one in passes.items()} if backward else {}
    flops = {name: (BACKWARD if backward else 1) * one.flops(shape) for name, one in contenders.items()}
    calls: dict[str, Callable[[], object]] = dict(passes)
    if passes and max(flops.values()) >= LEAST_FLOPS:
        calls[SGEMM] = _sgemm(device)
    timings = measure(calls, baseline=YARDSTICK, rounds=rounds, seconds=seconds, on_call=on_call) if calls else {}
    refused = noise(timings, YARDSTICK)
    timings, skipped = {} if refused else timings, skipped | refused
    errors = {name: error for name, error in errors.items() if name not in failed}
    return _result(_Found(contenders, errors, skipped, timings, flops, saved), [*notes, *failed.values()])


def check(
    contenders: Mapping[str, Contender], shape: Shape, device: str = "cpu", on_call: Callable[[str], None] | None = None
) -> tuple[dict[str, float], list[str]]:
    """The error of each contender, and a line for each that could not be compiled. on_call is told which one comes next."""
    errors, notes = {}, []
    for name, contender in contenders.items():
        if on_call is not None:
            on_call(f"checking {name}")
        try:
            errors[name] = correctness(contender, shape, device)
        except RuntimeError as error:
            if not contender.is_compiled:
                raise
            notes.append(cannot_compile(name, error))
    return errors, notes


def cannot_compile(name: str, error: RuntimeError) -> str:
    """What went wrong, in a line."""
    return f"{name} is left out: it could not be compiled ({type(error).__name__}: {str(error).splitlines()[0]})"


def prepared(
    contenders: Mapping[str, Contender], shape: Shape, inputs: Inputs, backward: bool
) -> tuple[dict[str, Pass], dict[str, str]]:
    """A pass of each contender, compiled already where it is; and a line, by name, for each that could not be."""
    passes, failed = {}, {}
    for name, contender in contenders.items():
        passes[name] = Pass(contender.build(shape), inputs, backward)
        try:
            if contender.is_compiled:
                passes[name]()
        except RuntimeError as error:
            failed[name] = cannot_compile(name, error)
            del passes[name]
    return passes, failed


def _sgemm(device: str) -> Callable[[], object]:
    left, right = (torch.ones(SGEMM_SIZE, SGEMM_SIZE, device=device) for _ in range(2))
    return lambda: left @ right


class _Found(NamedTuple):
    """What rows are made of, by name."""

    contenders: Mapping[str, Contender]
    errors: dict[str, float]
    skipped: dict[str, str]
    timings: dict[str, Timing]
    flops: dict[str, int]
    saved: dict[str, int]


def _row(found: _Found, name: str) -> Row:
    timing, yardstick = found.timings.get(name), found.timings.get(YARDSTICK)
    row = Row(found.errors[name], timing, skipped=found.skipped.get(name), flops=found.flops[name])
    rate, saved = _sgemm_gflops(found.timings), found.saved.get(name)
    return replace(
        row,
        speedup=slowdown(yardstick, timing) if timing and yardstick else None,
        share_of_sgemm=row.gflops / rate if row.gflops and rate else None,
        saved_bytes=saved,
        saved_ratio=saved / found.saved[YARDSTICK] if saved is not None and YARDSTICK in found.saved else None,
    )


def _sgemm_gflops(timings: Mapping[str, Timing]) -> float | None:
    best = timings[SGEMM].best if SGEMM in timings else None
    return 2 * SGEMM_SIZE**3 / best / 1e9 if best else None


def _result(found: _Found, notes: list[str]) -> Result:
    times = {name: one for name, one in found.timings.items() if name != SGEMM and one.median is not None}
    ours = [name for name in times if found.contenders[name].is_ours]
    fastest = min(ours, key=lambda name: times[name].median or 0.0, default=None)
    over = {name: slowdown(one, times[fastest]) for name, one in times.items()} if fastest else {}
    safety = slowdown(times[SAFE], times[UNSAFE]) if SAFE in times and UNSAFE in times else None
    rows = {name: _row(found, name) for name in found.errors}
    return Result(rows, _sgemm_gflops(found.timings), fastest, over, safety, notes)
