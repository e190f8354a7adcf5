"""Alternating timing, the ratios it gives, and what is said about the machine."""

import json
import platform
from collections.abc import Callable

import pytest

from polaformer.bench.machine import ProcessorUse, fingerprint, processor_use, share_of_others
from polaformer.bench.measure import Timing, measure, slowdown


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


def test_a_slow_callable_drops_out_after_its_share_and_the_quick_one_goes_on() -> None:
    clock = Clock()
    timings = measure({"slow": clock.task("s", 3), "fast": clock.task("f", 0.1)}, rounds=5, seconds=10, clock=clock)
    assert len(timings["slow"].samples) == 2
    assert len(timings["fast"].samples) == 5


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
    assert slowdown(slow, fast) == 2.0
    assert slowdown(Timing((), 9), fast) is None


def test_the_fingerprint_names_the_machine_but_not_the_host() -> None:
    found = fingerprint()
    assert found["cpu"]
    assert found["cores"] >= 1
    assert found["torch_threads"] >= 1
    assert found["python"] == platform.python_version()
    assert platform.node() not in json.dumps(found).replace('"', " ").split()


def test_the_share_of_other_programs_is_what_this_one_did_not_use() -> None:
    cores = fingerprint()["cores"]
    before, after = ProcessorUse(100, 5, 50), ProcessorUse(100 + 6 * cores, 5 + 2 * cores, 60)
    assert share_of_others(before, after) == pytest.approx(0.4)
    assert share_of_others(before, before) is None
    assert share_of_others(None, after) is None


def test_processor_counters_only_grow() -> None:
    first, second = processor_use(), processor_use()
    if first is None or second is None:
        pytest.skip("the system does not tell")
    assert 0 < first.own <= second.own
    assert 0 < first.everyone <= second.everyone
