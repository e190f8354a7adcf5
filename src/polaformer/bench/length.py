"""Time against the number of tokens: where softmax attention leaves linear growth behind.

# B batch, H heads, N queries and keys, D head width
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import torch
import torch.nn.functional as F

from polaformer.bench.agreement import random_inputs
from polaformer.bench.measure import Timing, measure, slowdown
from polaformer.ops.polarity import polarity_attention

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
        return slowdown(self.softmax, self.polarity)

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
            rounds=rounds,
            seconds=seconds,
            on_call=on_call,
        )
    return Point(length, timings["polarity"], timings["softmax"])


def slope(lengths: Sequence[int], seconds: Sequence[float | None]) -> float | None:
    """The exponent a of seconds ≈ c·length^a, by least squares on logarithms; None with fewer than two measured lengths."""
    points = [(log(n), log(t)) for n, t in zip(lengths, seconds, strict=True) if t is not None]
    if len({x for x, _ in points}) < 2:
        return None
    centre_x = sum(x for x, _ in points) / len(points)
    centre_y = sum(y for _, y in points) / len(points)
    covariance = sum((x - centre_x) * (y - centre_y) for x, y in points)
    return covariance / sum((x - centre_x) ** 2 for x, _ in points)
