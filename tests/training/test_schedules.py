"""Learning rates and momenta against timm's and PyTorch's schedulers, mmcv's formulas and explicit numbers."""

from math import cos, isclose, pi
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from timm.scheduler import CosineLRScheduler
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR, PolynomialLR

from polaformer.training.optim import Schedule
from polaformer.training.schedules import Values, values_at
from polaformer.training.settings import SCHEDULES, Settings
from polaformer.training.timeline import Timeline


def values(per_epoch: int = 10, **changes: Any) -> list[Values]:
    settings = Settings(**{"lr_images": 0, "epochs": 1, "warmup_epochs": 0} | changes)
    assert settings.problems() == []
    timeline = Timeline(settings, per_epoch)
    return [values_at(step, settings, timeline) for step in range(timeline.total)]


def rates(per_epoch: int = 10, **changes: Any) -> list[float]:
    return [found.lr for found in values(per_epoch, **changes)]


def one_parameter(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    return kind([torch.nn.Parameter(torch.zeros(1))], **options)


def stepped(scheduler: Any, steps: int, read: Any) -> list[Any]:
    """What `read` returns for the optimiser's group before each of `steps` updates."""
    found = []
    for _ in range(steps):
        found.append(read(scheduler.optimizer.param_groups[0]))
        scheduler.optimizer.step()
        scheduler.step()
    return found


lengths = some.tuples(some.integers(1, 40), some.integers(0, 40), some.integers(0, 3), some.integers(1, 30))
levels = some.tuples(some.floats(1e-8, 1.0), some.floats(0.0, 1.0), some.floats(0.0, 1.0))


@given(lengths=lengths, levels=levels, batch_size=some.integers(1, 9999))
def test_law_cosine_is_timms_to_the_last_bit(
    lengths: tuple[int, int, int, int], levels: tuple[float, float, float], batch_size: int
) -> None:
    epochs, warmup, cooldown, per_epoch = lengths
    peak, first, last = levels[0], levels[0] * levels[1], levels[0] * levels[2]
    settings = Settings(
        epochs=epochs,
        warmup_epochs=min(warmup, epochs),
        cooldown_epochs=cooldown,
        batch_size=batch_size,
        lr=peak,
        warmup_lr=first,
        min_lr=last,
    )
    optimizer = one_parameter(lr=settings.scaled(peak))
    timms = CosineLRScheduler(
        optimizer,
        t_initial=epochs * per_epoch,
        lr_min=settings.scaled(last),
        warmup_t=settings.warmup_epochs * per_epoch,
        warmup_lr_init=settings.scaled(first),
        cycle_limit=1,
        t_in_epochs=False,
    )
    timeline = Timeline(settings, per_epoch)
    for step in range(0, timeline.total, 1 + timeline.total // 50):
        timms.step_update(step)
        assert values_at(step, settings, timeline) == (optimizer.param_groups[0]["lr"], None), step


def test_cosine_is_its_formula() -> None:
    found = rates(lr=1.0, warmup_lr=0.1, min_lr=0.02, steps=20, warmup_steps=4, cooldown_epochs=1)
    wanted = [0.1 + 0.9 * step / 4 for step in range(4)]
    wanted += [0.02 + 0.98 * (1 + cos(pi * step / 20)) / 2 for step in range(4, 20)] + [0.02] * 10
    assert found == pytest.approx(wanted, rel=1e-14)


LONG_RANGE_ARENA = [
    (1e-4, 1000),
    (1e-4, 80),
    (2e-4, 800),
    (2e-4, 312),
    (1e-4, 175),
]  # peak and warm-up of 50,000 updates


@pytest.mark.filterwarnings("ignore:To get the last learning rate")
@pytest.mark.parametrize(("lr", "warmup"), LONG_RANGE_ARENA)
def test_one_cycle_of_the_long_range_arena_is_pytorchs(lr: float, warmup: int) -> None:
    """OneCycleLR(max_lr=lr, pct_start=warmup / steps, anneal_strategy="linear", total_steps=steps), at some updates."""
    steps = 50_000
    optimizer = one_parameter(lr=lr)
    wanted = OneCycleLR(optimizer, max_lr=lr, pct_start=warmup / steps, anneal_strategy="linear", total_steps=steps)
    settings = Settings(
        schedule="one-cycle",
        anneal="linear",
        steps=steps,
        warmup_steps=warmup,
        lr=lr,
        warmup_lr=lr / 25,
        min_lr=lr / 25 / 1e4,
        lr_images=0,
        momentum_cycle=(0.95, 0.85),
    )
    assert settings.problems() == []
    for step in (0, 1, warmup // 2, warmup - 2, warmup - 1, warmup, warmup + 1, 10_000, 33_333, steps - 2, steps - 1):
        wanted.last_epoch = step
        found = values_at(step, settings, Timeline(settings, 1000))
        assert isclose(found.lr, wanted.get_lr()[0], rel_tol=1e-12, abs_tol=1e-15 * lr), step
        assert found.momentum == pytest.approx(optimizer.param_groups[0]["betas"][0], rel=1e-12), step


@pytest.mark.parametrize("anneal", ["linear", "cosine"])
@pytest.mark.parametrize(("steps", "warmup"), [(20, 0), (20, 2), (20, 7), (7, 6), (1, 0), (100, 30)])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_one_cycle_is_pytorchs(anneal: str, steps: int, warmup: int, kind: type[torch.optim.Optimizer]) -> None:
    names = {"cosine": "cos", "linear": "linear"}
    optimizer = one_parameter(kind, lr=0.3)
    pytorchs = OneCycleLR(
        optimizer,
        max_lr=0.3,
        pct_start=warmup / steps,
        anneal_strategy=names[anneal],
        total_steps=steps,
        div_factor=5,
        final_div_factor=20,
        base_momentum=0.7,
        max_momentum=0.9,
    )

    def read(group: dict[str, Any]) -> tuple[float, float]:
        return group["lr"], group["betas"][0] if "betas" in group else group["momentum"]

    wanted = stepped(pytorchs, steps, read)
    rates = {"lr": 0.3, "warmup_lr": 0.3 / 5, "min_lr": 0.3 / 5 / 20}
    found = values(schedule="one-cycle", anneal=anneal, steps=steps, warmup_steps=warmup, momentum_cycle=(0.9, 0.7), **rates)
    assert len(found) == steps
    for mine, (lr, momentum) in zip(found, wanted, strict=True):
        assert mine.lr == pytest.approx(lr, rel=1e-12)
        assert mine.momentum == pytest.approx(momentum, rel=1e-12)


def test_one_cycle_may_begin_or_end_at_its_peak() -> None:
    """With one update of warm-up, and with only warm-up; PyTorch divides by zero in both cases."""
    cycle: dict[str, Any] = {"schedule": "one-cycle", "anneal": "linear", "lr": 1.0, "warmup_lr": 0.2, "min_lr": 0.0}
    assert rates(steps=5, warmup_steps=1, **cycle) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert rates(2, steps=5, warmup_steps=5, cooldown_epochs=1, **cycle) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 0.0, 0.0])


def test_one_cycle_rises_falls_and_stays() -> None:
    cycle: dict[str, Any] = {"schedule": "one-cycle", "anneal": "linear", "lr": 1.0, "warmup_lr": 0.5, "min_lr": 0.2}
    found = values(2, steps=7, warmup_steps=3, cooldown_epochs=1, momentum_cycle=(0.9, 0.8), **cycle)
    assert [one.lr for one in found] == pytest.approx([0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    assert [one.momentum for one in found] == pytest.approx([0.9, 0.85, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9, 0.9])
    assert {one.momentum for one in values(2, steps=7, warmup_steps=3, **cycle)} == {None}


def mmcv_linear_warmup(rate: float, step: int, warmup: int, ratio: float) -> float:
    """mmcv's LrUpdaterHook.get_warmup_lr for warmup="linear"."""
    if step >= warmup:
        return rate
    k = (1 - step / warmup) * (1 - ratio)
    return rate * (1 - k)


@pytest.mark.parametrize(("power", "last"), [(0.9, 0.0), (1.0, 0.0), (2.5, 1e-5)])
def test_polynomial_is_mmcvs(power: float, last: float) -> None:
    """PolyLrUpdaterHook with the warm-up of Swin segmentation (1,500 updates from lr / 1e6), scaled down."""
    lr, steps, warmup = 6e-5, 160, 15
    found = rates(
        schedule="polynomial", poly_power=power, steps=steps, warmup_steps=warmup, lr=lr, warmup_lr=6e-11, min_lr=last
    )
    for step, rate in enumerate(found):
        coefficient = (1 - step / steps) ** power
        assert rate == pytest.approx(mmcv_linear_warmup((lr - last) * coefficient + last, step, warmup, 1e-6), rel=1e-12)


@pytest.mark.parametrize("power", [0.9, 1.0])
def test_polynomial_without_warm_up_is_pytorchs(power: float) -> None:
    wanted = stepped(PolynomialLR(one_parameter(lr=0.2), total_iters=40, power=power), 40, lambda group: group["lr"])
    assert rates(schedule="polynomial", poly_power=power, steps=40, lr=0.2, min_lr=0.0) == pytest.approx(wanted, rel=1e-12)


def test_polynomial_stays_at_the_smallest_rate() -> None:
    found = rates(schedule="polynomial", epochs=1, cooldown_epochs=2, lr=1.0, min_lr=0.1)
    assert found[10:] == [0.1] * 20
    assert min(found[:10]) > 0.1


@pytest.mark.parametrize(("epochs", "milestones"), [(12, (8, 11)), (36, (27, 33))])
def test_multi_step_of_detection_drops_tenfold_at_its_epochs(epochs: int, milestones: tuple[int, int]) -> None:
    """mmdetection's schedules 1x and 3x, with 500 updates of warm-up from lr / 1000."""
    per_epoch, lr = 600, 1e-4
    found = rates(
        per_epoch, schedule="multi-step", epochs=epochs, milestones=milestones, warmup_steps=500, lr=lr, warmup_lr=1e-7
    )
    pytorchs = MultiStepLR(one_parameter(lr=lr), list(milestones), gamma=0.1)
    of_epochs = stepped(pytorchs, epochs, lambda group: group["lr"])
    for step, rate in enumerate(found):
        assert rate == pytest.approx(mmcv_linear_warmup(of_epochs[step // per_epoch], step, 500, 1e-3), rel=1e-12)


def test_milestones_are_updates_where_the_budget_is() -> None:
    found = rates(schedule="multi-step", steps=6, milestones=(2, 5), lr_decay=0.5, lr=1.0, cooldown_epochs=0)
    assert found == [1.0, 1.0, 0.5, 0.5, 0.5, 0.25]
    assert rates(2, schedule="multi-step", epochs=2, milestones=(1,), cooldown_epochs=1, lr=1.0)[2:] == [0.1] * 4


def test_constant_is_constant_after_its_warm_up() -> None:
    found = rates(schedule="constant", warmup_steps=4, lr=1.0, warmup_lr=0.2, cooldown_epochs=1)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8] + [1.0] * 16)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_begins_at_the_first_rate_stays_in_bounds_and_follows_the_batch_size(schedule: str) -> None:
    changes: dict[str, Any] = {"schedule": schedule, "milestones": (2,) if schedule == "multi-step" else ()}
    changes |= {"epochs": 4, "warmup_epochs": 1, "lr": 0.4, "warmup_lr": 0.001, "min_lr": 0.0005}
    found = rates(**changes)
    assert found[0] == pytest.approx(0.001)
    assert all(0 < rate <= 0.4 for rate in found)
    doubled = rates(**changes | {"lr_images": 512, "batch_size": 1024})
    assert doubled == pytest.approx([2 * rate for rate in found], rel=1e-12)


def test_groups_get_the_rate_times_their_scale_and_the_momentum() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    groups = [{"params": [parameters[0]], "lr_scale": 0.25}, {"params": [parameters[1]], "lr_scale": 1.0}]
    settings = Settings(schedule="one-cycle", momentum_cycle=(0.9, 0.8), lr_images=0, steps=9, warmup_steps=3)
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = kind([dict(group) for group in groups] + [{"params": [parameters[2]]}], lr=1.0)
        schedule = Schedule(optimizer, settings, 10)
        for step in (0, 5, 2):
            rate, momentum = values_at(step, settings, Timeline(settings, 10))
            assert schedule.set(step) == rate
            assert [group["lr"] for group in optimizer.param_groups] == [0.25 * rate, rate, rate]
            for group in optimizer.param_groups:
                assert group["betas"] == (momentum, 0.999) if kind is torch.optim.AdamW else group["momentum"] == momentum


def test_without_a_cycle_the_momentum_is_the_optimisers_own() -> None:
    optimizer = one_parameter(lr=1.0, betas=(0.8, 0.9))
    Schedule(optimizer, Settings(schedule="one-cycle"), 10).set(3)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
