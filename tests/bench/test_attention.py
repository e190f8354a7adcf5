"""All attention mechanisms side by side: what is checked, measured, skipped, and in which order it comes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from polaformer.analysis.agreement import random_inputs
from polaformer.analysis.timing import Ratio, Timing
from polaformer.attention import facts, names, registry
from polaformer.attention.core import Facts
from polaformer.attention.mechanisms.linear import LinearCore
from polaformer.bench import attention, runner
from polaformer.bench.attention import (
    BOTH,
    FORWARD,
    benchmark,
    build,
    core_pass,
    relative_error,
)
from polaformer.bench.runner import BenchSettings, Cost, LengthCurve, Measurement

TINY = BenchSettings(num_heads=2, width=8, rounds=1, seconds=60.0)  # one: several may disagree, and are then refused


class WrongCore(LinearCore):
    """Its maps are not what it applies."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(q, k, v, mask) * 1.001


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, type[nn.Module]], None]:
    return lambda name, core: monkeypatch.setitem(registry._CORES, name, core)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", names())
def test_every_registered_mechanism_agrees_with_its_maps_in_float64(name: str) -> None:
    assert relative_error(name, TINY, 67) < 1e-5


@pytest.mark.parametrize("name", [name for name in names() if facts(name).approximates and facts(name).cost != "quadratic"])
def test_the_check_reaches_the_path_that_is_not_all_pairs(name: str) -> None:
    """A sparse or sampled mechanism with small options is not what it is with large ones; hedgehog has no options."""
    if name == "hedgehog":
        assert not facts(name).coarse
        return
    settings, inputs = BenchSettings(num_heads=2, width=8), random_inputs((1, 2, attention.SHORT, 8))
    small, large = (build(name, attention.SHORT, settings, **options) for options in (dict(facts(name).coarse), {}))
    with torch.no_grad(), attention.seeded(0, "cpu"):
        assert not torch.allclose(small(*inputs[:3]), large(*inputs[:3]), atol=1e-3)


def test_a_wrong_mechanism_gets_no_number_and_comes_last(register: Callable[[str, type[nn.Module]], None]) -> None:
    register("a wrong one", WrongCore)
    rows = benchmark([16, 32], ["a wrong one", "softmax"], TINY)
    assert list(rows) == ["softmax", "a wrong one"]
    assert not rows["a wrong one"].correct
    assert all(
        point == Measurement(rows["a wrong one"].error, tolerances=(1e-4, 1e-4))
        for point in rows["a wrong one"].points.values()
    )


def test_a_row_has_time_speedup_and_three_kinds_of_memory_at_every_length() -> None:
    told: list[str] = []
    rows = benchmark([32, 16], ["linear", "linformer", "softmax"], replace(TINY, on_call=told.append))
    for row in rows.values():
        assert list(row.points) == [16, 32]
        for point in row.points.values():
            assert point.timing is not None
            assert len(point.timing.samples) == 1
            assert 0 < (point.sizes["forward"] or 0) < (point.sizes["both"] or 0)
            assert (point.saved_bytes or 0) > 0
        assert row.slope() is not None
        assert (row.slope("forward") or 0) > 0
    assert rows["softmax"].points[16].speedup == Ratio(1.0, 1.0, 1.0, 1)
    assert rows["linformer"].points[32].sizes["parameter"] == 4 * 2 * 128 * 32
    last = [row.points[32].speedup for row in rows.values()]
    assert last == sorted(last, reverse=True)  # type: ignore[type-var]
    # Correctness of all before anything is measured.
    assert told[:4] == ["checking linear", "checking linformer", "checking softmax", "memory: linear, 16 tokens"]
    record = attention.as_record(rows["linformer"])
    known = {"cost": "linear", "approximates": "softmax", "stochastic": False, "cross": True}
    assert record["facts"] == known | {"together": False, "needs_length": True}
    assert record["lengths"]["32"]["time"]["rounds"] == 1
    assert record["lengths"]["32"]["forward_bytes"] > 0


def test_forward_and_backward_includes_the_gradients_of_parameters() -> None:
    gradients = core_pass(build("hedgehog", 16, TINY), random_inputs(TINY.shape(16)), backward=True)()
    assert isinstance(gradients, tuple)
    assert gradients[3] is None  # of the powers, which it does not have
    assert [tuple(x.shape) for x in gradients if x is not None] == [*[(1, 2, 16, 8)] * 3, *[(2, 8, 8)] * 2]


