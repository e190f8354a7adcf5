"""All attention mechanisms side by side: correctness first, then time and memory against the number of tokens.

The registry of polaformer.attention is compared: a mechanism is measured by being registered.

# B batch, H heads, N queries and keys, D head width
"""

import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import log
from typing import Any

import torch
from torch import nn

from polaformer.analysis.agreement import CallInputs, Pass, differences, random_inputs, worst
from polaformer.analysis.call_memory import allocated_peak, saved_bytes
from polaformer.analysis.timing import quickest
from polaformer.attention import create, facts
from polaformer.attention.core import Facts
from polaformer.bench.runner import BenchSettings, Cost, LengthCurve, Measurement, seeded, time_in_turns

BASELINE = "softmax"
TOLERANCE = 1e-4  # of float32 against maps in float64; correct ones stay near 1e-6, and iterated inverses lose a digit
SHORT = 257  # tokens at which correctness is checked: not a multiple of blocks, chunks and landmarks
PROBES = (SHORT, 4 * SHORT)  # tokens that are tried first if the first length has more
DRAWS = 3  # in the check of a stochastic mechanism
USABLE = 0.8  # of the free memory: a forecast may be too low, and other programs grow too
FORWARD, BOTH, SAVED = "forward", "both", "saved"  # inference; forward and backward; what is saved between the two
PASSES, KINDS = (FORWARD, BOTH), (FORWARD, BOTH, SAVED)  # of memory
Known = dict[tuple[str, str], Cost]  # by name and pass (FORWARD or BOTH): the longest that was measured
# The keys of the record's "facts", and the facts that they name.
FACTS = {name: name for name in ("cost", "approximates", "stochastic", "cross", "needs_length")} | {"together": "mixes_queries"}


@dataclass(frozen=True)
class MechanismMeasurement(Measurement):
    """What was measured of one mechanism at one length; the baseline is softmax."""

    timed: str = FORWARD  # which pass the timing is of
    forward_bytes: int | None = None  # peaks, without the parameters
    both_bytes: int | None = None
    parameter_bytes: int | None = None
    untried: dict[str, str] = field(default_factory=dict)  # by FORWARD and BOTH: why its memory was not measured
    tolerance = TOLERANCE
    keys = ("speedup", "rank", "forward_bytes", "both_bytes", "saved_bytes", "parameter_bytes")

    @property
    def reasons(self) -> dict[str, str]:
        """Why there is no number, by FORWARD and BOTH."""
        return self.untried | ({self.timed: self.skipped} if self.skipped else {})

    def as_record(self) -> dict[str, Any]:
        """The point for JSON."""
        record = super().as_record()
        return {"time": self.timing and self.timing.as_record(), **record, "skipped": self.reasons}


@dataclass(frozen=True)
class MechanismCurve(LengthCurve):
    """What was measured of one mechanism."""

    points: Mapping[int, MechanismMeasurement]
    facts: Facts

    def as_record(self) -> dict[str, Any]:
        """The row for JSON."""
        slopes = {"time": self.slope()} | {kind: self.slope(f"{kind}_bytes") for kind in KINDS}
        points = {str(n): point.as_record() for n, point in self.points.items()}
        found = {"correct": self.correct, "error": self.error, "slopes": slopes, "lengths": points}
        known = {name: getattr(self.facts, fact) for name, fact in FACTS.items()}
        return {"facts": known, **found}


def build(name: str, length: int, settings: BenchSettings, **options: Any) -> nn.Module:
    """The mechanism in evaluation mode, with the same parameters in every run."""
    sized = {"max_length": length} if facts(name).needs_length else {}
    with seeded(0, settings.device):
        core = create(name, num_heads=settings.num_heads, head_dim=settings.width, **sized, **options)
    assert isinstance(core, nn.Module)
    return core.eval().to(settings.device)


def core_pass(core: nn.Module, inputs: CallInputs, *, backward: bool) -> Pass:
    """One call of a core: forward in inference mode, or forward and the gradients of q, k, v and all parameters."""
    return Pass(lambda q, k, v, _: core(q, k, v), inputs, backward, tuple(core.parameters()))


def benchmark(lengths: Sequence[int], names: Sequence[str], settings: BenchSettings) -> dict[str, MechanismCurve]:
    """A row for each mechanism, fastest first: check all of them, then measure them interleaved at each length, ascending.

    A mechanism that would take longer than settings.seconds for one call, or more memory than is free, judging by its growth
    since the previous length, is skipped with the reason; all are at a length whose timings are too noisy. Speedups need
    softmax among the names.
    """
    lengths, points = sorted(set(lengths)), {}
    for name in names:
        settings.on_call(f"checking {name}")
        points[name] = MechanismMeasurement(
            relative_error(name, settings, min(lengths[-1], SHORT)), timed=PASSES[settings.backward]
        )
    right = {name: point for name, point in points.items() if point.correct}
    known: Known = {}
    allocated_peak(lambda: None)  # the profiler's first start takes seconds
    for probe in (n for n in PROBES if n < lengths[0]):  # so that the first length has a previous one too
        _measure_memory(probe, right, settings, known)
    found = {n: points | _measure(n, right, settings, known) for n in lengths}
    rows = {name: MechanismCurve({n: found[n][name] for n in lengths}, facts(name)) for name in names}
    return {name: rows[name] for name in sorted(rows, key=lambda name: _slowness(rows[name]))}


