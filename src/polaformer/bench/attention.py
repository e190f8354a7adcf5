"""All attention mechanisms side by side: correctness first, then time and memory against the number of tokens.

What is compared is the registry of polaformer.attention: a mechanism is measured by being registered.

# B batch, H heads, N queries and keys, D head width
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polaformer.attention import create, facts
from polaformer.attention.core import Facts
from polaformer.bench.agreement import Inputs, Shape, differences, random_inputs, worst
from polaformer.bench.forecast import quickest
from polaformer.bench.length import slope
from polaformer.bench.measure import Ratio, Timing, measure, noise, ranks, slowdown, speedup_record
from polaformer.bench.memory import allocated_peak, available_bytes, saved_bytes
from polaformer.bench.passes import Pass

YARDSTICK = "softmax"
TOLERANCE = 1e-4  # of float32 against maps in float64; right ones stay near 1e-6, and iterated inverses lose a digit
SHORT = 257  # tokens that correctness is checked at: blocks, chunks and landmarks do not divide them
PROBES = (SHORT, 4 * SHORT)  # tokens that are tried first where the first length has more
# Options with which nobody sees all pairs at SHORT tokens. A mechanism that is not here is checked as it is timed alone.
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
DRAWS = 3  # of the check of a stochastic mechanism
USABLE = 0.8  # of the free memory: a forecast may be too low, and other programs grow too
FORWARD, BOTH, SAVED = "forward", "both", "saved"  # inference; forward and backward; what is kept between the two


@dataclass(frozen=True)
class Setup:
    """What is the same for all mechanisms and lengths; backward: forward and backward are timed instead of forward alone."""

    batch: int = 1
    num_heads: int = 4
    width: int = 32
    backward: bool = False
    rounds: int = 40
    seconds: float = 60.0  # for each length, and what a single call may take
    device: str = "cpu"

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
    """What was measured of one mechanism at one length; None where it is incorrect or was skipped."""

    timing: Timing | None = None
    speedup: Ratio | None = None  # over softmax at this length, from the rounds of the timing
    rank: tuple[int, int] | None = None  # the first and the last place that it may have at this length
    peaks: dict[str, int] = field(default_factory=dict)  # bytes, by FORWARD, BOTH and SAVED
    parameters: int | None = None  # bytes, in none of the peaks
    skipped: dict[str, str] = field(default_factory=dict)  # by FORWARD and BOTH: why it was not tried

    def as_record(self) -> dict[str, Any]:
        """For JSON."""
        times = None if self.timing is None else self.timing.as_record()
        ratio = speedup_record(self.speedup) | {"rank": self.rank}
        memory = {f"{kind}_bytes": self.peaks.get(kind) for kind in (FORWARD, BOTH, SAVED)}
        return {"time": times, **ratio, **memory, "parameter_bytes": self.parameters, "skipped": self.skipped}


@dataclass(frozen=True)
class Row:
    """What was measured of one mechanism."""

    facts: Facts
    error: float  # the worst relative difference from the truth, over the output and the gradients
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
        """For JSON."""
        slopes = {"time": self.slope} | {kind: self.memory_slope(kind) for kind in (FORWARD, BOTH, SAVED)}
        points = {str(n): point.as_record() for n, point in self.points.items()}
        return {
            "facts": self.facts._asdict(),
            "correct": self.correct,
            "error": self.error,
            "slopes": slopes,
            "lengths": points,
        }


def core_pass(core: nn.Module, inputs: Inputs, *, backward: bool) -> Pass:
    """One call of a core: forward in inference mode, or forward and the gradients of q, k, v and all parameters."""
    return Pass(lambda q, k, v, _: core(q, k, v), inputs, backward, tuple(core.parameters()))


def compare(
    lengths: Sequence[int], names: Sequence[str], setup: Setup, *, on_call: Callable[[str], None] | None = None
) -> dict[str, Row]:
    """A row of each mechanism, fastest first: correctness before anything else, then all of them in turns at each length.

    Lengths ascend. What would take longer than setup.seconds for one call, or more memory than is free, by how the mechanism
    grows from the length before, is skipped with the reason; so are all of a length that is too noisy. Softmax must be among
    the names for others to have a speedup.
    """
    tell = on_call or (lambda _: None)
    lengths = sorted(set(lengths))
    errors = {}
    for name in names:
        tell(f"checking {name}")
        errors[name] = correctness(name, setup, min(lengths[-1], SHORT))
    right = [name for name in names if errors[name] <= TOLERANCE]
    known: Known = {}
    allocated_peak(lambda: None)  # the profiler's first start takes seconds
    for probe in (n for n in PROBES if n < lengths[0]):  # so that the first length too has one before it
        _measure_memory(probe, right, setup, known, tell)
    found = {n: _measure(n, right, setup, known, tell) for n in lengths}
    rows = {name: Row(facts(name), errors[name], {n: found[n].get(name, Point()) for n in lengths}) for name in names}
    return {name: rows[name] for name in sorted(rows, key=lambda name: _slowness(rows[name]))}


def correctness(name: str, setup: Setup, length: int) -> float:
    """The worst relative error of output and gradients in float32 against the mechanism's own maps in float64, one sample.

    As it is timed, and with the options of SMALL. A stochastic mechanism gets the same draw in both precisions; where it draws
    what to look at, rounding may rarely choose otherwise, so that the middle one of several draws counts.
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
            out: Tensor = core(q, k, v)
        return out

    def truth(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        with seeded(seed, device):
            out: Tensor = exact.apply_maps(exact.weights(q, k), v)
        return out

    return worst(differences(found, truth, inputs))


@contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """Random numbers from a seed inside; afterwards the generator goes on as if nothing had been drawn."""
    with torch.random.fork_rng([torch.cuda.current_device()] if device == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _measure(length: int, names: Sequence[str], setup: Setup, known: "Known", tell: Callable[[str], None]) -> dict[str, Point]:
    """A point of each mechanism; adds to what is known of them."""
    points, cores = _measure_memory(length, names, setup, known, tell)
    # All cores are there now, each with its parameters: what had room alone may have none any more.
    tight = {name: too_large(points[name].peaks.get(setup.timed, 0), setup.device) for name in cores}
    points |= {name: replace(points[name], skipped={setup.timed: why}) for name, why in tight.items() if why is not None}
    inputs = random_inputs(setup.shape(length), device=setup.device)
    tried = [name for name in cores if setup.timed not in points[name].skipped]
    calls = {name: core_pass(cores[name], inputs, backward=setup.backward) for name in tried}
    settings: dict[str, Any] = {
        "rounds": setup.rounds,
        "seconds": setup.seconds,
        "on_call": lambda name: tell(_at(name, length)),
    }
    timings = measure(calls, baseline=YARDSTICK, **settings) if calls else {}
    refused, places = noise(timings, YARDSTICK), ranks(timings)
    for name, timing in timings.items():
        if timing.best is not None:
            known[name, setup.timed] = known[name, setup.timed]._replace(seconds=timing.best)
        if name in refused:
            points[name] = replace(points[name], skipped=points[name].skipped | {setup.timed: refused[name]})
        else:
            speedup = slowdown(timings[YARDSTICK], timing) if YARDSTICK in timings else None
            points[name] = replace(points[name], timing=timing, speedup=speedup, rank=places.get(name))
    return points


def _measure_memory(
    length: int, names: Sequence[str], setup: Setup, known: "Known", tell: Callable[[str], None]
) -> tuple[dict[str, Point], dict[str, nn.Module]]:
    """Points without times, and the cores of those that were tried; adds to what is known of them."""
    points, cores = {}, {}
    inputs = random_inputs(setup.shape(length), device=setup.device)
    for name in names:
        tell(f"memory: {_at(name, length)}")
        skipped = _skipped(name, length, setup, known)
        points[name] = Point(skipped=skipped)
        if FORWARD not in skipped:
            cores[name] = setup.core(name, length)
            weights = [*cores[name].parameters(), *cores[name].buffers()]
            held, peaks = sum(x.nbytes for x in weights), {}
            for kind in (kind for kind in (FORWARD, BOTH) if kind not in skipped):
                one = core_pass(cores[name], inputs, backward=kind == BOTH)
                peaks[kind], seconds = _peak_and_seconds(one, setup.device)
                known[name, kind] = Cost.after(known.get((name, kind)), length, seconds, peaks[kind] + held)
            if BOTH not in skipped:
                peaks[SAVED] = saved_bytes(one.recorded, apart_from=weights)
            points[name] = Point(peaks=peaks, parameters=held, skipped=skipped)
    return points, cores


def _skipped(name: str, length: int, setup: Setup, known: "Known") -> dict[str, str]:
    """Why FORWARD or BOTH are not tried; without the former there is no latter."""
    forward, both = (why_not(known.get((name, kind)), name, length, setup) for kind in (FORWARD, BOTH))
    reasons = {FORWARD: forward, BOTH: forward or both}
    return {kind: reason for kind, reason in reasons.items() if reason is not None}


def _peak_and_seconds(call: Pass, device: str) -> tuple[int, float]:
    start = time.perf_counter()
    peak = allocated_peak(call, device)
    taken = time.perf_counter() - start
    return peak, taken if taken > 1 else quickest(call, 0.1)  # the profiler's own time is nothing to a second


class Cost(NamedTuple):
    """Of one call at one length."""

    length: int
    seconds: float
    size: int  # bytes, those of the parameters among them
    exponent: float = 2.0  # with which size grew up to here: that of softmax grows less than its time does

    @classmethod
    def after(cls, before: "Cost | None", length: int, seconds: float, size: int) -> "Cost":
        """With the exponent since `before`, a shorter length."""
        if before is None:
            return cls(length, seconds, size)
        return cls(length, seconds, size, max(1.0, log(size / before.size) / log(length / before.length)))


Known = dict[tuple[str, str], Cost]  # by name and pass (FORWARD or BOTH): the longest that was measured


def why_not(before: Cost | None, name: str, length: int, setup: Setup) -> str | None:
    """Why a call at this length is not worth trying, from what a shorter one cost; None if it is, or if nothing is known."""
    if before is None:
        return None
    times = growth(facts(name).cost, before.length, length)
    size = min(times, (length / before.length) ** before.exponent) * before.size
    expected = times * before.seconds
    slow = f"would take about {_rounded(expected)} s" if expected > setup.seconds else None
    return too_large(round(size), setup.device) or slow


def growth(cost: str, few: int, many: int) -> float:
    """How many times more `many` tokens cost than `few`, for a cost of polaformer.attention.core.Facts."""
    times = many / few
    return {"linear": times, "n log n": times * log(max(many, 2)) / log(max(few, 2)), "quadratic": times**2}[cost]


def too_large(size: int, device: str) -> str | None:
    """Why so many bytes should not be asked for; None if they may."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_bytes()
    if free is None or size <= USABLE * free:
        return None
    return f"would need about {_rounded(size / 1e9)} GB, {_rounded(USABLE * free / 1e9)} GB may be used"


def _slowness(row: Row) -> list[tuple[bool, float]]:
    """To sort by: the time at the longest length over that of softmax; without one after all others, by the next shorter."""
    times = {n: 1 / point.speedup.median if point.speedup else row.medians[n] for n, point in row.points.items()}
    return [(not row.correct, 0.0), *((one is None, one or 0.0) for one in reversed(times.values()))]


def _at(name: str, length: int) -> str:
    return f"{name}, {length} tokens"


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