def test_measuring_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    relative_error("skyformer", TINY, 16)
    build("performer", 16, TINY)
    assert torch.equal(torch.rand(4), expected)


def test_parameters_are_the_same_in_every_run() -> None:
    cores = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        cores.append(build("linformer", 16, TINY))
    assert torch.equal(cores[0].projection, cores[1].projection)  # type: ignore[arg-type]


def test_cost_grows_by_class() -> None:
    assert attention.growth("linear", 256, 1024) == 4
    assert attention.growth("quadratic", 256, 1024) == 16
    assert attention.growth("n log n", 256, 1024) == pytest.approx(5)
    assert {facts(name).cost for name in names()} == {"linear", "n log n", "quadratic"}


def test_a_call_that_would_take_too_long_or_too_much_memory_is_foretold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "available_bytes", lambda: 10**9)
    setup = BenchSettings(seconds=10)
    assert attention.forecast(None, "softmax", 10**6, setup) is None
    assert attention.forecast(Cost(1024, 0.5, 10**6), "linear", 4096, setup) is None
    assert attention.forecast(Cost(1024, 1.0, 10**6), "softmax", 4096, setup) == "would take about 16 s"
    needs = attention.forecast(Cost(1024, 1e-3, 10**8), "softmax", 4096, setup)
    assert needs == "would need about 1.6 GB of memory, 0.8 GB may be used"
    # Softmax on a fused kernel takes quadratic time in linear memory.
    linear = Cost.after(Cost(256, 1e-3, 10**7), 1024, 1e-3, 4 * 10**7)
    assert linear.exponent == pytest.approx(1.0)
    assert attention.forecast(linear, "softmax", 4096, setup) is None


def test_what_is_skipped_says_why_and_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "available_bytes", lambda: 10**8)  # N² of the synthesizer at 4096 tokens take 128 MiB
    setup = BenchSettings(num_heads=2, width=8, rounds=1, seconds=5)
    made: list[tuple[str, int]] = []
    monkeypatch.setattr(
        attention, "build", lambda name, n, *rest, **more: made.append((name, n)) or build(name, n, *rest, **more)
    )
    rows = benchmark([32, 4096], ["synthesizer", "linear"], setup)
    assert list(rows) == ["linear", "synthesizer"]
    point = rows["synthesizer"].points[4096]
    assert point.timing is None
    assert point.sizes == {}
    assert set(point.reasons) == {FORWARD, BOTH}
    assert "GB may be used" in point.reasons[FORWARD]
    assert ("synthesizer", 4096) not in made
    assert rows["linear"].points[4096].timing is not None


def test_a_first_length_that_is_long_is_foretold_from_a_short_one() -> None:
    rows = benchmark([2**17, 2**18], ["softmax"], BenchSettings(num_heads=1, width=8, rounds=1, seconds=0.5))
    assert all("would take about" in point.reasons[FORWARD] for point in rows["softmax"].points.values())


@pytest.mark.parametrize(
    ("noisy", "names", "told"),
    [("softmax", ["linear", "softmax"], "softmax ×4.00"), ("linear", ["linear", "hydra"], "1 of 2 timings, up to ×4.00")],
)
def test_a_length_that_is_too_noisy_has_no_numbers_but_its_memory(
    noisy: str, names: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(calls, **_):  # type: ignore[no-untyped-def]
        return {name: Timing((1.0, 2.0, 4.0) * 5 if name == noisy else (1.0,) * 15, 0.0) for name in calls}

    monkeypatch.setattr(runner, "measure", measure)
    for row in benchmark([16, 32], names, TINY).values():
        assert row.slope() is None
        for point in row.points.values():
            assert (point.timing, point.speedup, point.rank) == (None, None, None)
            assert point.reasons[FORWARD] == f"too noisy: {told}"
            assert (point.sizes["forward"] or 0) > 0


def test_rows_without_a_time_at_the_longest_length_come_after_those_with_one() -> None:
    def row(*medians: float | None) -> LengthCurve:
        times = [None if median is None else Timing((median,), 0.0) for median in medians]
        return LengthCurve({n: Measurement(0.0, timing) for n, timing in enumerate(times)}, Facts("linear"))

    rows = {"late": row(1.0, None), "later": row(2.0, None), "slow": row(9.0, 8.0), "fast": row(9.0, 7.0)}
    assert sorted(rows, key=lambda name: attention._slowness(rows[name])) == ["fast", "slow", "late", "later"]
