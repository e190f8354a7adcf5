"""What the timings of a table allow to be shown: ranks, or nothing if they are too noisy."""

import pytest

from polaformer.analysis.timing import Timing
from polaformer.bench.runner import noise, ranks

CALM, WILD = Timing((1.0,) * 15, 0), Timing((1.0, 4.0, 3.0) * 5, 0)  # the interval of WILD is ×4


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
