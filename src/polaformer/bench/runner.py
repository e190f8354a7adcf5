"""What all benchmarks share: forecast whether a call is worth trying, time calls in turns, withhold noisy times."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from polaformer.bench.measure import Ratio, Timing, measure, noise, ranks, slowdown, synchronise
from polaformer.bench.memory import available_bytes


def silent(name: str) -> None:
    """Reports nothing about the call that starts."""


@dataclass(frozen=True)
class Settings:
    """How a benchmark measures."""

    backward: bool = False  # forward and backward together, as in a training step, instead of forward alone
    rounds: int = 15  # at most, for each call
    seconds: float = 10.0  # per size, and the longest that a single call may take
    device: str = "cpu"
    on_call: Callable[[str], None] = silent  # gets the name of each call before it starts, for progress bars


class Timed(NamedTuple):
    """What timing one call found."""

    timing: Timing | None = None
    speedup: Ratio | None = None  # over the baseline, from the rounds of the timing
    rank: tuple[int, int] | None = None  # the best and the worst place it may have
    skipped: str | None = None  # why the time is withheld


def time_in_turns(calls: Mapping[str, Callable[[], object]], baseline: str, settings: Settings) -> dict[str, Timed]:
    """The times of `calls` and their speedups over the baseline, by name; the reason instead for all if they are too noisy."""
    limits: dict[str, Any] = {"rounds": settings.rounds, "seconds": settings.seconds, "on_call": settings.on_call}
    timings = measure(calls, baseline=baseline, **limits) if calls else {}
    refused, places, base = noise(timings, baseline), ranks(timings), timings.get(baseline)
    found = {name: Timed(one, slowdown(base, one) if base else None, places.get(name)) for name, one in timings.items()}
    return found | {name: Timed(skipped=reason) for name, reason in refused.items()}


def skip_reason(size: float, seconds: float, settings: Settings, usable: float = 1.0) -> str | None:
    """Why a call that is expected to need `size` bytes and `seconds` seconds is not worth trying; None if it is.

    usable: the share of the free memory that it may use.
    """
    free = torch.cuda.mem_get_info()[0] if settings.device == "cuda" else available_bytes()
    if free is not None and size > usable * free:
        return f"would need about {_rounded(size / 1e9)} GB of memory, {_rounded(usable * free / 1e9)} GB may be used"
    return f"would take about {_rounded(seconds)} s" if seconds > settings.seconds else None


def quickest(call: Callable[[], object], enough: float) -> float:
    """The shortest time of up to three calls, so that one busy moment does not decide; stops at the first below `enough`."""
    taken: list[float] = []
    while len(taken) < 3 and not (taken and taken[-1] <= enough):
        start = time.perf_counter()
        call()
        synchronise()
        taken.append(time.perf_counter() - start)
    return min(taken)


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