def relative_error(name: str, settings: BenchSettings, length: int) -> float:
    """The worst relative error of output and gradients in float32 against the mechanism's own maps in float64, batch 1.

    It is checked with the options it is timed with, and with its coarse ones. A stochastic mechanism gets the same draw in both
    precisions. If it draws what to attend to, rounding may occasionally choose differently: the median of several draws counts.
    """
    inputs = random_inputs((1, *settings.shape(length)[1:]), device=settings.device)
    cores = [build(name, length, settings, **dict(options)) for options in dict.fromkeys(((), facts(name).coarse))]
    draws = range(DRAWS if facts(name).stochastic else 1)

    def error(core: nn.Module, seed: int) -> float:
        exact: Any = deepcopy(core).double()
        same_draw = seeded(seed, settings.device)
        found = same_draw(lambda q, k, v, _: core(q, k, v))
        expected = same_draw(lambda q, k, v, _: exact.apply_maps(exact.weights(q, k), v))
        return worst(differences(found, expected, inputs))

    errors = torch.tensor([[error(core, seed) for seed in draws] for core in cores])
    return float(errors.median(dim=1).values.max())  # NaN wins in both


def _measure(
    length: int, blank: Mapping[str, MechanismMeasurement], settings: BenchSettings, known: Known
) -> dict[str, MechanismMeasurement]:
    """The blank points with what is measured at this length; updates `known`."""
    timed, (points, passes) = PASSES[settings.backward], _measure_memory(length, blank, settings, known)
    for name in passes:
        # All cores exist now, each with its parameters: one that fitted alone may not fit any more.
        cost = Cost(length, 0, getattr(points[name], f"{timed}_bytes"))
        points[name] = replace(points[name], skipped=cost.skip_reason(length, 1, settings, USABLE))
    calls = {name: one for name, one in passes.items() if points[name].skipped is None}
    announced = replace(settings, on_call=lambda name: settings.on_call(f"{name}, {length} tokens"))
    points = time_in_turns({length: calls}, {length: points}, BASELINE, announced)[length]
    for name, point in points.items():
        if point.timing is not None and point.timing.best is not None:
            known[name, timed] = known[name, timed]._replace(seconds=point.timing.best)
    return points


def _measure_memory(
    length: int, blank: Mapping[str, MechanismMeasurement], settings: BenchSettings, known: Known
) -> tuple[dict[str, MechanismMeasurement], dict[str, Pass]]:
    """The blank points with their memory, and the passes to be timed of those that were tried; updates `known`."""
    points, passes = {}, {}
    inputs = random_inputs(settings.shape(length), device=settings.device)
    for name, point in blank.items():
        settings.on_call(f"memory: {name}, {length} tokens")
        reasons = {kind: forecast(known.get((name, kind)), name, length, settings) for kind in PASSES}
        reasons[BOTH] = reasons[FORWARD] or reasons[BOTH]  # no backward without forward
        untried = {kind: reason for kind, reason in reasons.items() if reason is not None}
        points[name] = replace(point, untried=untried, skipped=untried.get(point.timed))
        if FORWARD in untried:
            continue
        core = build(name, length, settings)
        weights, found = [*core.parameters(), *core.buffers()], dict[str, Any]()
        held = found["parameter_bytes"] = sum(x.nbytes for x in weights)
        tried = {kind: core_pass(core, inputs, backward=kind == BOTH) for kind in PASSES if kind not in untried}
        for kind, one in tried.items():
            start = time.perf_counter()
            peak = found[f"{kind}_bytes"] = allocated_peak(one, settings.device)
            taken = time.perf_counter() - start
            seconds = taken if taken > 1 else quickest(one, 0.1)  # beyond a second the profiler's overhead is negligible
            known[name, kind] = Cost.after(known.get((name, kind)), length, seconds, peak + held)
        if BOTH in tried:
            found["saved_bytes"] = saved_bytes(tried[BOTH].recorded, apart_from=weights)
        if point.timed in tried:
            passes[name] = tried[point.timed]
        points[name] = replace(points[name], **found)
    return points, passes


def forecast(before: Cost | None, name: str, length: int, settings: BenchSettings) -> str | None:
    """Why a call at this length is not worth trying, from the cost of a shorter one; None if it is, or if none is known."""
    return before and before.skip_reason(length, growth(facts(name).cost, before.length, length), settings, USABLE)


def growth(cost: str, few: int, many: int) -> float:
    """How many times more `many` tokens cost than `few`, for a cost of polaformer.attention.core.Facts."""
    times = many / few
    return {"linear": times, "n log n": times * log(max(many, 2)) / log(max(few, 2)), "quadratic": times**2}[cost]


def _slowness(row: MechanismCurve) -> list[tuple[bool, float]]:
    """Sort key: the time at the longest length relative to softmax; rows without one come last, by the next shorter length."""
    times = {n: 1 / point.speedup.median if point.speedup else point.median for n, point in row.points.items()}
    return [(not row.correct, 0.0), *((one is None, one or 0.0) for one in reversed(times.values()))]
