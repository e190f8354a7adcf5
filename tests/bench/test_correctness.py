"""Correctness before every number: every row of the output and of every gradient, at the length that is timed."""

import pytest
import torch
from torch import Tensor

from polaformer.analysis.agreement import Pass, differences, random_inputs, worst
from polaformer.bench import correctness as correctness_module
from polaformer.bench.contenders import CONTENDERS, Contender, polarity_in_linear_form, working
from polaformer.bench.correctness import TOLERANCE, relative_error, relative_error_at_length
from polaformer.bench.op import benchmark, curves
from polaformer.bench.runner import BenchSettings
from polaformer.ops.polarity import reference
from polaformer.ops.polarity.operator import polarity_attention

FORMS = {"by its linear form": polarity_in_linear_form, "by maps": None}


def wrong_in(rows: slice, linear: object) -> Contender:
    """Ours with some rows of the output at zero."""

    def wrong(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
        kept = torch.ones(q.shape[2], 1)
        kept[rows] = 0
        return polarity_attention(q, k, v, power) * kept

    return Contender(lambda _: wrong, reference.polarity_attention, linear)


@pytest.mark.parametrize("linear", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("rows", [slice(1, 60), slice(97, 98), slice(195, 196)], ids=str)
def test_one_wrong_row_anywhere_is_found(rows: slice, linear: object) -> None:
    assert relative_error(wrong_in(slice(0, 0), linear), (1, 2, 196, 8)) < TOLERANCE / 5
    assert relative_error(wrong_in(rows, linear), (1, 2, 196, 8)) > 0.01


@pytest.mark.parametrize("linear", FORMS.values(), ids=FORMS)
def test_a_gradient_that_is_wrong_in_one_row_is_found(linear: object) -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
        stopped = torch.cat([q[:, :, :97], q[:, :, 97:98].detach(), q[:, :, 98:]], dim=2)
        return polarity_attention(stopped, k, v, power)

    assert relative_error(Contender(lambda _: wrong, reference.polarity_attention, linear), (1, 2, 196, 8)) > 0.001


def test_one_wrong_row_beyond_the_longest_length_with_gradients_is_found_and_gets_no_number() -> None:
    shape, wrong = (1, 1, 6000, 8), wrong_in(slice(4999, 5000), polarity_in_linear_form)
    assert relative_error(wrong, shape) < TOLERANCE
    for backward in (False, True):
        rows = benchmark([shape], {"wrong": wrong}, BenchSettings(backward=backward, rounds=1))[6000].rows
        assert not rows["wrong"].correct
        assert rows["wrong"].timing is None
    curve = curves(benchmark([(1, 1, 512, 8), shape], {"wrong": wrong}, BenchSettings(rounds=1)))["wrong"]
    assert not curve.correct
    assert [point.timing for point in curve.points.values()] == [None, None]


def test_where_an_output_is_huge_its_beginning_middle_and_end_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness_module, "WHOLE", 1000)
    monkeypatch.setattr(correctness_module, "STRETCH", 10)
    inputs = random_inputs((1, 1, 6000, 8))

    def error(row: int) -> float:
        contender = wrong_in(slice(row, row + 1), polarity_in_linear_form)
        return relative_error_at_length(contender, Pass(contender.build((1, 1, 6000, 8)), inputs, False))

    assert min(error(row) for row in (0, 9, 3000, 5990, 5999)) > 0.01
    assert error(1000) < TOLERANCE  # not looked at, as the docstring says


def test_a_linear_form_that_is_not_the_mechanism_is_found() -> None:
    def another(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
        return polarity_in_linear_form(q, k, v, power, eps=1e-3)

    assert relative_error(Contender(lambda _: another, reference.polarity_attention, another), (1, 2, 64, 8)) > TOLERANCE


@pytest.mark.parametrize("name", [name for name, one in CONTENDERS.items() if one.linear is not None])
def test_every_linear_form_equals_its_explicit_maps(name: str) -> None:
    one = CONTENDERS[name]
    assert one.linear is not None
    inputs = random_inputs((2, 2, 33, 7), dtype=torch.float64)
    assert worst(differences(one.linear, one.reference, inputs)) < 1e-12


# ---- where true gradients are 0 or almost, and what is computed is rounding ----

TINY = [(1, 1, 1, 8), (1, 2, 2, 2), (1, 1, 1, 2), (2, 3, 1, 32), (1, 1, 2, 8), (3, 2, 3, 2)]


@pytest.mark.parametrize("shape", TINY, ids=str)
def test_at_tiny_shapes_nobody_is_refused_for_rounding(shape: tuple[int, int, int, int]) -> None:
    there = {name: one for name, one in working(backward=False)[0].items() if not one.is_compiled}
    assert "polarity (torch)" in there
    for name, one in there.items():
        assert relative_error(one, shape) < TOLERANCE, name


def wrong_value(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
    return polarity_attention(q, k, v, power) * (1 + 1e-4)


def wrong_in_q(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
    return polarity_attention(q, k, v, power) + 1e-3 * (q - q.detach())


def wrong_in_k(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
    return polarity_attention(q, k, v, power) + 1e-3 * (k - k.detach())


def wrong_in_v(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
    return polarity_attention(q, k, v, power) + 1e-3 * (v - v.detach())


def wrong_in_power(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
    return polarity_attention(q, k, v, power) + 1e-3 * (power - power.detach())[:, None]


@pytest.mark.parametrize("wrong", [wrong_value, wrong_in_q, wrong_in_k, wrong_in_v, wrong_in_power])
@pytest.mark.parametrize("shape", [*TINY, (2, 4, 300, 32)], ids=str)
def test_at_tiny_shapes_too_what_is_wrong_by_a_thousandth_is_refused(wrong, shape: tuple[int, int, int, int]) -> None:
    one = Contender(lambda _: wrong, reference.polarity_attention, polarity_in_linear_form)
    assert relative_error(one, shape) > 3 * TOLERANCE
