"""What all benchmarks share: settings, measurements, the forecast whether a call is worth trying, and interleaved timing.

Each benchmark is a function `benchmark` in a file of its own, with the same steps: check that the candidates are correct,
forecast which are worth trying, time or measure those, and record the numbers or why there are none.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import log, log2
from typing import Any, NamedTuple

import torch

from polaformer.analysis.agreement import Shape
from polaformer.analysis.machine import available_bytes
from polaformer.analysis.timing import MIN_ROUNDS, Ratio, Timing, measure, slope, slowdown
from polaformer.attention.core import Facts
from polaformer.bench.correctness import TOLERANCE

MAX_NOISY = 0.25  # share of the rows whose interval may be wider than analysis.timing.MAX_SPREAD
TOO_NOISY = "too noisy"
USABLE = 0.8  # of the free memory: a forecast may be too low, and other programs grow too


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
    """What any benchmark measured of one candidate at one size; None for what it does not measure, or could not."""

    error: float | None = None  # the worst relative difference from the reference; None if there is none to compare with
    timing: Timing | None = None  # None if it is incorrect or was skipped
    speedup: Ratio | None = None  # relative to the baseline, from the rounds of the timing
    rank: tuple[int, int] | None = None  # the best and the worst place it may have
    skipped: str | None = None  # why it has no time, or if only memory is measured, no memory, although it is correct
    reasons: Mapping[str, str] = field(default_factory=dict)  # of both passes: why one of them has no number
    sizes: Mapping[str, int | None] = field(default_factory=dict)  # bytes by kind; "saved": for the backward pass
    saved_ratio: float | None = None  # of the bytes saved, relative to the baseline
    work: float | None = None  # of one call: floating-point operations of matmuls, or images
    share_of_sgemm: float | None = None  # of the rate of a large matmul timed in the same rounds; best by best
    fastest_over: Ratio | None = None  # how many times longer it takes than our fastest
    gradients_error: float | None = None  # like error, where gradients are compared apart from the output
    tolerances: tuple[float, float] = (TOLERANCE, TOLERANCE)  # of error and of gradients_error

    @property
    def correct(self) -> bool:
        """Whether it computes what it should, as far as it was compared."""
        found = zip((self.error, self.gradients_error), self.tolerances, strict=True)
        return all(error is None or error <= tolerance for error, tolerance in found)  # an error of NaN does not pass

    @property
    def median(self) -> float | None:
        """Seconds of one call."""
        return self.timing and self.timing.median

    @property
    def saved_bytes(self) -> int | None:
        """Bytes saved for the backward pass."""
        return self.sizes.get("saved")

    @property
    def gflops(self) -> float | None:
        """Billions of operations per second, at best."""
        best = self.timing and self.timing.best
        return self.work / best / 1e9 if best and self.work is not None else None

    @property
    def images_per_second(self) -> float | None:
        """By the median."""
        return self.work / self.median if self.median and self.work is not None else None

    def as_record(self, *names: str) -> dict[str, Any]:
        """These attributes for JSON; "speedup" includes its interval, "timing" is replaced by what it consists of."""
        interval = self.speedup and (self.speedup.low, self.speedup.high)
        parts = {"speedup": {"speedup": self.speedup and self.speedup.median, "speedup_interval": interval}}
        parts["timing"] = self.timing.as_record() if self.timing else {}
        return {key: one for name in names for key, one in parts.get(name, {name: getattr(self, name)}).items()}


@dataclass(frozen=True)
class LengthCurve:
    """What was measured of one candidate at each length."""

    points: Mapping[int, Measurement]  # by length, ascending
    facts: Facts | None = None  # of a mechanism

    @property
    def error(self) -> float | None:
        """The worst over all lengths that were checked."""
        return next(iter(self.points.values())).error

    @property
    def correct(self) -> bool:
        """Whether it computes what it should at every length."""
        return all(point.correct for point in self.points.values())

    def slope(self, kind: str | None = None) -> float | None:
        """The exponent with which time grows, or a kind of memory."""
        values = [point.sizes.get(kind) if kind else point.median for point in self.points.values()]
        return slope(list(self.points), [value or None for value in values])

    @property
    def doublings(self) -> list[Ratio | None]:
        """How many times longer each length takes than the one before, per doubling; within rounds."""
        found: list[Ratio | None] = []
        for (few, quick), (many, slow) in pairwise(self.points.items()):
            ratio, power = slowdown(slow.timing, quick.timing), 1 / log2(many / few)
            found.append(ratio and Ratio(ratio.median**power, ratio.low**power, ratio.high**power, ratio.rounds))
        return found


def time_in_turns(
    calls: Mapping[int, Mapping[str, Callable[[], object]]],
    rows: Mapping[int, Mapping[str, Measurement]],
    baseline: str,
    settings: BenchSettings,
    *,
    inverse: bool = False,
) -> dict[int, dict[str, Measurement]]:
    """The rows with the times of `calls`, interleaved; both by size, then by name.

    speedup and saved_ratio are those of the row relative to the baseline; with `inverse`, of the baseline relative to the row.
    All rows of a size get the reason instead of times if its timings are too noisy.
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
    for size, named in found.items():
        timed = {name: timings[labels[size, name]] for name in calls[size]}
        refused, places = noise(timed, baseline), ranks(timed)
        for name, one in timed.items():
            times = {"timing": one, "rank": places.get(name)}
            named[name] = replace(named[name], **({"skipped": refused[name]} if name in refused else times))
        base = named.get(baseline, Measurement())
        for name, row in named.items():
            named[name] = replace(row, **(_ratios(base, row) if inverse else _ratios(row, base)))
    return found


def _ratios(one: Measurement, base: Measurement) -> dict[str, Any]:
    """How many times faster one is than the base, and what it saves for the backward pass relative to it."""
    saved, base_saved = one.saved_bytes, base.saved_bytes
    ratio = saved / base_saved if saved is not None and base_saved else None
    return {"speedup": slowdown(base.timing, one.timing), "saved_ratio": ratio}


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

    def skip_reason(self, length: int, growth: float, settings: BenchSettings) -> str | None:
        """Why a call at this length, which takes `growth` times as long, is not worth trying; None if it is."""
        size, seconds = min(growth, (length / self.length) ** self.exponent) * self.size, growth * self.seconds
        free = torch.cuda.mem_get_info()[0] if settings.device == "cuda" else available_bytes()
        if free is not None and size > USABLE * free:
            return f"would need about {_rounded(size / 1e9)} GB of memory, {_rounded(USABLE * free / 1e9)} GB may be used"
        return f"would take about {_rounded(seconds)} s" if seconds > settings.seconds else None


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
