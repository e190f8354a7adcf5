"""Times several callables fairly: in turns within one run, so that a busy moment of the machine hits all of them."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median
from typing import Any, NamedTuple

import torch

LEAST_ROUNDS = 6  # the fewest whose extremes enclose the true median with 95 % probability: 1 − 2 / 2⁶ = 0.97
WIDEST = 1.5  # high over low of an interval, beyond which it says too little
MOST_NOISY = 0.25  # share of the rows that may have a wider one
TOO_NOISY = "too noisy"


@dataclass(frozen=True)
class Timing:
    """How long one call took, in seconds, in each round; no samples for a callable that was too slow to measure."""

    samples: tuple[float, ...]  # of the first, second, … round
    first: float  # of the warm-up call, which also loads and allocates

    @property
    def median(self) -> float | None:
        """The middle sample."""
        return median(self.samples) if self.samples else None

    @property
    def best(self) -> float | None:
        """The shortest sample."""
        return min(self.samples, default=None)

    def as_record(self) -> dict[str, Any]:
        """For JSON."""
        return {"median": self.median, "best": self.best, "rounds": len(self.samples), "first": self.first}


class Ratio(NamedTuple):
    """The median of ratios, and the interval that holds the true median with 95 %; all ratios if LEAST_ROUNDS are not there."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> "Ratio":
        """Of at least one ratio, in any order; the interval is that of the sign test, which asks nothing of how they spread."""
        found, number = sorted(ratios), len(ratios)
        outside = 0
        while outside < number // 2 and sum(comb(number, i) for i in range(outside + 2)) <= 0.025 * 2**number:
            outside += 1
        return cls(median(found), found[outside], found[number - 1 - outside], number)

    @property
    def is_noisy(self) -> bool:
        """Whether rounds disagree too much; one alone cannot."""
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

    Each round has an order of its own, the same in every run: what a call finds in the caches depends on who came before it.
    A callable whose warm-up takes longer than `seconds` is skipped. `on_call` is told the name before each call, for progress
    bars.
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
    """In how many rounds, the first ones, each takes part, from the seconds of one call: at least one, at most `rounds`.

    The baseline may take half of `seconds`, and no other has more rounds than it: a time and its ratio to the baseline are then
    of the same rounds. What the quick ones leave of `seconds` is for the slow ones, which have fewer rounds.
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
    """How many times longer `slow` takes than `fast`, from the ratios within rounds that have both; None if there are none.

    A busy spell of the machine slows both alike.
    """
    ratios = [a / b for a, b in zip(slow.samples, fast.samples, strict=False)]
    return Ratio.of(ratios) if ratios else None


def speedup_record(ratio: Ratio | None) -> dict[str, Any]:
    """For JSON."""
    return {"speedup": ratio and ratio.median, "speedup_interval": ratio and (ratio.low, ratio.high)}


def ranks(timings: Mapping[str, Timing]) -> dict[str, tuple[int, int]]:
    """The first and the last place that each may have; 1 is the fastest. None for fewer than LEAST_ROUNDS rounds.

    One is ahead of another if the whole interval of the ratio of their times is above 1: at 95 % for each pair, not for all
    pairs together.
    """
    entered = {name: one for name, one in timings.items() if len(one.samples) >= LEAST_ROUNDS}
    ahead = {
        (fast, slow)
        for fast in entered
        for slow in entered
        if (ratio := slowdown(entered[slow], entered[fast])) is not None and ratio.low > 1
    }
    return {
        name: (
            1 + sum((other, name) in ahead for other in entered),
            len(entered) - sum((name, other) in ahead for other in entered),
        )
        for name in entered
    }


def noise(timings: Mapping[str, Timing], baseline: str) -> dict[str, str]:
    """Why none of the timings may be shown, by name, the same for all; nothing if they may.

    They may not where the ratios to the baseline are noisy in more than MOST_NOISY of the rows, or the times of the baseline
    itself are: their order, and times against ratios, would say nothing. Without a time of the baseline, the times of each
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
    """Waits for the GPU, if one has been used: its calls return before they are done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
