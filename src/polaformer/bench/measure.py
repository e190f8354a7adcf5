"""Times several callables fairly: in turns within one run, so that a busy moment of the machine hits all of them."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch


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


def measure(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 15,
    seconds: float = 10.0,
    on_call: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """The times of `calls`, by name, taken in turns: a warm-up of each, then `rounds` rounds over all of them.

    Each round has an order of its own, the same in every run: what a call finds in the caches depends on who came before it.
    A callable whose warm-up takes longer than `seconds` is skipped. Any other is timed at least once and drops out of later
    rounds when it has used its equal share of `seconds`, so that a slow one costs the quick ones no rounds. `on_call` is told
    the name before each call, for progress bars.
    """
    if rounds < 1 or not seconds > 0:
        raise ValueError(f"measure: got {rounds} rounds and {seconds} seconds; give at least one round and a positive time")
    tell = on_call or (lambda _: None)
    warm_up = {name: _time(name, call, tell, clock) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls if warm_up[name] <= seconds}
    for index in range(rounds):
        for name in random.Random(index).sample(list(samples), len(samples)):
            if sum(samples[name]) < seconds / len(calls):
                samples[name].append(_time(name, calls[name], tell, clock))
    return {name: Timing(tuple(samples.get(name, ())), warm_up[name]) for name in calls}


def slowdown(slow: Timing, fast: Timing) -> float | None:
    """How many times longer `slow` takes than `fast`; None where one was not measured.

    The median of the ratios within a round, over the rounds that have both: a busy spell of the machine slows both alike.
    """
    ratios = [a / b for a, b in zip(slow.samples, fast.samples, strict=False)]
    return median(ratios) if ratios else None


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
