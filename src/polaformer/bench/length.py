"""Time against the number of tokens: where softmax attention leaves linear growth behind.

# B batch, H heads, N queries and keys, D head width
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log, log2
from typing import Any

import torch
import torch.nn.functional as F

from polaformer.bench.agreement import Shape, random_inputs
from polaformer.bench.contenders import Contender
from polaformer.bench.correctness import correctness, correctness_at_length, largest
from polaformer.bench.forecast import cut, why_not
from polaformer.bench.measure import Ratio, Timing, measure, slowdown
from polaformer.bench.op import TOLERANCE
from polaformer.bench.passes import Pass
from polaformer.ops.polarity.operator import polarity_attention

NUM_HEADS, WIDTH = 8, 32


@dataclass(frozen=True)
class Point:
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
        """For JSON."""
        times = {"polarity": self.polarity.as_record(), "softmax": self.softmax.as_record()}
        return {"length": self.length, "speedup": self.speedup} | times


def time_at(
    length: int, *, rounds: int = 15, seconds: float = 6.0, seed: int = 0, on_call: Callable[[str], None] | None = None
) -> Point:
    """One forward pass of polarity attention and one of `scaled_dot_product_attention`, in turns, batch 1, fp32."""
    q, k, v, power, _ = random_inputs((1, NUM_HEADS, length, WIDTH), seed=seed)
    with torch.inference_mode():
        timings = measure(
            {
                "polarity": lambda: polarity_attention(q, k, v, power),
                "softmax": lambda: F.scaled_dot_product_attention(q, k, v),
            },
            baseline="softmax",
            rounds=rounds,
            seconds=seconds,
            on_call=on_call,
        )
    return Point(length, timings["polarity"], timings["softmax"])


@dataclass(frozen=True)
class Curve:
    """The times of one contender at each length; None where it is incorrect (`error` says so) or was skipped."""

    error: float  # the worst relative difference from the truth, over all lengths that were checked
    timings: dict[int, Timing | None]
    skipped: dict[int, str]  # why a length was not timed

    @property
    def correct(self) -> bool:
        """Whether it computes what it should at every length."""
        return self.error <= TOLERANCE

    @property
    def medians(self) -> list[float | None]:
        """Seconds at each length."""
        return [None if timing is None else timing.median for timing in self.timings.values()]

    @property
    def slope(self) -> float | None:
        """The exponent with which time grows."""
        return slope(list(self.timings), self.medians)

    @property
    def doublings(self) -> list[Ratio | None]:
        """Between neighbouring lengths, how many times longer the longer takes for each doubling; within rounds."""
        return [_per_doubling(shorter, longer) for shorter, longer in pairwise(self.timings.items())]

    def as_record(self) -> dict[str, Any]:
        """For JSON."""
        times = {str(n): None if timing is None else timing.as_record() for n, timing in self.timings.items()}
        skipped = {str(n): reason for n, reason in self.skipped.items()}
        shape = {"slope": self.slope, "per_doubling": [one and one.median for one in self.doublings]}
        return {"correct": self.correct, "error": self.error, **shape, "times": times, "skipped": skipped}


def time_lengths(
    lengths: Sequence[int],
    contenders: Mapping[str, Contender],
    *,
    batch: int = 1,
    num_heads: int = 4,
    width: int = 32,
    backward: bool = False,
    rounds: int = 15,
    seconds: float = 10.0,
    device: str = "cpu",
    on_call: Callable[[str], None] | None = None,
) -> dict[str, Curve]:
    """A curve of each contender, by name: correctness first, then all of them at all lengths in turns.

    A length is compared with the next within a round, so that a busy spell hits both. seconds is for each length; what would
    take longer for one call, or more memory than there is, is skipped with the reason.
    """
    shapes = {n: (batch, num_heads, n, width) for n in sorted(set(lengths))}
    errors = {name: _worst(one, list(shapes.values()), device) for name, one in contenders.items()}
    right = {name: one for name, one in contenders.items() if errors[name] <= TOLERANCE}
    skipped = {n: why_not(right, shape, backward=backward, seconds=seconds, device=device) for n, shape in shapes.items()}
    passes: dict[tuple[str, int], Pass] = {}
    for n, shape in shapes.items():
        inputs, tried = random_inputs(shape, device=device), [name for name in right if name not in skipped[n]]
        passes |= {(name, n): Pass(right[name].build(shape), inputs, backward) for name in tried}
    for (name, _), one in passes.items():
        errors[name] = largest(errors[name], correctness_at_length(right[name], one))
    calls: dict[str, Callable[[], object]] = {
        _at(name, n): one for (name, n), one in passes.items() if errors[name] <= TOLERANCE
    }
    timings = measure(calls, rounds=rounds, seconds=seconds * len(shapes), on_call=on_call) if calls else {}
    return {
        name: Curve(
            errors[name],
            {n: timings.get(_at(name, n)) for n in shapes},
            {n: reasons[name] for n, reasons in skipped.items() if name in reasons},
        )
        for name in contenders
    }


def _at(name: str, length: int) -> str:
    return f"{name}, {length} tokens"


def _worst(contender: Contender, shapes: Sequence[Shape], device: str) -> float:
    """The largest error over the shapes; NaN if any is."""
    return largest(*(correctness(contender, shape, device) for shape in {cut(shape) for shape in shapes}))


def _per_doubling(shorter: tuple[int, Timing | None], longer: tuple[int, Timing | None]) -> Ratio | None:
    (few, quick), (many, slow) = shorter, longer
    ratio = slowdown(slow, quick) if slow and quick else None
    steps = log2(many / few)
    return ratio and Ratio(ratio.median ** (1 / steps), ratio.low ** (1 / steps), ratio.high ** (1 / steps), ratio.rounds)


def slope(lengths: Sequence[int], seconds: Sequence[float | None]) -> float | None:
    """The exponent a of seconds ≈ c·length^a, by least squares on logarithms; None with fewer than two measured lengths."""
    points = [(log(n), log(t)) for n, t in zip(lengths, seconds, strict=True) if t is not None]
    if len({x for x, _ in points}) < 2:
        return None
    centre_x = sum(x for x, _ in points) / len(points)
    centre_y = sum(y for _, y in points) / len(points)
    covariance = sum((x - centre_x) * (y - centre_y) for x, y in points)
    return covariance / sum((x - centre_x) ** 2 for x, _ in points)
