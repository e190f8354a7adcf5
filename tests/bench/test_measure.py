"""Alternating timing and the ratios it gives."""

from collections.abc import Callable

import pytest

from polaformer.bench.measure import Ratio, Timing, measure, noise, plan, ranks, slowdown

CALM, WILD = Timing((1.0,) * 15, 0), Timing((1.0, 4.0, 3.0) * 5, 0)  # the interval of WILD is ×4


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


def times(*factors: float) -> Timing:
    """Fifteen rounds, the machine twice as slow in every second one, each of the factors in turns."""
    return Timing(tuple((1 + index % 2) * factors[index % len(factors)] for index in range(15)), 0)


def test_ranks_are_ranges_where_the_order_of_two_is_not_certain() -> None:
    timings = {
        "fast": times(1.0),
        "a": times(2.0, 2.1),
        "b": times(2.1, 2.0),
        "slow": times(3.0, 3.5, 4.0),
        "few": Timing((9.0,) * 5, 0),
    }
    assert ranks(timings) == {"fast": (1, 1), "a": (2, 3), "b": (2, 3), "slow": (4, 4)}


def test_timings_are_refused_where_more_than_a_quarter_is_noisy() -> None:
    rows = {"softmax": CALM, "pola": CALM, "a": CALM}
    assert noise(rows | {"b": WILD}, "softmax") == {}
    refused = noise(rows | {"a": Timing((1.0, 2.0) * 7, 0), "b": WILD}, "softmax")
    assert refused == dict.fromkeys(["softmax", "pola", "a", "b"], "too noisy: 2 of 4 timings, up to ×4.00")
    assert noise({}, "softmax") == {}


def test_timings_are_refused_where_the_baseline_alone_is_noisy() -> None:
    """All five are slow in the same rounds: their ratios are 1, but their times say nothing."""
    rows = dict.fromkeys(["softmax", "pola", "a", "b", "c"], WILD)
    assert noise(rows, "softmax") == dict.fromkeys(rows, "too noisy: softmax ×4.00")


@pytest.mark.parametrize("rounds", [2, 3, 4, 5])
def test_timings_of_few_rounds_that_disagree_are_refused(rounds: int) -> None:
    few = Timing((1.0, 9.0, 1.0, 9.0, 1.0)[:rounds], 0)
    assert noise({"softmax": few, "pola": CALM}, "softmax") == dict.fromkeys(["softmax", "pola"], "too noisy: softmax ×9.00")
    assert noise({"softmax": Timing((1.0,), 0), "pola": few}, "softmax") == {}  # one round cannot disagree


@pytest.mark.parametrize("baseline", [{}, {"softmax": Timing((), 99)}])
def test_where_the_baseline_has_no_time_the_times_of_each_row_are_judged(baseline: dict[str, Timing]) -> None:
    rows = {"pola": CALM, "a": CALM, "b": CALM}
    assert noise(baseline | rows | {"c": WILD}, "softmax") == {}
    refused = noise(baseline | rows | {"b": WILD, "c": WILD}, "softmax")
    assert refused == dict.fromkeys(["pola", "a", "b", "c"], "too noisy: 2 of 4 timings, up to ×4.00")
