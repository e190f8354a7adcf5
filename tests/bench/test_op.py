"""The benchmark of the operator, and its refusal to time what is wrong."""

import re
from dataclasses import replace

import pytest
from torch import Tensor

from polaformer.analysis.agreement import Attention, Shape
from polaformer.bench import op, runner
from polaformer.bench.contenders import (
    BASELINE,
    COMPILED,
    CONTENDERS,
    SAFE,
    UNSAFE,
    Contender,
    compiled,
    polarity_in_linear_form,
    working,
)
from polaformer.bench.correctness import TOLERANCE, relative_error
from polaformer.bench.op import SGEMM_SIZE, OpResult
from polaformer.bench.runner import BenchSettings
from polaformer.ops.polarity import backends, reference
from polaformer.ops.polarity.operator import polarity_attention

SHAPE = (1, 2, 24, 6)
DEFAULTS = BenchSettings()


def benchmark(shape: Shape, contenders: dict[str, Contender], settings: BenchSettings = DEFAULTS) -> OpResult:
    return op.benchmark([shape], contenders, settings)[shape[2]]


def contender(attention: Attention) -> Contender:
    return Contender(lambda _: attention, reference.polarity_attention, polarity_in_linear_form)


def wrong_value(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
    return polarity_attention(q, k, v, power) * (1 + 1e-4)


def wrong_gradient(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
    return polarity_attention(q, k, v, power.detach())


def not_a_number(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
    return polarity_attention(q, k, v, power) * float("nan")


def plain(*, backward: bool = False) -> dict[str, Contender]:
    """Those that work here and need no compiler of PyTorch's, which takes seconds for every shape."""
    return {name: one for name, one in working(backward=backward)[0].items() if not one.is_compiled}


@pytest.mark.parametrize("name", [name for name in CONTENDERS if name != COMPILED])
def test_every_contender_computes_what_it_should_at_even_and_odd_widths(name: str) -> None:
    there = plain()
    if name not in there:
        pytest.skip("does not work here")
    assert relative_error(there[name], (2, 2, 784, 32)) < TOLERANCE / 10
    assert relative_error(there[name], (1, 2, 37, 7)) < TOLERANCE / 5


@pytest.mark.parametrize("wrong", [wrong_value, wrong_gradient, not_a_number])
def test_a_wrong_backend_is_refused_and_gets_no_number(wrong: Attention) -> None:
    rows = benchmark(
        SHAPE, contenders={"wrong": contender(wrong), BASELINE: CONTENDERS[BASELINE]}, settings=BenchSettings(rounds=1)
    ).rows
    assert not (rows["wrong"].error or 0.0) <= TOLERANCE
    assert not rows["wrong"].correct
    assert rows["wrong"].timing is None
    assert rows["wrong"].speedup is None
    assert rows[BASELINE].correct


def test_an_error_that_shows_only_at_the_timed_length_is_found() -> None:
    def wrong_beyond_a_thousand(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
        return polarity_attention(q, k[:, :, :1000], v[:, :, :1000], power)

    assert relative_error(contender(wrong_beyond_a_thousand), (1, 2, 900, 8)) < TOLERANCE
    assert relative_error(contender(wrong_beyond_a_thousand), (1, 2, 2000, 8)) > TOLERANCE


def test_if_all_are_wrong_nothing_is_timed() -> None:
    rows = benchmark(SHAPE, contenders={"wrong": contender(wrong_value)}).rows
    assert [row.timing for row in rows.values()] == [None]


@pytest.mark.parametrize("backward", [False, True])
def test_every_contender_gets_a_time_and_a_ratio_to_the_published_form(backward: bool) -> None:
    contenders = plain(backward=backward)
    rows = benchmark(SHAPE, contenders=contenders, settings=BenchSettings(backward=backward, rounds=1)).rows
    assert list(rows) == list(contenders)
    assert {"polarity (torch)", BASELINE, "linear (ELU + 1)", "softmax (SDPA)"} <= set(rows)
    for row in rows.values():
        assert row.timing is not None
        assert len(row.timing.samples) == 1
        assert row.speedup is not None
        assert row.speedup.median > 0
    assert rows[BASELINE].speedup == (1.0, 1.0, 1.0, 1)


@pytest.mark.parametrize("backward", [False, True])
def test_gradients_are_recorded_only_when_the_backward_pass_is_timed(backward: bool) -> None:
    recorded: list[bool] = []

    def watched(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
        out = polarity_attention(q, k, v, power)
        recorded.append(out.requires_grad)
        return out

    benchmark(SHAPE, contenders={"watched": contender(watched)}, settings=BenchSettings(backward=backward, rounds=3))
    # The check, what is saved for backward, the warm-up, three rounds.
    assert recorded == [True] + [True] * backward + 4 * [backward]


def test_what_takes_too_long_is_skipped_but_not_called_incorrect() -> None:
    row = benchmark(SHAPE, contenders={BASELINE: CONTENDERS[BASELINE]}, settings=BenchSettings(seconds=1e-9)).rows[BASELINE]
    assert row.correct
    assert row.as_record("timing")["median"] is None
    assert row.timing is not None
    assert row.timing.first > 0


def test_softmax_at_many_tokens_is_foretold_and_not_run() -> None:
    called: list[int] = []

    def watched(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
        called.append(q.shape[2])
        return CONTENDERS["softmax (SDPA)"].build(SHAPE)(q, k, v, power)

    softmax = replace(CONTENDERS["softmax (SDPA)"], build=lambda _: watched)
    contenders = {"softmax (SDPA)": softmax, "linear (ELU + 1)": CONTENDERS["linear (ELU + 1)"]}
    rows = benchmark((1, 1, 2**18, 8), contenders=contenders, settings=BenchSettings(rounds=1, seconds=3.0)).rows
    assert rows["softmax (SDPA)"].timing is None
    assert re.fullmatch(r"would take about \d+ s", rows["softmax (SDPA)"].skipped or "")
    assert rows["softmax (SDPA)"].correct
    assert max(called) == 4096
    assert rows["linear (ELU + 1)"].timing is not None


def test_what_needs_more_memory_than_is_free_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "available_bytes", lambda: 10**6)
    row = benchmark((1, 1, 8192, 8), contenders={BASELINE: CONTENDERS[BASELINE]}, settings=BenchSettings(rounds=1)).rows[
        BASELINE
    ]
    assert row.timing is None
    assert "GB of memory" in (row.skipped or "")


def test_operations_are_counted_as_dense_products_and_shown_in_what_sgemm_does() -> None:
    shape = (1, 4, 4096, 32)
    result = benchmark(shape, contenders={"polarity (torch)": CONTENDERS["polarity (torch)"]}, settings=BenchSettings(rounds=1))
    row = result.rows["polarity (torch)"]
    assert row.work == 8 * 4 * 4096 * 32**2
    assert row.timing is not None
    assert row.timing.best is not None
    assert result.sgemm_gflops is not None
    assert row.gflops == pytest.approx(row.work / row.timing.best / 1e9)
    assert row.share_of_sgemm == pytest.approx(row.gflops / result.sgemm_gflops)
    assert SGEMM_SIZE == 2048


def test_our_fastest_is_compared_with_every_other_and_the_unsafe_form_is_not_ours() -> None:
    contenders = plain()
    result = benchmark((1, 2, 64, 8), contenders=contenders, settings=BenchSettings(rounds=1))
    assert result.fastest in {name for name, one in contenders.items() if one.is_ours}
    assert all(result.rows[name].fastest_over is not None for name in contenders)
    assert result.rows[result.fastest].fastest_over == (1.0, 1.0, 1.0, 1)
    assert not CONTENDERS[UNSAFE].is_ours
    assert UNSAFE not in plain(backward=True)  # it has no derivative
    if SAFE in contenders:
        assert result.safe_over_unsafe is not None


def test_saved_bytes_are_compared_with_the_published_form() -> None:
    result = benchmark((1, 2, 64, 8), contenders=plain(backward=True), settings=BenchSettings(backward=True, rounds=1))
    rows = result.rows
    ours, published = rows["polarity (torch)"], rows[BASELINE]
    assert published.saved_ratio == 1.0
    assert ours.saved_bytes is not None
    assert published.saved_bytes is not None
    assert ours.saved_ratio == ours.saved_bytes / published.saved_bytes < 0.25


def test_a_backend_that_does_not_work_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"torch": (True, "plain"), "cpu": (False, "no compiler"), "triton": (False, "no CUDA device")}
    told = [backends.Status(name, *rest) for name, rest in known.items()]
    monkeypatch.setattr(backends, "status", lambda: told)
    there, notes = working("cpu")
    assert "polarity (torch)" in there
    assert SAFE not in there
    assert "polarity (triton)" not in there
    assert notes == ["backend 'cpu' does not work here: no compiler"]
    assert working("cuda")[1] == ["backend 'triton' does not work here: no CUDA device"]


def test_the_published_form_is_compiled_before_it_is_timed_and_computes_the_same() -> None:
    contenders = {BASELINE: CONTENDERS[BASELINE], COMPILED: CONTENDERS[COMPILED]}
    result = benchmark((1, 1, 16, 4), contenders=contenders, settings=BenchSettings(rounds=1))
    assert result.notes == []
    row = result.rows[COMPILED]
    assert row.correct
    assert row.timing is not None
    assert row.timing.first < 1.0  # compiling takes seconds


def test_what_cannot_be_compiled_is_left_out_with_a_line() -> None:
    def stubborn(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
        return polarity_attention(q, k, v, power) * len(str(q.sum().item()))

    broken = Contender(lambda _: compiled(stubborn), reference.polarity_attention, is_compiled=True)
    result = benchmark(SHAPE, contenders={BASELINE: CONTENDERS[BASELINE], "broken": broken}, settings=BenchSettings(rounds=1))
    assert list(result.rows) == [BASELINE]
    assert len(result.notes) == 1
    assert result.notes[0].startswith("broken is left out: it could not be compiled (")
    assert "\n" not in result.notes[0]
