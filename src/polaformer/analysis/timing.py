"""Times several callables fairly: interleaved within one run, so that transient load affects all of them."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from math import comb, log
from statistics import linear_regression, median
from typing import Any, NamedTuple

import torch

MIN_ROUNDS = 6  # the fewest whose extremes enclose the true median with 95 % probability: 1 − 2 / 2⁶ = 0.97
MAX_SPREAD = 1.5  # high over low of an interval; a wider one says too little


class Timing(NamedTuple):
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
    """The median of ratios and the 95 % interval of the true median; the range of all ratios for fewer than MIN_ROUNDS."""

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
        return self.high > MAX_SPREAD * self.low


def measure(
    calls: Mapping[str, Callable[[], object]],
    *,
    baseline: str | None = None,
    rounds: int = 15,
    seconds: float = 10.0,
    on_call: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """The times of `calls`, by name, interleaved: a warm-up of each, then the rounds of `plan`.

    The order differs between rounds but not between runs: what a call finds in the caches depends on the call before it. A
    callable whose warm-up takes longer than `seconds` is skipped. `on_call` gets the name before each call, for progress bars.
    """
    if rounds < 1 or not seconds > 0:
        raise ValueError(f"measure: got {rounds} rounds and {seconds} seconds; give at least one round and a positive time")

    def timed(name: str) -> float:
        on_call(name)
        return seconds_of(calls[name], clock)

    warm_up = {name: timed(name) for name in calls}
    planned = plan({name: one for name, one in warm_up.items() if one <= seconds}, rounds, seconds, baseline)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds):
        for name in random.Random(index).sample(list(planned), len(planned)):
            if index < planned[name]:
                samples[name].append(timed(name))
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


def seconds_of(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """The time of one call, including what it leaves to a GPU, whose calls return before they are done."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    start = clock()
    call()
    wait()
    return clock() - start


def quickest(call: Callable[[], object], enough: float) -> float:
    """The shortest time of up to three calls, so that transient load does not decide; stops at the first below `enough`."""
    taken = [seconds_of(call)]
    while len(taken) < 3 and taken[-1] > enough:
        taken.append(seconds_of(call))
    return min(taken)


def slowdown(slow: Timing | None, fast: Timing | None) -> Ratio | None:
    """How many times longer `slow` takes than `fast`, from the ratios within the rounds that have both; None without any.

    Transient load slows both alike.
    """
    ratios = [a / b for a, b in zip(slow.samples, fast.samples, strict=False)] if slow and fast else []
    return Ratio.of(ratios) if ratios else None


def slope(lengths: Sequence[int], values: Sequence[float | None]) -> float | None:
    """The exponent a of value ≈ c·length^a, by least squares on logarithms; None with fewer than two measured lengths."""
    points = [(log(n), log(value)) for n, value in zip(lengths, values, strict=True) if value is not None]
    return linear_regression(*zip(*points, strict=True)).slope if len({x for x, _ in points}) > 1 else None
