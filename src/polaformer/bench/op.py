"""The operator on each backend against its published form, linear attention and softmax, in one run.

What is compared is defined in polaformer.bench.contenders.

# B batch, H heads, N queries and keys, D head width
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from polaformer.bench.agreement import Pass, Shape, largest, random_inputs
from polaformer.bench.contenders import SAFE, UNSAFE, YARDSTICK, Contender, working
from polaformer.bench.correctness import correctness, correctness_at_length, cut
from polaformer.bench.measure import Ratio, Timing, slowdown, speedup_record
from polaformer.bench.memory import allocated_peak, saved_bytes
from polaformer.bench.runner import Settings, Timed, quickest, skip_reason, time_in_turns

TOLERANCE = 1e-5  # of fp32 against float64; a correct implementation stays near 1e-6
SGEMM, SGEMM_SIZE = "sgemm", 2048
LEAST_FLOPS = 10**8  # per call: below it the cost of calls dominates, and a share of sgemm's rate means nothing
DEFAULTS = Settings()
BACKWARD = 3  # forward and backward take this many times the matmuls of forward; recomputation is not counted


@dataclass(frozen=True)
class Row:
    """What was measured of one contender at one shape."""

    error: float  # the worst relative difference from the reference, over the output and all gradients
    timing: Timing | None = None  # None if the error was too large or the contender was skipped
    speedup: Ratio | None = None  # over the published form, from the rounds of the timing
    skipped: str | None = None  # why it was not timed although it is correct
    flops: int | None = None  # of one call, matmuls alone
    share_of_sgemm: float | None = None  # of the rate of a large matmul timed in the same rounds; best by best
    saved_bytes: int | None = None  # for the backward pass
    saved_ratio: float | None = None  # … relative to the published form

    @property
    def correct(self) -> bool:
        """Whether it computes what it should."""
        return self.error <= TOLERANCE  # an error of NaN does not pass

    @property
    def gflops(self) -> float | None:
        """Billions of operations per second, at best."""
        return _gflops(self.flops, self.timing)

    def as_record(self) -> dict[str, Any]:
        """The row for JSON."""
        record: dict[str, Any] = {"correct": self.correct, "error": self.error} | speedup_record(self.speedup)
        record |= {} if self.timing is None else self.timing.as_record()
        record |= {"skipped": self.skipped, "gflops": self.gflops, "share_of_sgemm": self.share_of_sgemm}
        return record | {"saved_bytes": self.saved_bytes, "saved_ratio": self.saved_ratio}


class Result(NamedTuple):
    """Everything measured at one shape."""

    rows: dict[str, Row]
    sgemm_gflops: float | None  # at best
    fastest: str | None  # of ours
    fastest_over: dict[str, Ratio | None]  # how many times longer each of the others takes than our fastest
    safe_over_unsafe: Ratio | None  # what safety costs: time with the shifts over time without them
    notes: list[str]

    def as_record(self) -> dict[str, Any]:
        """The result for JSON."""
        over = {name: ratio and ratio.median for name, ratio in self.fastest_over.items()}
        ratios = {"fastest_over": over, "safe_over_unsafe": self.safe_over_unsafe and self.safe_over_unsafe.median}
        return self._asdict() | ratios | {"rows": {name: row.as_record() for name, row in self.rows.items()}}


class Prepared(NamedTuple):
    """Contenders after the checks and forecasts: what may be timed, and why the others may not."""

    errors: dict[str, float]  # by name; without those that could not be compiled
    skipped: dict[tuple[str, Shape], str]
    passes: dict[tuple[str, Shape], Pass]
    notes: list[str]


def benchmark(shape: Shape, contenders: Mapping[str, Contender] | None = None, settings: Settings = DEFAULTS) -> Result:
    """Check all contenders, then time the correct ones in turns.

    With the backward pass, also count the bytes saved for it. A contender that would take longer than settings.seconds for one
    call, or more memory than is free, is skipped with the reason; all are if the timings are too noisy.
    """
    backward, device = settings.backward, settings.device
    contenders = working(device, backward=backward)[0] if contenders is None else contenders
    ready = prepare(contenders, [shape], settings)
    passes = {name: one for (name, _), one in ready.passes.items()}
    saved = {name: saved_bytes(one.recorded) for name, one in passes.items()} if backward else {}
    flops = {name: (BACKWARD if backward else 1) * one.flops(shape) for name, one in contenders.items()}
    calls: dict[str, Callable[[], object]] = dict(passes)
    if passes and max(flops.values()) >= LEAST_FLOPS:
        left, right = (torch.ones(SGEMM_SIZE, SGEMM_SIZE, device=device) for _ in range(2))
        calls[SGEMM] = lambda: left @ right
    found = time_in_turns(calls, YARDSTICK, settings)
    rate = _gflops(2 * SGEMM_SIZE**3, found.pop(SGEMM, Timed()).timing)
    rows = {}
    for name, error in ready.errors.items():
        one = found.get(name, Timed(skipped=ready.skipped.get((name, shape))))
        gflops = _gflops(flops[name], one.timing)
        share = gflops / rate if gflops and rate else None
        ratio = saved[name] / saved[YARDSTICK] if name in saved and YARDSTICK in saved else None
        rows[name] = Row(error, one.timing, one.speedup, one.skipped, flops[name], share, saved.get(name), ratio)
    times = {name: row.timing for name, row in rows.items() if row.timing is not None and row.timing.samples}
    ours = [name for name in times if contenders[name].is_ours]
    fastest = min(ours, key=lambda name: times[name].median or 0.0, default=None)
    over = {name: slowdown(one, times[fastest]) for name, one in times.items()} if fastest else {}
    safety = slowdown(times[SAFE], times[UNSAFE]) if SAFE in times and UNSAFE in times else None
    return Result(rows, rate, fastest, over, safety, ready.notes)


def prepare(contenders: Mapping[str, Contender], shapes: Sequence[Shape], settings: Settings) -> Prepared:
    """Check the contenders at all shapes, forecast what is worth trying, and compile and check again what will be timed."""
    ready = Prepared({}, {}, {}, [])
    errors, checked = ready.errors, {cut(shape) for shape in shapes}
    for name, contender in contenders.items():
        settings.on_call(f"checking {name}")
        try:
            errors[name] = largest(*(correctness(contender, shape, settings.device) for shape in checked))
        except RuntimeError as error:
            if not contender.is_compiled:
                raise
            ready.notes.append(cannot_compile(name, error))
    right = {name: contenders[name] for name, error in errors.items() if error <= TOLERANCE}
    for shape in shapes:
        inputs, reasons = random_inputs(shape, device=settings.device), skip_reasons(right, shape, settings)
        ready.skipped.update({(name, shape): reason for name, reason in reasons.items()})
        for name in [name for name in right if name in errors and name not in reasons]:
            one = Pass(right[name].build(shape), inputs, settings.backward)
            try:
                if right[name].is_compiled:
                    one()
            except RuntimeError as error:
                ready.notes.append(cannot_compile(name, error))
                del errors[name]
            else:
                ready.passes[name, shape] = one
                errors[name] = largest(errors[name], correctness_at_length(right[name], one))
    correct = {key: one for key, one in ready.passes.items() if errors.get(key[0], float("nan")) <= TOLERANCE}
    return ready._replace(passes=correct)


def cannot_compile(name: str, error: RuntimeError) -> str:
    """What went wrong, in one line."""
    return f"{name} is left out: it could not be compiled ({type(error).__name__}: {str(error).splitlines()[0]})"


def skip_reasons(contenders: Mapping[str, Contender], shape: Shape, settings: Settings) -> dict[str, str]:
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
    found |= {name: found.get(YARDSTICK) for name, one in contenders.items() if one.is_compiled}
    return {name: reason for name, reason in found.items() if reason is not None}


def _gflops(flops: int | None, timing: Timing | None) -> float | None:
    best = None if timing is None else timing.best
    return None if best is None or flops is None else flops / best / 1e9
