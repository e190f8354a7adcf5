"""Whether a call at a large shape is worth trying, from a call at a smaller one: time as products, memory as tokens.

# B batch, H heads, N queries and keys, D head width
"""

import time
from collections.abc import Callable, Mapping

import torch

from polaformer.bench.agreement import Shape, random_inputs
from polaformer.bench.contenders import YARDSTICK, Contender
from polaformer.bench.measure import synchronise
from polaformer.bench.memory import allocated_peak, available_bytes
from polaformer.bench.passes import Pass

LONGEST_CHECKED = 4096  # several blocks of the operator; beyond it the backward pass of softmax takes too long to wait for


def cut(shape: Shape) -> Shape:
    """The shape with at most LONGEST_CHECKED tokens."""
    return shape[0], shape[1], min(shape[2], LONGEST_CHECKED), shape[3]


def why_not(
    contenders: Mapping[str, Contender], shape: Shape, *, backward: bool, seconds: float, device: str = "cpu"
) -> dict[str, str]:
    """The contenders that one call of would take longer than `seconds` or more memory than is free, and why, by name.

    Nothing is foretold of up to LONGEST_CHECKED tokens. What is compiled takes no more than what it is compiled from.
    """
    if shape == cut(shape):
        return {}
    plain = {name: one for name, one in contenders.items() if not one.is_compiled}
    found = {name: _why_not(one, shape, backward, seconds, device) for name, one in plain.items()}
    found |= {name: found.get(YARDSTICK) for name, one in contenders.items() if one.is_compiled}
    return {name: reason for name, reason in found.items() if reason is not None}


def _why_not(contender: Contender, shape: Shape, backward: bool, seconds: float, device: str) -> str | None:
    short = cut(shape)
    one = Pass(contender.build(short), random_inputs(short, device=device), backward)
    needed = allocated_peak(one, device) * shape[2] // short[2]  # this call also warms up
    there_is = torch.cuda.mem_get_info()[0] if device == "cuda" else available_bytes()
    if there_is is not None and needed > there_is:
        return f"would need about {needed / 1e9:.0f} GB of memory, {there_is / 1e9:.0f} GB are free"
    times_longer = contender.flops(shape) / contender.flops(short)
    expected = times_longer * quickest(one, seconds / times_longer)
    return f"would take about {expected:.0f} s" if expected > seconds else None


def quickest(call: Callable[[], object], enough: float) -> float:
    """The shortest time of up to three calls, so that one busy moment does not decide; the first below `enough` will do."""
    taken: list[float] = []
    while len(taken) < 3 and not (taken and taken[-1] <= enough):
        start = time.perf_counter()
        call()
        synchronise()
        taken.append(time.perf_counter() - start)
    return min(taken)
