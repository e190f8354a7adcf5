"""All attention mechanisms side by side: correctness first, then time and memory against the number of tokens.

The registry of polaformer.attention is compared: a mechanism is measured by being registered.

# B batch, H heads, N queries and keys, D head width
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polaformer.attention import create, facts
from polaformer.attention.core import Facts
from polaformer.bench import runner
from polaformer.bench.agreement import Inputs, Pass, Shape, differences, random_inputs, worst
from polaformer.bench.length import slope
from polaformer.bench.measure import Ratio, Timing, speedup_record
from polaformer.bench.memory import allocated_peak, saved_bytes
from polaformer.bench.runner import Settings

YARDSTICK = "softmax"
TOLERANCE = 1e-4  # of float32 against maps in float64; correct ones stay near 1e-6, and iterated inverses lose a digit
SHORT = 257  # tokens at which correctness is checked: not a multiple of blocks, chunks and landmarks
PROBES = (SHORT, 4 * SHORT)  # tokens that are tried first if the first length has more
# Options with which no mechanism sees all pairs at SHORT tokens. Others are checked only with the options they are timed with.
SMALL: dict[str, dict[str, Any]] = {
    "bigbird": {"block": 16},
    "informer": {"factor": 2},
    "linformer": {"rank": 16},
    "local": {"block": 16},
    "longformer": {"window": 32},
    "nystrom": {"num_landmarks": 16},
    "performer": {"num_features": 16},
    "reformer": {"chunk": 16},
    "skyformer": {"num_landmarks": 16},
}
DRAWS = 3  # in the check of a stochastic mechanism
USABLE = 0.8  # of the free memory: a forecast may be too low, and other programs grow too
FORWARD, BOTH, SAVED = "forward", "both", "saved"  # inference; forward and backward; what is saved between the two


@dataclass(frozen=True)
class Setup(Settings):
    """What all mechanisms and lengths share."""

    rounds: int = 40
    seconds: float = 60.0
    batch: int = 1
    num_heads: int = 4
    width: int = 32

    @property
    def timed(self) -> str:
        """Which of the two passes is timed."""
        return BOTH if self.backward else FORWARD

    def shape(self, length: int) -> Shape:
        """(B, H, N, D)."""
        return self.batch, self.num_heads, length, self.width

    def core(self, name: str, length: int, **options: Any) -> nn.Module:
        """The mechanism in evaluation mode, with the same parameters in every run."""
        sized = {"max_length": length} if facts(name).needs_length else {}
        with seeded(0, self.device):
            core = create(name, num_heads=self.num_heads, head_dim=self.width, **sized, **options)
        assert isinstance(core, nn.Module)
        return core.eval().to(self.device)


@dataclass(frozen=True)
class Point:
    """What was measured of one mechanism at one length; None if it is incorrect or was skipped."""

    timing: Timing | None = None
    speedup: Ratio | None = None  # over softmax at this length, from the rounds of the timing
    rank: tuple[int, int] | None = None  # the best and the worst place it may have at this length
    peaks: dict[str, int] = field(default_factory=dict)  # bytes, by FORWARD, BOTH and SAVED
    parameters: int | None = None  # bytes, not included in the peaks
    skipped: dict[str, str] = field(default_factory=dict)  # by FORWARD and BOTH: why it was not tried

    def as_record(self) -> dict[str, Any]:
        """The point for JSON."""
        times = None if self.timing is None else self.timing.as_record()
        ratio = speedup_record(self.speedup) | {"rank": self.rank}
        memory = {f"{kind}_bytes": self.peaks.get(kind) for kind in (FORWARD, BOTH, SAVED)}
        return {"time": times, **ratio, **memory, "parameter_bytes": self.parameters, "skipped": self.skipped}


@dataclass(frozen=True)
class Row:
    """What was measured of one mechanism."""

    facts: Facts
    error: float  # the worst relative difference from the reference, over the output and the gradients
    points: dict[int, Point]  # by length, ascending

    @property
    def correct(self) -> bool:
        """Whether it computes what its maps say."""
        return self.error <= TOLERANCE  # an error of NaN does not pass

    @property
    def medians(self) -> dict[int, float | None]:
        """Seconds at each length."""
        return {n: None if point.timing is None else point.timing.median for n, point in self.points.items()}

    def peaks(self, kind: str) -> dict[int, int | None]:
        """Bytes at each length; kind is FORWARD, BOTH or SAVED."""
        return {n: point.peaks.get(kind) for n, point in self.points.items()}

    @property
    def slope(self) -> float | None:
        """The exponent with which time grows."""
        return slope(list(self.points), list(self.medians.values()))

    def memory_slope(self, kind: str) -> float | None:
        """The exponent with which memory grows."""
        return slope(list(self.points), [peak or None for peak in self.peaks(kind).values()])

    def as_record(self) -> dict[str, Any]:
        """The row for JSON."""
        slopes = {"time": self.slope} | {kind: self.memory_slope(kind) for kind in (FORWARD, BOTH, SAVED)}
        points = {str(n): point.as_record() for n, point in self.points.items()}
        found = {"correct": self.correct, "error": self.error, "slopes": slopes, "lengths": points}
        return {"facts": self.facts._asdict(), **found}


def core_pass(core: nn.Module, inputs: Inputs, *, backward: bool) -> Pass:
    """One call of a core: forward in inference mode, or forward and the gradients of q, k, v and all parameters."""
    return Pass(lambda q, k, v, _: core(q, k, v), inputs, backward, tuple(core.parameters()))


def compare(lengths: Sequence[int], names: Sequence[str], setup: Setup) -> dict[str, Row]:
    """A row for each mechanism, fastest first: check all of them, then measure them in turns at each length, ascending.

    A mechanism that would take longer than setup.seconds for one call, or more memory than is free, judging by its growth from
    the previous length, is skipped with the reason; all are at a length whose timings are too noisy. Speedups need softmax
    among the names.
    """
    lengths = sorted(set(lengths))
    errors = {}
    for name in names:
        setup.on_call(f"checking {name}")
        errors[name] = correctness(name, setup, min(lengths[-1], SHORT))
    right = [name for name in names if errors[name] <= TOLERANCE]
    known: Known = {}
    allocated_peak(lambda: None)  # the profiler's first start takes seconds
    for probe in (n for n in PROBES if n < lengths[0]):  # so that the first length has a previous one too
        _measure_memory(probe, right, setup, known)
    found = {n: _measure(n, right, setup, known) for n in lengths}
    rows = {name: Row(facts(name), errors[name], {n: found[n].get(name, Point()) for n in lengths}) for name in names}
    return {name: rows[name] for name in sorted(rows, key=lambda name: _slowness(rows[name]))}


def correctness(name: str, setup: Setup, length: int) -> float:
    """The worst relative error of output and gradients in float32 against the mechanism's own maps in float64, batch 1.

    It is checked with the options it is timed with, and with those of SMALL. A stochastic mechanism gets the same draw in both
    precisions. If it draws what to attend to, rounding may occasionally choose differently: the median of several draws counts.
    """
    inputs = random_inputs((1, *setup.shape(length)[1:]), device=setup.device)
    cores = [setup.core(name, length, **options) for options in ({}, SMALL.get(name)) if options is not None]
    draws = range(DRAWS if facts(name).stochastic else 1)
    errors = [[_error(core, inputs, seed, setup.device) for seed in draws] for core in cores]
    return float(torch.tensor(errors).median(dim=1).values.max())  # NaN wins in both


def _error(core: nn.Module, inputs: Inputs, seed: int, device: str) -> float:
    exact: Any = deepcopy(core).double()

    def found(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        with seeded(seed, device):
            return core(q, k, v)

    def expected(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        with seeded(seed, device):
            return exact.apply_maps(exact.weights(q, k), v)

    return worst(differences(found, expected, inputs))


@contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """Random numbers from a seed inside; afterwards the generator continues as if nothing had been drawn."""
    with torch.random.fork_rng([torch.cuda.current_device()] if device == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _measure(length: int, names: Sequence[str], setup: Setup, known: "Known") -> dict[str, Point]:
    """A point for each mechanism; updates `known`."""
    points, cores = _measure_memory(length, names, setup, known)
    # All cores exist now, each with its parameters: one that fitted alone may not fit any more.
    for name in cores:
        reason = runner.skip_reason(points[name].peaks.get(setup.timed, 0), 0, setup, USABLE)
        points[name] = replace(points[name], skipped={setup.timed: reason}) if reason else points[name]
    inputs = random_inputs(setup.shape(length), device=setup.device)
    tried = [name for name in cores if setup.timed not in points[name].skipped]
    calls = {name: core_pass(cores[name], inputs, backward=setup.backward) for name in tried}
    announced = replace(setup, on_call=lambda name: setup.on_call(f"{name}, {length} tokens"))
    found = runner.time_in_turns(calls, YARDSTICK, announced)
    for name, (timing, speedup, rank, reason) in found.items():
        if timing is not None and timing.best is not None:
            known[name, setup.timed] = known[name, setup.timed]._replace(seconds=timing.best)
        skipped = points[name].skipped | ({setup.timed: reason} if reason else {})
        points[name] = replace(points[name], timing=timing, speedup=speedup, rank=rank, skipped=skipped)
    return points


def _measure_memory(
    length: int, names: Sequence[str], setup: Setup, known: "Known"
) -> tuple[dict[str, Point], dict[str, nn.Module]]:
    """Points without times, and the cores of those that were tried; updates `known`."""
    points, cores = {}, {}
    inputs = random_inputs(setup.shape(length), device=setup.device)
    for name in names:
        setup.on_call(f"memory: {name}, {length} tokens")
        reasons = {kind: skip_reason(known.get((name, kind)), name, length, setup) for kind in (FORWARD, BOTH)}
        reasons[BOTH] = reasons[FORWARD] or reasons[BOTH]  # no backward without forward
        skipped = {kind: reason for kind, reason in reasons.items() if reason is not None}
        points[name] = Point(skipped=skipped)
        if FORWARD in skipped:
            continue
        cores[name] = setup.core(name, length)
        weights, peaks = [*cores[name].parameters(), *cores[name].buffers()], {}
        held = sum(x.nbytes for x in weights)
        for kind in (kind for kind in (FORWARD, BOTH) if kind not in skipped):
            one = core_pass(cores[name], inputs, backward=kind == BOTH)
            peaks[kind], seconds = _peak_and_seconds(one, setup.device)
            known[name, kind] = Cost.after(known.get((name, kind)), length, seconds, peaks[kind] + held)
        if BOTH not in skipped:
            peaks[SAVED] = saved_bytes(one.recorded, apart_from=weights)
        points[name] = Point(peaks=peaks, parameters=held, skipped=skipped)
    return points, cores


def _peak_and_seconds(call: Pass, device: str) -> tuple[int, float]:
    start = time.perf_counter()
    peak = allocated_peak(call, device)
    taken = time.perf_counter() - start
    return peak, taken if taken > 1 else runner.quickest(call, 0.1)  # beyond a second the profiler's overhead is negligible


class Cost(NamedTuple):
    """The cost of one call at one length."""

    length: int
    seconds: float
    size: int  # bytes, parameters included
    exponent: float = 2.0  # with which size grew up to here: that of softmax grows less than its time does

    @classmethod
    def after(cls, before: "Cost | None", length: int, seconds: float, size: int) -> "Cost":
        """With the exponent since `before`, a shorter length."""
        if before is None:
            return cls(length, seconds, size)
        return cls(length, seconds, size, max(1.0, log(size / before.size) / log(length / before.length)))


Known = dict[tuple[str, str], Cost]  # by name and pass (FORWARD or BOTH): the longest that was measured


def skip_reason(before: Cost | None, name: str, length: int, setup: Setup) -> str | None:
    """Why a call at this length is not worth trying, from the cost of a shorter one; None if it is, or if none is known."""
    if before is None:
        return None
    times = growth(facts(name).cost, before.length, length)
    size = round(min(times, (length / before.length) ** before.exponent) * before.size)
    return runner.skip_reason(size, times * before.seconds, setup, USABLE)


def growth(cost: str, few: int, many: int) -> float:
    """How many times more `many` tokens cost than `few`, for a cost of polaformer.attention.core.Facts."""
    times = many / few
    return {"linear": times, "n log n": times * log(max(many, 2)) / log(max(few, 2)), "quadratic": times**2}[cost]


def _slowness(row: Row) -> list[tuple[bool, float]]:
    """Sort key: the time at the longest length relative to softmax; rows without one come last, by the next shorter length."""
    times = {n: 1 / point.speedup.median if point.speedup else row.medians[n] for n, point in row.points.items()}
    return [(not row.correct, 0.0), *((one is None, one or 0.0) for one in reversed(times.values()))]
