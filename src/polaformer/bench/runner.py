"""What all benchmarks share: forecast whether a call is worth trying, time calls in turns, withhold noisy times."""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from polaformer.bench.measure import Ratio, Timing, measure, noise, ranks, slowdown, synchronise
from polaformer.bench.memory import available_bytes

Progress = Callable[[str], None]  # is called with the name of each call before it starts


class Timed(NamedTuple):
    """What timing one call found."""

    timing: Timing | None = None
    speedup: Ratio | None = None  # over the baseline, from the rounds of the timing
    rank: tuple[int, int] | None = None  # the best and the worst place it may have
    skipped: str | None = None  # why the time is withheld


def time_in_turns(
    calls: Mapping[str, Callable[[], object]], baseline: str, *, rounds: int, seconds: float, on_call: Progress | None = None
) -> dict[str, Timed]:
    """The times of `calls` and their speedups over the baseline, by name; the reason instead for all if they are too noisy."""
    timings = measure(calls, baseline=baseline, rounds=rounds, seconds=seconds, on_call=on_call) if calls else {}
    refused, places, base = noise(timings, baseline), ranks(timings), timings.get(baseline)
    found = {name: Timed(one, slowdown(base, one) if base else None, places.get(name)) for name, one in timings.items()}
    return found | {name: Timed(skipped=reason) for name, reason in refused.items()}


def skip_reason(size: float, seconds: float, *, limit: float, device: str, usable: float = 1.0) -> str | None:
    """Why a call that is expected to need `size` bytes and `seconds` seconds is not worth trying; None if it is.

    limit: the seconds that a call may take; usable: the share of the free memory that it may use.
    """
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_bytes()
    if free is not None and size > usable * free:
        return f"would need about {_rounded(size / 1e9)} GB of memory, {_rounded(usable * free / 1e9)} GB may be used"
    return f"would take about {_rounded(seconds)} s" if seconds > limit else None


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
