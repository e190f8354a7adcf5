"""The benchmark of the operator, and its refusal to time what is wrong."""

import pytest
import torch
from torch import Tensor

from polaformer.bench.agreement import Attention, Difference, differences, random_inputs, worst
from polaformer.bench.length import slope, time_at
from polaformer.bench.op import CONTENDERS, TOLERANCE, YARDSTICK, Contender, benchmark, correctness
from polaformer.ops import reference
from polaformer.ops.polarity import polarity_attention

SHAPE = (1, 2, 24, 6)


def contender(attention: Attention) -> Contender:
    return Contender(lambda _: attention, reference.polarity_attention)


def wrong_value(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
    return polarity_attention(q, k, v, power) * (1 + 1e-4)


def wrong_gradient(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
    return polarity_attention(q, k, v, power.detach())


def not_a_number(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
    return polarity_attention(q, k, v, power) * float("nan")


@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_computes_what_it_should_at_even_and_odd_widths(name: str) -> None:
    assert correctness(CONTENDERS[name], (4, 4, 3136, 32)) < TOLERANCE / 10
    assert correctness(CONTENDERS[name], (1, 2, 37, 7)) < TOLERANCE / 5


@pytest.mark.parametrize("wrong", [wrong_value, wrong_gradient, not_a_number])
def test_a_wrong_backend_is_refused_and_gets_no_number(wrong: Attention) -> None:
    rows = benchmark(SHAPE, rounds=1, contenders={"wrong": contender(wrong), YARDSTICK: CONTENDERS[YARDSTICK]})
    assert not rows["wrong"].error <= TOLERANCE
    assert not rows["wrong"].correct
    assert rows["wrong"].timing is None
    assert rows["wrong"].speedup is None
    assert rows[YARDSTICK].correct


def test_an_error_that_shows_only_at_the_timed_length_is_found() -> None:
    def wrong_beyond_a_thousand(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
        return polarity_attention(q, k[:, :, :1000], v[:, :, :1000], power)

    assert correctness(contender(wrong_beyond_a_thousand), (1, 2, 900, 8)) < TOLERANCE
    assert correctness(contender(wrong_beyond_a_thousand), (1, 2, 2000, 8)) > TOLERANCE


def test_if_all_are_wrong_nothing_is_timed() -> None:
    rows = benchmark(SHAPE, contenders={"wrong": contender(wrong_value)})
    assert [row.timing for row in rows.values()] == [None]


@pytest.mark.parametrize("backward", [False, True])
def test_every_contender_gets_a_time_and_a_ratio_to_the_published_form(backward: bool) -> None:
    rows = benchmark(SHAPE, backward=backward, rounds=2)
    assert list(rows) == list(CONTENDERS)
    for row in rows.values():
        assert row.timing is not None
        assert len(row.timing.samples) == 2
        assert row.speedup is not None
        assert row.speedup > 0
    assert rows[YARDSTICK].speedup == 1.0


@pytest.mark.parametrize("backward", [False, True])
def test_gradients_are_recorded_only_when_the_backward_pass_is_timed(backward: bool) -> None:
    recorded: list[bool] = []

    def watched(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
        out = polarity_attention(q, k, v, power)
        recorded.append(out.requires_grad)
        return out

    benchmark(SHAPE, backward=backward, rounds=3, contenders={"watched": contender(watched)})
    assert recorded == [True] + 4 * [backward]  # the check, the warm-up, three rounds


def test_what_takes_too_long_is_skipped_but_not_called_incorrect() -> None:
    row = benchmark(SHAPE, seconds=1e-9)[YARDSTICK]
    assert row.correct
    assert row.as_record()["median"] is None
    assert row.timing is not None
    assert row.timing.first > 0


def test_differences_compare_the_output_and_the_gradients_of_all_four_inputs() -> None:
    found = differences(polarity_attention, reference.polarity_attention, random_inputs(SHAPE, dtype=torch.float64))
    assert list(found) == ["output", "q", "k", "v", "power"]
    assert worst(found) < 1e-13


def test_the_worst_difference_is_nan_wherever_the_nan_stands() -> None:
    fine, broken = Difference(0, 0.5, 0, 0), Difference(float("nan"), float("nan"), 1, 0)
    for found in ({"a": fine, "b": broken}, {"a": broken, "b": fine}):
        assert worst(found) != worst(found)


def test_at_extreme_magnitudes_the_published_form_fails_where_the_operator_does_not() -> None:
    for magnitude in (1e-20, 1e20):
        inputs = random_inputs((2, 2, 16, 8), magnitude=magnitude, power=3.0)
        ours = worst(differences(polarity_attention, reference.polarity_attention, inputs))
        published = worst(differences(reference.published_polarity_attention, reference.polarity_attention, inputs))
        assert ours < 1e-4
        assert not published < 0.9


def test_the_slope_of_a_power_law_is_its_exponent() -> None:
    lengths = [100, 200, 400, 800]
    assert slope(lengths, [3e-6 * n**1.7 for n in lengths]) == pytest.approx(1.7)
    assert slope(lengths, [None, 1.0, 2.0, 4.0]) == pytest.approx(1.0)


def test_a_single_measured_length_has_no_slope() -> None:
    assert slope([100, 200], [1.0, None]) is None
    assert slope([100, 100], [1.0, 2.0]) is None


def test_time_at_a_length_times_both_mechanisms_in_the_same_rounds() -> None:
    point = time_at(16, rounds=3)
    assert len(point.polarity.samples) == len(point.softmax.samples) == 3
    assert point.as_record()["speedup"] == point.speedup
