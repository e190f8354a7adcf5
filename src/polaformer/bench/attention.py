"""All attention mechanisms side by side: correctness first, then time and memory against the number of tokens.

The registry of polaformer.attention is compared: a mechanism is measured by being registered.

# B batch, H heads, N queries and keys, D head width
"""

import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from math import log
from typing import Any

import torch
from torch import nn

from polaformer.analysis.agreement import CallInputs, Pass, differences, random_inputs, worst
from polaformer.analysis.call_memory import allocated_peak, saved_bytes
from polaformer.analysis.timing import quickest
from polaformer.attention import create, facts
from polaformer.bench.runner import BenchSettings, Cost, LengthCurve, Measurement, seeded, time_in_turns

BASELINE = "softmax"
TOLERANCE = 1e-4  # of float32 against maps in float64; correct ones stay near 1e-6, and iterated inverses lose a digit
SHORT = 257  # tokens at which correctness is checked: not a multiple of blocks, chunks and landmarks
PROBES = (SHORT, 4 * SHORT)  # tokens that are tried first if the first length has more
DRAWS = 3  # in the check of a stochastic mechanism
FORWARD, BOTH, SAVED = "forward", "both", "saved"  # inference; forward and backward; what is saved between the two
PASSES, KINDS = (FORWARD, BOTH), (FORWARD, BOTH, SAVED)  # of memory: peaks without the parameters, and bytes
Known = dict[tuple[str, str], Cost]  # by name and pass (FORWARD or BOTH): the longest that was measured
# The keys of the record's "facts", and the facts that they name.
FACTS = {name: name for name in ("cost", "approximates", "stochastic", "cross", "needs_length")} | {"together": "mixes_queries"}


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


def benchmark(lengths: Sequence[int], names: Sequence[str], settings: BenchSettings) -> dict[str, LengthCurve]:
    """A row for each mechanism, fastest first: check all of them, then measure them interleaved at each length, ascending.

    A mechanism that would take longer than settings.seconds for one call, or more memory than is free, judging by its growth
    since the previous length, is skipped with the reason; all are at a length whose timings are too noisy. Speedups need
    softmax among the names.
    """
    lengths, points = sorted(set(lengths)), {}
    for name in names:
        settings.on_call(f"checking {name}")
        points[name] = Measurement(relative_error(name, settings, min(lengths[-1], SHORT)), tolerances=(TOLERANCE, TOLERANCE))
    right = {name: point for name, point in points.items() if point.correct}
    known: Known = {}
    allocated_peak(lambda: None)  # the profiler's first start takes seconds
    for probe in (n for n in PROBES if n < lengths[0]):  # so that the first length has a previous one too
        _measure_memory(probe, right, settings, known)
    found = {n: points | _measure(n, right, settings, known) for n in lengths}
    rows = {name: LengthCurve({n: found[n][name] for n in lengths}, facts(name)) for name in names}
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


def _measure(length: int, blank: Mapping[str, Measurement], settings: BenchSettings, known: Known) -> dict[str, Measurement]:
    """The blank points with what is measured at this length; updates `known`."""
    timed, (points, passes) = PASSES[settings.backward], _measure_memory(length, blank, settings, known)
    for name in passes:
        # All cores exist now, each with its parameters: one that fitted alone may not fit any more.
        cost = Cost(length, 0, points[name].sizes[timed] or 0)
        points[name] = replace(points[name], skipped=cost.skip_reason(length, 1, settings))
    calls = {name: one for name, one in passes.items() if points[name].skipped is None}
    announced = replace(settings, on_call=lambda name: settings.on_call(f"{name}, {length} tokens"))
    points = time_in_turns({length: calls}, {length: points}, BASELINE, announced)[length]
    for name, point in points.items():
        if point.timing is not None and point.timing.best is not None:
            known[name, timed] = known[name, timed]._replace(seconds=point.timing.best)
        if point.skipped is not None:
            points[name] = replace(point, reasons={**point.reasons, timed: point.skipped})
    return points


def _measure_memory(
    length: int, blank: Mapping[str, Measurement], settings: BenchSettings, known: Known
) -> tuple[dict[str, Measurement], dict[str, Pass]]:
    """The blank points with their memory, and the passes to be timed of those that were tried; updates `known`."""
    points, passes, timed = {}, {}, PASSES[settings.backward]
    inputs = random_inputs(settings.shape(length), device=settings.device)
    for name, point in blank.items():
        settings.on_call(f"memory: {name}, {length} tokens")
        foretold = {kind: forecast(known.get((name, kind)), name, length, settings) for kind in PASSES}
        foretold[BOTH] = foretold[FORWARD] or foretold[BOTH]  # no backward without forward
        reasons = {kind: reason for kind, reason in foretold.items() if reason is not None}
        points[name] = replace(point, reasons=reasons, skipped=reasons.get(timed))
        if FORWARD in reasons:
            continue
        core = build(name, length, settings)
        weights = [*core.parameters(), *core.buffers()]
        sizes = {"parameter": sum(x.nbytes for x in weights)}
        tried = {kind: core_pass(core, inputs, backward=kind == BOTH) for kind in PASSES if kind not in reasons}
        for kind, one in tried.items():
            start = time.perf_counter()
            sizes[kind] = allocated_peak(one, settings.device)
            taken = time.perf_counter() - start
            seconds = taken if taken > 1 else quickest(one, 0.1)  # beyond a second the profiler's overhead is negligible
            known[name, kind] = Cost.after(known.get((name, kind)), length, seconds, sizes[kind] + sizes["parameter"])
        if BOTH in tried:
            sizes[SAVED] = saved_bytes(tried[BOTH].recorded, apart_from=weights)
        if timed in tried:
            passes[name] = tried[timed]
        points[name] = replace(points[name], sizes=sizes)
    return points, passes


def forecast(before: Cost | None, name: str, length: int, settings: BenchSettings) -> str | None:
    """Why a call at this length is not worth trying, from the cost of a shorter one; None if it is, or if none is known."""
    return before and before.skip_reason(length, growth(facts(name).cost, before.length, length), settings)


def growth(cost: str, few: int, many: int) -> float:
    """How many times more `many` tokens cost than `few`, for a cost of polaformer.attention.core.Facts."""
    times = many / few
    return {"linear": times, "n log n": times * log(max(many, 2)) / log(max(few, 2)), "quadratic": times**2}[cost]


def as_record(curve: LengthCurve) -> dict[str, Any]:
    """The curve for JSON."""
    points = {}
    for n, point in curve.points.items():
        sizes = {f"{kind}_bytes": point.sizes.get(kind) for kind in (*KINDS, "parameter")}
        time = point.timing and point.timing.as_record()
        points[str(n)] = {"time": time, **point.as_record("speedup", "rank"), **sizes, "skipped": point.reasons}
    known = {name: getattr(curve.facts, fact) for name, fact in FACTS.items()}
    slopes = {"time": curve.slope()} | {kind: curve.slope(kind) for kind in KINDS}
    return {"facts": known, "correct": curve.correct, "error": curve.error, "slopes": slopes, "lengths": points}


def _slowness(row: LengthCurve) -> list[tuple[bool, float]]:
    """Sort key: the time at the longest length relative to softmax; rows without one come last, by the next shorter length."""
    times = {n: 1 / point.speedup.median if point.speedup else point.median for n, point in row.points.items()}
    return [(not row.correct, 0.0), *((one is None, one or 0.0) for one in reversed(times.values()))]
