"""When a training run logs, evaluates, saves and ends."""

import subprocess
import sys
from typing import Any

import pytest

from polaformer.training.settings import Settings
from polaformer.training.timeline import Timeline

PER_EPOCH = 7


def timeline(**changes: Any) -> Timeline:
    return Timeline(Settings(**{"epochs": 4, "warmup_epochs": 1, "log_every": 3} | changes), PER_EPOCH)


def steps_where(is_due: Any, end: int) -> list[int]:
    return [step for step in range(1, end + 1) if is_due(step)]


def test_times_and_schedules_are_known_without_pytorch() -> None:
    code = "import sys, polaformer.training.schedules; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_epochs_are_counted_in_updates() -> None:
    found = timeline(cooldown_epochs=2)
    assert (found.schedule_steps, found.warmup_steps, found.total) == (28, 7, 42)


def test_a_budget_of_updates_replaces_the_epochs() -> None:
    found = timeline(steps=10, warmup_steps=3, cooldown_epochs=1)
    assert (found.schedule_steps, found.warmup_steps, found.total) == (10, 3, 17)
    assert (timeline(steps=10).schedule_steps, timeline(steps=10).warmup_steps) == (10, 7)
    assert (timeline(warmup_steps=3).schedule_steps, timeline(warmup_steps=3).warmup_steps) == (28, 3)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, [3, 6, 7, 9, 12, 14, 15, 18, 21, 24, 27, 28]),
        ({"log_every": 50}, [7, 14, 21, 28]),
        ({"steps": 10}, [3, 6, 7, 9, 10]),
        ({"log_every_epochs": 1}, [7, 14, 21, 28]),
        ({"log_every_epochs": 3}, [21, 28]),
        ({"log_every_epochs": 1, "steps": 10}, [7, 10]),
    ],
)
def test_lines_of_the_journal_come_at_the_end_of_each_epoch_and_between(changes: dict[str, Any], wanted: list[int]) -> None:
    found = timeline(**changes)
    assert steps_where(found.logs_after, found.total) == wanted


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, [7, 14, 21, 28]),
        ({"eval_every": 3}, [21, 28]),
        ({"eval_every": 3, "eval_every_steps": 9}, [9, 18, 27, 28]),
        ({"steps": 10}, [7, 10]),
        ({"steps": 10, "eval_every_steps": 4}, [4, 8, 10]),
    ],
)
def test_evaluations_come_at_the_end_in_any_case(changes: dict[str, Any], wanted: list[int]) -> None:
    found = timeline(**changes)
    assert steps_where(found.evaluates_after, found.total) == wanted


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, [7, 14, 21, 28]),
        ({"save_every": 10}, [10, 20, 28]),
        ({"save_every_epochs": 3}, [21, 28]),
        ({"save_every_epochs": 2, "cooldown_epochs": 1}, [14, 28, 35]),
        ({"steps": 10, "save_every": 4}, [4, 8, 10]),
    ],
)
def test_checkpoints_come_at_the_end_in_any_case(changes: dict[str, Any], wanted: list[int]) -> None:
    found = timeline(**changes)
    assert steps_where(found.saves_after, found.total) == wanted


def test_an_epoch_that_the_training_ends_within_ends_there() -> None:
    assert steps_where(timeline(steps=10).ends_epoch, 10) == [7, 10]
    assert steps_where(timeline().ends_epoch, 28) == [7, 14, 21, 28]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup_steps": 29}, "warmup_steps is 29, but the schedule has only 28; give --warmup-steps ≤ 28"),
        ({"steps": 6}, "warmup_epochs is 1, which is 7 updates with this data, but the schedule has only 6"),
        ({"steps": 7, "cooldown_epochs": 2}, "cooldown_epochs is 2, which is 14 updates with this data, more than the 7"),
    ],
)
def test_what_only_the_data_show_to_be_wrong_is_told(changes: dict[str, Any], message: str) -> None:
    found = timeline(**changes)
    assert found.settings.problems() == []
    [problem] = found.problems()
    assert message in problem


@pytest.mark.parametrize("changes", [{}, {"warmup_steps": 28}, {"steps": 7}, {"epochs": 1, "cooldown_epochs": 9}])
def test_what_fits_the_data_is_no_problem(changes: dict[str, Any]) -> None:
    assert timeline(**changes).problems() == []
