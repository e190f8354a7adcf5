"""Time against the number of tokens: where softmax attention departs from linear growth.

# B batch, H heads, N queries and keys, D head width
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log, log2
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from polaformer.bench.agreement import random_inputs
from polaformer.bench.contenders import Contender
from polaformer.bench.measure import Ratio, Timing, measure, slowdown
from polaformer.bench.op import DEFAULTS, TOLERANCE, prepare
from polaformer.bench.runner import Settings, silent
from polaformer.ops.polarity.operator import polarity_attention

NUM_HEADS, WIDTH = 8, 32  # of time_at


class Point(NamedTuple):
    """The time of one forward pass over `length` tokens."""

    length: int
    polarity: Timing
    softmax: Timing

    @property
    def speedup(self) -> float | None:
        """How many times longer softmax takes."""
        ratio = slowdown(self.softmax, self.polarity)
        return ratio and ratio.median

    def as_record(self) -> dict[str, Any]:
        """The point for JSON."""
        times = {"polarity": self.polarity.as_record(), "softmax": self.softmax.as_record()}
        return {"length": self.length, "speedup": self.speedup} | times


def time_at(length: int, *, rounds: int = 15, seconds: float = 6.0, seed: int = 0) -> Point:
    """One forward pass of polarity attention and one of `scaled_dot_product_attention`, in turns, batch 1, fp32."""
    q, k, v, power, _ = random_inputs((1, NUM_HEADS, length, WIDTH), seed=seed)
    calls = {
        "polarity": lambda: polarity_attention(q, k, v, power),
        "softmax": lambda: F.scaled_dot_product_attention(q, k, v),
    }
    with torch.inference_mode():
        timings = measure(calls, baseline="softmax", rounds=rounds, seconds=seconds)
    return Point(length, timings["polarity"], timings["softmax"])


@dataclass(frozen=True)
class Curve:
    """The times of one contender at each length; None if it is incorrect or was skipped there."""

    error: float  # the worst relative difference from the reference, over all lengths that were checked
    timings: dict[int, Timing | None]
    skipped: dict[int, str]  # why a length was not timed

    @property
    def correct(self) -> bool:
        """Whether it computes what it should at every length."""
        return self.error <= TOLERANCE

    @property
    def medians(self) -> dict[int, float | None]:
        """Seconds at each length."""
        return {n: None if timing is None else timing.median for n, timing in self.timings.items()}

    @property
    def slope(self) -> float | None:
        """The exponent with which time grows."""
        return slope(list(self.timings), list(self.medians.values()))

    @property
    def doublings(self) -> list[Ratio | None]:
        """How many times longer each length takes than the one before, per doubling; within rounds."""
        found: list[Ratio | None] = []
        for (few, quick), (many, slow) in pairwise(self.timings.items()):
            ratio, power = slowdown(slow, quick) if slow and quick else None, 1 / log2(many / few)
            found.append(ratio and Ratio(ratio.median**power, ratio.low**power, ratio.high**power, ratio.rounds))
        return found

    def as_record(self) -> dict[str, Any]:
        """The curve for JSON."""
        times = {str(n): None if timing is None else timing.as_record() for n, timing in self.timings.items()}
        skipped = {str(n): reason for n, reason in self.skipped.items()}
        shape = {"slope": self.slope, "per_doubling": [one and one.median for one in self.doublings]}
        return {"correct": self.correct, "error": self.error, **shape, "times": times, "skipped": skipped}


def time_lengths(
    lengths: Sequence[int],
    contenders: Mapping[str, Contender],
    settings: Settings = DEFAULTS,
    *,
    batch: int = 1,
    num_heads: int = 4,
    width: int = 32,
) -> dict[str, Curve]:
    """A curve of each contender, by name: check all of them, then time them at all lengths in turns.

    Lengths are compared within a round, so that a busy spell of the machine affects all of them. A call
    that would take longer than settings.seconds, or more memory than is free, is skipped with the reason.
    """
    shapes = {(batch, num_heads, n, width): n for n in sorted(set(lengths))}
    ready = prepare(contenders, list(shapes), replace(settings, on_call=silent))
    calls = {f"{name}, {shape[2]} tokens": one for (name, shape), one in ready.passes.items()}
    seconds = settings.seconds * len(shapes)
    timings = measure(calls, rounds=settings.rounds, seconds=seconds, on_call=settings.on_call) if calls else {}
    return {
        name: Curve(
            error,
            {n: timings.get(f"{name}, {n} tokens") for n in shapes.values()},
            {n: ready.skipped[name, shape] for shape, n in shapes.items() if (name, shape) in ready.skipped},
        )
        for name, error in ready.errors.items()
    }


def slope(lengths: Sequence[int], values: Sequence[float | None]) -> float | None:
    """The exponent a of value ≈ c·length^a, by least squares on logarithms; None with fewer than two measured lengths."""
    points = [(log(n), log(value)) for n, value in zip(lengths, values, strict=True) if value is not None]
    if len({x for x, _ in points}) < 2:
        return None
    centre_x, centre_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    covariance = sum((x - centre_x) * (y - centre_y) for x, y in points)
    return covariance / sum((x - centre_x) ** 2 for x, _ in points)
