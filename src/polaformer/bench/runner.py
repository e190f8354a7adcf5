"""What all benchmarks share: settings, measurements, the forecast whether a call is worth trying, and interleaved timing.

Each benchmark is a function `benchmark` in a file of its own, with the same steps: check that the candidates are correct,
forecast which are worth trying, time or measure those, and record the numbers or why there are none.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log, log2
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from polaformer.analysis.agreement import Shape
from polaformer.analysis.machine import available_bytes
from polaformer.analysis.timing import MIN_ROUNDS, Ratio, Timing, measure, slope, slowdown
from polaformer.bench.correctness import TOLERANCE

MAX_NOISY = 0.25  # share of the rows whose interval may be wider than analysis.timing.MAX_SPREAD
TOO_NOISY = "too noisy"


@dataclass(frozen=True)
class BenchSettings:
    """How a benchmark measures."""

    backward: bool = False  # forward and backward together, as in a training step, instead of forward alone
    rounds: int = 15  # at most, for each call
    seconds: float = 10.0  # per size, and the longest that a single call may take
    device: str = "cpu"
    threads: int | None = None  # of processes that are started; this one's are set by the caller
    batch: int = 1  # these three at all lengths; of models, the batch at all image sizes
    num_heads: int = 4
    width: int = 32
    on_call: Callable[[str], None] = lambda _: None  # gets the name of each call before it starts, for progress bars

    def shape(self, length: int) -> Shape:
        """(B, H, N, D)."""
        return self.batch, self.num_heads, length, self.width


@dataclass(frozen=True)
class Measurement:
    """What was measured of one candidate at one size."""

    error: float | None = None  # the worst relative difference from the reference; None if there is none to compare with
    timing: Timing | None = None  # None if it is incorrect or was skipped
    speedup: Ratio | None = None  # over the baseline, from the rounds of the timing
    rank: tuple[int, int] | None = None  # the best and the worst place it may have
    skipped: str | None = None  # why it has no time although it is correct
    saved_bytes: int | None = None  # for the backward pass
    saved_ratio: float | None = None  # … relative to the baseline
    tolerance: ClassVar[float] = TOLERANCE
    keys: ClassVar[Sequence[str]] = ()  # of the record; "speedup" includes its interval, "timing" what it consists of

    @property
    def correct(self) -> bool:
        """Whether it computes what it should."""
        return self.error is None or self.error <= self.tolerance  # an error of NaN does not pass

    @property
    def median(self) -> float | None:
        """Seconds of one call."""
        return self.timing and self.timing.median

    def as_record(self) -> dict[str, Any]:
        """The row for JSON."""
        interval = self.speedup and (self.speedup.low, self.speedup.high)
        parts = {"speedup": {"speedup": self.speedup and self.speedup.median, "speedup_interval": interval}}
        parts["timing"] = self.timing.as_record() if self.timing else {}
        return {key: one for name in self.keys for key, one in parts.get(name, {name: getattr(self, name)}).items()}


@dataclass(frozen=True)
class LengthCurve:
    """What was measured of one candidate at each length."""

    points: Mapping[int, Measurement]  # by length, ascending

    @property
    def error(self) -> float | None:
        """The worst over all lengths that were checked."""
        return next(iter(self.points.values())).error

    @property
    def correct(self) -> bool:
        """Whether it computes what it should at every length."""
        return all(point.correct for point in self.points.values())

    def slope(self, name: str = "median") -> float | None:
        """The exponent with which time grows, or another attribute."""
        return slope(list(self.points), [getattr(point, name) or None for point in self.points.values()])

    @property
    def doublings(self) -> list[Ratio | None]:
        """How many times longer each length takes than the one before, per doubling; within rounds."""
        found: list[Ratio | None] = []
        for (few, quick), (many, slow) in pairwise(self.points.items()):
            ratio, power = slowdown(slow.timing, quick.timing), 1 / log2(many / few)
            found.append(ratio and Ratio(ratio.median**power, ratio.low**power, ratio.high**power, ratio.rounds))
        return found

    def as_record(self) -> dict[str, Any]:
        """The curve for JSON."""
        times = {str(n): point.timing and point.timing.as_record() for n, point in self.points.items()}
        skipped = {str(n): point.skipped for n, point in self.points.items() if point.skipped}
        shape = {"slope": self.slope(), "per_doubling": [one and one.median for one in self.doublings]}
        return {"correct": self.correct, "error": self.error, **shape, "times": times, "skipped": skipped}


AnyMeasurement = TypeVar("AnyMeasurement", bound=Measurement)


def time_in_turns(
    calls: Mapping[int, Mapping[str, Callable[[], object]]],
    rows: Mapping[int, Mapping[str, AnyMeasurement]],
    baseline: str,
    settings: BenchSettings,
) -> dict[int, dict[str, AnyMeasurement]]:
    """The rows with the times of `calls`, interleaved, and the speedups over the baseline; both by size, then by name.

    All rows of a size get the reason instead if its timings are too noisy.
    """
    several = len(calls) > 1
    labels = {(size, name): f"{name}, {size} tokens" if several else name for size, named in calls.items() for name in named}
    timings = measure(
        {label: calls[size][name] for (size, name), label in labels.items()},
        baseline=None if several else baseline,
        rounds=settings.rounds,
        seconds=settings.seconds * len(calls),
        on_call=settings.on_call,
    )
    found = {size: dict(named) for size, named in rows.items()}
    for size, named in calls.items():
        timed = {name: timings[labels[size, name]] for name in named}
        refused, places = noise(timed, baseline), ranks(timed)
        for name, one in timed.items():
            times = {"timing": one, "speedup": slowdown(timed.get(baseline), one), "rank": places.get(name)}
            found[size][name] = replace(found[size][name], **({"skipped": refused[name]} if name in refused else times))
    return found


def ranks(timings: Mapping[str, Timing]) -> dict[str, tuple[int, int]]:
    """The best and the worst place that each may have; 1 is the fastest. Left out: those with fewer than MIN_ROUNDS rounds.

    One is ahead of another if the whole interval of the ratio of their times is above 1, at 95 % for each pair, not for all
    pairs together.
    """
    entered = {name: one for name, one in timings.items() if len(one.samples) >= MIN_ROUNDS}
    ratios = {(fast, slow): slowdown(entered[slow], entered[fast]) for fast in entered for slow in entered}
    ahead = [pair for pair, ratio in ratios.items() if ratio is not None and ratio.low > 1]
    return {
        name: (1 + sum(slow == name for _, slow in ahead), len(entered) - sum(fast == name for fast, _ in ahead))
        for name in entered
    }


def noise(timings: Mapping[str, Timing], baseline: str) -> dict[str, str]:
    """Why none of the timings may be shown, by name, the same for all; empty if they may.

    They may not if the ratios to the baseline are noisy in more than MAX_NOISY of the rows, or if the times of the baseline
    itself are noisy: the order of the rows and the times would mean nothing. Without a time of the baseline, the times of each
    row count instead of its ratios.
    """
    timed = {name: one for name, one in timings.items() if one.samples}
    spreads = {
        name: (slowdown(one, timed.get(baseline)) if name != baseline else None) or Ratio.of(one.samples)
        for name, one in timed.items()
    }
    widths = {name: one.high / one.low for name, one in spreads.items() if one.is_noisy}
    if baseline in widths:
        return dict.fromkeys(spreads, f"{TOO_NOISY}: {baseline} ×{widths[baseline]:.2f}")
    if len(widths) <= MAX_NOISY * len(spreads):
        return {}
    return dict.fromkeys(spreads, f"{TOO_NOISY}: {len(widths)} of {len(spreads)} timings, up to ×{max(widths.values()):.2f}")


@contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """Random numbers from a seed inside; afterwards the generator continues as if nothing had been drawn."""
    with torch.random.fork_rng([torch.cuda.current_device()] if device == "cuda" else []):
        torch.manual_seed(seed)
        yield


class Cost(NamedTuple):
    """The cost of one call, from which that of a longer one is forecast."""

    length: int  # tokens, or images of a batch
    seconds: float
    size: float  # bytes
    exponent: float = 2.0  # with which size grows at most

    @classmethod
    def after(cls, before: "Cost | None", length: int, seconds: float, size: int) -> "Cost":
        """With the exponent since `before`, a shorter length."""
        if before is None:
            return cls(length, seconds, size)
        return cls(length, seconds, size, max(1.0, log(size / before.size) / log(length / before.length)))

    def skip_reason(self, length: int, growth: float, settings: BenchSettings, usable: float = 1.0) -> str | None:
        """Why a call at this length, which takes `growth` times as long, is not worth trying; None if it is.

        usable: the share of the free memory that it may use.
        """
        size, seconds = min(growth, (length / self.length) ** self.exponent) * self.size, growth * self.seconds
        free = torch.cuda.mem_get_info()[0] if settings.device == "cuda" else available_bytes()
        if free is not None and size > usable * free:
            return f"would need about {_rounded(size / 1e9)} GB of memory, {_rounded(usable * free / 1e9)} GB may be used"
        return f"would take about {_rounded(seconds)} s" if seconds > settings.seconds else None


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
