"""Times several callables fairly: in turns within one run, so that a busy moment of the machine affects all of them."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median
from typing import Any, NamedTuple

import torch

LEAST_ROUNDS = 6  # the fewest whose extremes enclose the true median with 95 % probability: 1 − 2 / 2⁶ = 0.97
WIDEST = 1.5  # high over low of an interval; a wider one says too little
MOST_NOISY = 0.25  # share of the rows whose interval may be wider
TOO_NOISY = "too noisy"


@dataclass(frozen=True)
class Timing:
    """The seconds that one call took in each round; no samples for a callable that was too slow to measure."""

    samples: tuple[float, ...]  # one per round
    first: float  # the warm-up call, which also loads and allocates

    @property
    def median(self) -> float | None:
        """The middle sample."""
        return median(self.samples) if self.samples else None

    @property
    def best(self) -> float | None:
        """The shortest sample."""
        return min(self.samples, default=None)

    def as_record(self) -> dict[str, Any]:
        """The timing for JSON."""
        return {"median": self.median, "best": self.best, "rounds": len(self.samples), "first": self.first}


class Ratio(NamedTuple):
    """The median of ratios and the 95 % interval of the true median; the range of all ratios for fewer than LEAST_ROUNDS."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> "Ratio":
        """From at least one ratio, in any order; the interval is that of the sign test, which assumes no distribution."""
        found, number = sorted(ratios), len(ratios)
        outside = 0
        while outside < number // 2 and sum(comb(number, i) for i in range(outside + 2)) <= 0.025 * 2**number:
            outside += 1
        return cls(median(found), found[outside], found[number - 1 - outside], number)

    @property
    def is_noisy(self) -> bool:
        """Whether rounds disagree too much; a single one cannot."""
        return self.high > WIDEST * self.low


def measure(
    calls: Mapping[str, Callable[[], object]],
    *,
    baseline: str | None = None,
    rounds: int = 15,
    seconds: float = 10.0,
    on_call: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """The times of `calls`, by name, taken in turns: a warm-up of each, then the rounds of `plan`.

    The order differs between rounds but not between runs: what a call finds in the caches depends on the call before it. A
    callable whose warm-up takes longer than `seconds` is skipped. `on_call` gets the name before each call, for progress bars.
    """
    if rounds < 1 or not seconds > 0:
        raise ValueError(f"measure: got {rounds} rounds and {seconds} seconds; give at least one round and a positive time")
    tell = on_call or (lambda _: None)
    warm_up = {name: _time(name, call, tell, clock) for name, call in calls.items()}
    planned = plan({name: one for name, one in warm_up.items() if one <= seconds}, rounds, seconds, baseline)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds):
        for name in random.Random(index).sample(list(planned), len(planned)):
            if index < planned[name]:
                samples[name].append(_time(name, calls[name], tell, clock))
    return {name: Timing(tuple(samples[name]), warm_up[name]) for name in calls}


def plan(each: Mapping[str, float], rounds: int, seconds: float, baseline: str | None = None) -> dict[str, int]:
    """The number of rounds, the first ones, in which each takes part, from the seconds of one call: 1 to `rounds`.

    The baseline may take half of `seconds`, and no other gets more rounds than it, so that a time and its ratio to the baseline
    are from the same rounds. What the quick ones leave of `seconds` goes to the slow ones, which get fewer rounds.
    """
    found: dict[str, int] = {}
    order = sorted(each, key=lambda name: (name != baseline, each[name]))
    for place, name in enumerate(order):
        share = seconds / (2 if name == baseline else len(order) - place)
        found[name] = min(rounds, max(1, int(share / max(each[name], 1e-9))))  # a clock may see no time pass
        rounds = found[name] if name == baseline else rounds
        seconds -= found[name] * each[name]
    return found


def slowdown(slow: Timing, fast: Timing) -> Ratio | None:
    """How many times longer `slow` takes than `fast`, from the ratios within the rounds that have both; None without any.

    A busy spell of the machine slows both alike.
    """
    ratios = [a / b for a, b in zip(slow.samples, fast.samples, strict=False)]
    return Ratio.of(ratios) if ratios else None


def speedup_record(ratio: Ratio | None) -> dict[str, Any]:
    """The ratio as a speedup for JSON."""
    return {"speedup": ratio and ratio.median, "speedup_interval": ratio and (ratio.low, ratio.high)}


def ranks(timings: Mapping[str, Timing]) -> dict[str, tuple[int, int]]:
    """The best and the worst place that each may have; 1 is the fastest. Left out: those with fewer than LEAST_ROUNDS rounds.

    One is ahead of another if the whole interval of the ratio of their times is above 1, at 95 % for each pair, not for all
    pairs together.
    """
    entered = {name: one for name, one in timings.items() if len(one.samples) >= LEAST_ROUNDS}

    def is_ahead(fast: str, slow: str) -> bool:
        ratio = slowdown(entered[slow], entered[fast])
        return ratio is not None and ratio.low > 1

    found = {}
    for name in entered:
        first = 1 + sum(is_ahead(other, name) for other in entered)
        found[name] = first, len(entered) - sum(is_ahead(name, other) for other in entered)
    return found


def noise(timings: Mapping[str, Timing], baseline: str) -> dict[str, str]:
    """Why none of the timings may be shown, by name, the same for all; empty if they may.

    They may not if the ratios to the baseline are noisy in more than MOST_NOISY of the rows, or if the times of the baseline
    itself are noisy: the order of the rows and the times would mean nothing. Without a time of the baseline, the times of each
    row count instead of its ratios.
    """
    timed = {name: one for name, one in timings.items() if one.samples}
    spreads = {name: Ratio.of(one.samples) for name, one in timed.items()}
    if baseline in timed:
        base = timed.pop(baseline)
        spreads |= {name: ratio for name, one in timed.items() if (ratio := slowdown(one, base)) is not None}
    widths = {name: one.high / one.low for name, one in spreads.items() if one.is_noisy}
    if baseline in widths:
        return dict.fromkeys(spreads, f"{TOO_NOISY}: {baseline} ×{widths[baseline]:.2f}")
    if len(widths) <= MOST_NOISY * len(spreads):
        return {}
    return dict.fromkeys(spreads, f"{TOO_NOISY}: {len(widths)} of {len(spreads)} timings, up to ×{max(widths.values()):.2f}")


def _time(name: str, call: Callable[[], object], tell: Callable[[str], None], clock: Callable[[], float]) -> float:
    tell(name)
    synchronise()
    start = clock()
    call()
    synchronise()
    return clock() - start


def synchronise() -> None:
    """Wait for the GPU if one has been used: its calls return before they are done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
