"""Alternating timing and the ratios it gives."""

import time
from collections.abc import Callable

import pytest

from polaformer.analysis.timing import Ratio, Timing, measure, plan, quickest, slope, slowdown


class Clock:
    """A clock that moves only when a callable of this test takes time."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, ""

    def __call__(self) -> float:
        return self.now

    def task(self, letter: str, *durations: float) -> Callable[[], None]:
        """A callable that takes the given seconds, call by call; the last one is repeated."""
        left = list(durations)

        def call() -> None:
            self.calls += letter
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


def test_callables_are_warmed_up_and_then_timed_in_turns() -> None:
    clock = Clock()
    measure({"a": clock.task("a", 1), "b": clock.task("b", 1), "c": clock.task("c", 1)}, rounds=9, seconds=99, clock=clock)
    rounds = [clock.calls[i : i + 3] for i in range(0, 30, 3)]
    assert rounds[0] == "abc"
    assert all(sorted(calls) == ["a", "b", "c"] for calls in rounds)
    assert len(set(rounds)) > 3  # in orders of their own: each comes after each of the others


def test_median_and_best_leave_the_warm_up_out() -> None:
    clock = Clock()
    timing = measure({"a": clock.task("a", 7, 3, 1, 5)}, rounds=3, seconds=99, clock=clock)["a"]
    assert (timing.median, timing.best, len(timing.samples)) == (3, 1, 3)


def test_a_callable_whose_warm_up_exceeds_the_time_is_skipped() -> None:
    clock = Clock()
    timings = measure({"slow": clock.task("s", 11), "fast": clock.task("f", 0.1)}, rounds=4, seconds=10, clock=clock)
    assert clock.calls == "sf" + "f" * 4
    assert (timings["slow"].median, timings["slow"].best, timings["slow"].first) == (None, None, 11)


def test_a_slow_callable_gets_the_rounds_that_the_quick_one_leaves_time_for() -> None:
    clock = Clock()
    timings = measure({"slow": clock.task("s", 3), "fast": clock.task("f", 0.1)}, rounds=5, seconds=10, clock=clock)
    assert len(timings["slow"].samples) == 3
    assert len(timings["fast"].samples) == 5


def test_a_time_and_its_ratio_to_the_baseline_are_of_the_same_rounds() -> None:
    """In other rounds the machine was twice as slow: a median over more rounds than those of the ratio would contradict it."""
    clock = Clock()
    calls = {
        "softmax": clock.task("s", 1, 1, 1, 1, 2),
        "pola": clock.task("p", 0.1, 0.1, 0.1, 0.1, 0.2),
        "slow": clock.task("x", 4),
    }
    timings = measure(calls, baseline="softmax", rounds=15, seconds=12, clock=clock)
    assert [len(one.samples) for one in timings.values()] == [6, 6, 1]  # softmax may take half of the time
    ratio = slowdown(timings["softmax"], timings["pola"])
    assert ratio is not None
    assert ratio.rounds == len(timings["pola"].samples)
    assert ratio.median * timings["pola"].median == pytest.approx(timings["softmax"].median)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("each", "seconds", "rounds"),
    [
        ({"base": 1.0, "quick": 0.01, "slow": 15.0}, 150, {"base": 15, "quick": 15, "slow": 8}),
        ({"base": 10.0, "quick": 0.01, "slow": 2.0}, 20, {"base": 1, "quick": 1, "slow": 1}),
        ({"quick": 0.01, "slow": 2.0}, 20, {"quick": 15, "slow": 9}),
        ({"base": 0.0, "quick": 0.0}, 1, {"base": 15, "quick": 15}),
    ],
)
def test_no_callable_has_more_rounds_than_the_baseline(each: dict[str, float], seconds: float, rounds: dict[str, int]) -> None:
    assert plan(each, 15, seconds, "base") == rounds


def test_every_call_is_announced_before_it_starts() -> None:
    clock, told = Clock(), []
    measure({"a": clock.task("a", 1)}, rounds=2, seconds=99, clock=clock, on_call=lambda name: told.append(name + clock.calls))
    assert told == ["a", "aa", "aaa"]


@pytest.mark.parametrize(("rounds", "seconds"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_no_rounds_or_no_time_is_refused(rounds: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="at least one round and a positive time"):
        measure({"a": lambda: None}, rounds=rounds, seconds=seconds)


def test_a_ratio_compares_within_rounds_so_that_a_busy_spell_cancels() -> None:
    # The second and third round ran ten times slower for both; `fast` alone saw the calm end.
    slow, fast = Timing((2.0, 20.0, 20.0), 0), Timing((1.0, 10.0, 10.0, 1.0, 1.0), 0)
    assert slowdown(slow, fast) == Ratio(2.0, 2.0, 2.0, 3)
    assert slowdown(Timing((), 9), fast) is None


@pytest.mark.parametrize(
    ("number", "low", "high"), [(1, 1, 1), (5, 1, 5), (6, 1, 6), (8, 1, 8), (9, 2, 8), (15, 4, 12), (40, 14, 27)]
)
def test_the_interval_of_a_median_is_that_of_the_sign_test(number: int, low: int, high: int) -> None:
    """It narrows with more rounds, which quartiles do not: more time gives a better answer."""
    found = Ratio.of(range(number, 0, -1))
    assert (found.low, found.high) == (low, high)
    assert found.median == (number + 1) / 2


def test_one_busy_moment_does_not_decide_what_is_skipped() -> None:
    times = iter([0.05, 0.0, 0.05])
    assert quickest(lambda: time.sleep(next(times)), enough=0.04) < 0.04
    assert next(times) == 0.05  # the second call was quick enough


def test_the_slope_of_a_power_law_is_its_exponent() -> None:
    lengths = [100, 200, 400, 800]
    assert slope(lengths, [3e-6 * n**1.7 for n in lengths]) == pytest.approx(1.7)
    assert slope(lengths, [None, 1.0, 2.0, 4.0]) == pytest.approx(1.0)


def test_a_single_measured_length_has_no_slope() -> None:
    assert slope([100, 200], [1.0, None]) is None
    assert slope([100, 100], [1.0, 2.0]) is None
