"""Learning rate and momentum as pure functions of the update, counted from 0. Needs no PyTorch.

Learning rates rise from `first` to `peak` in the warm-up, fall to `last` at the end of the schedule, and stay there.
"""

from dataclasses import dataclass
from math import cos, pi
from typing import NamedTuple

from polaformer.training.settings import Settings
from polaformer.training.timeline import Timeline


class Values(NamedTuple):
    """Learning rate and momentum of an update."""

    lr: float
    momentum: float | None  # None: the optimiser's own


@dataclass(frozen=True)
class Curve:
    """The parameters of every schedule; the learning rates are already scaled to the batch size."""

    steps: int
    warmup_steps: int
    peak: float
    first: float
    last: float


def values_at(step: int, settings: Settings, timeline: Timeline) -> Values:
    """Learning rate and momentum of update `step` according to `settings.schedule`."""
    rates = (settings.scaled(rate) for rate in (settings.lr, settings.warmup_lr, settings.min_lr))
    curve = Curve(timeline.schedule_steps, timeline.warmup_steps, *rates)
    if settings.schedule == "cosine":
        return Values(cosine(step, curve), None)
    if settings.schedule == "one-cycle":
        return _one_cycle_values(step, curve, settings)
    if settings.schedule == "polynomial":
        rate = polynomial(step, curve, settings.poly_power)
    elif settings.schedule == "multi-step":
        rate = multi_step(step, curve, timeline.milestones, settings.lr_decay)
    elif settings.schedule == "constant":
        rate = curve.peak
    else:
        raise ValueError(f"there is no schedule {settings.schedule!r}")
    return Values(rate * warmup_factor(step, curve), None)


def cosine(step: int, curve: Curve) -> float:
    """The authors' schedule, bit-identical to timm's `CosineLRScheduler`.

    first + step · (peak − first) / warmup_steps in the warm-up, then last + ½ (peak − last) (1 + cos(π step / steps)). The
    cosine starts at the first update, so the learning rate drops where the warm-up ends.
    """
    if step < curve.warmup_steps:
        return curve.first + step * ((curve.peak - curve.first) / curve.warmup_steps)
    if step >= curve.steps:
        return curve.last
    return curve.last + 0.5 * (curve.peak - curve.last) * (1 + cos(pi * step / curve.steps))


def one_cycle(step: int, steps: int, warmup_steps: int, values: tuple[float, float, float], anneal: str) -> float:
    """PyTorch's `OneCycleLR` with pct_start = warmup_steps / steps: from the first of three values to the second and the third.

    As in PyTorch, the peak is at update warmup_steps − 1, the last of the warm-up, and the end at update steps − 1. Without
    warm-up the first update is one step past the peak.
    """
    first, peak, last = values
    top, end = warmup_steps - 1, steps - 1
    if step > end:
        return last
    if step > top:
        return _anneal(peak, last, (step - top) / (end - top), anneal)
    return _anneal(first, peak, step / top, anneal) if top else peak


def polynomial(step: int, curve: Curve, power: float) -> float:
    """last + (peak − last) (1 − step / steps)^power, mmcv's `poly`, without warm-up."""
    left = max(0.0, 1 - step / curve.steps)
    return curve.last + (curve.peak - curve.last) * left**power


def multi_step(step: int, curve: Curve, milestones: tuple[int, ...], decay: float) -> float:
    """peak · decay^(number of milestones ≤ step), PyTorch's `MultiStepLR`, without warm-up."""
    return curve.peak * decay ** sum(milestone <= step for milestone in milestones)


def warmup_factor(step: int, curve: Curve) -> float:
    """mmcv's linear warm-up, a factor of the scheduled learning rate: w + (1 − w) step / warmup_steps with w = first / peak."""
    if step >= curve.warmup_steps:
        return 1.0
    least = curve.first / curve.peak
    return least + (1 - least) * step / curve.warmup_steps


def _one_cycle_values(step: int, curve: Curve, settings: Settings) -> Values:
    rates = curve.first, curve.peak, curve.last
    rate = one_cycle(step, curve.steps, curve.warmup_steps, rates, settings.anneal)
    if settings.momentum_cycle is None:
        return Values(rate, None)
    ends, peak = settings.momentum_cycle
    return Values(rate, one_cycle(step, curve.steps, curve.warmup_steps, (ends, peak, ends), settings.anneal))


def _anneal(start: float, end: float, share: float, anneal: str) -> float:
    if anneal == "linear":
        return (end - start) * share + start
    return end + (start - end) / 2.0 * (cos(pi * share) + 1)
