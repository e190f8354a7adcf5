"""Time against the number of tokens: slopes, doublings, and what is skipped."""

from functools import partial
from itertools import count

import pytest
from torch import Tensor

from polaformer.analysis import timing
from polaformer.analysis.timing import Ratio, Timing
from polaformer.bench import runner
from polaformer.bench.contenders import BASELINE, CONTENDERS, Contender
from polaformer.bench.op import as_record, benchmark, curves
from polaformer.bench.runner import BenchSettings, LengthCurve, Measurement
from polaformer.ops.polarity import reference

LINEAR = "linear (ELU + 1)"


def time_lengths(lengths: list[int], contenders: dict[str, Contender], settings: BenchSettings) -> dict[str, LengthCurve]:
    return curves(benchmark([settings.shape(n) for n in lengths], contenders, settings))


@pytest.fixture
def _steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes one unit: real ones may vary too much to be shown."""
    monkeypatch.setattr(runner, "measure", partial(timing.measure, clock=count(step=2**-10).__next__))


def test_a_doubling_is_compared_within_rounds_and_a_step_of_four_counts_as_two() -> None:
    times = {100: Timing((1.0, 10.0, 1.0), 0), 200: Timing((2.0, 20.0, 2.0), 0), 800: Timing((8.0, 80.0, 8.0), 0), 1600: None}
    curve = LengthCurve({n: Measurement(0.0, timing) for n, timing in times.items()})
    assert curve.doublings == [Ratio(2.0, 2.0, 2.0, 3), Ratio(2.0, 2.0, 2.0, 3), None]
    assert curve.slope() == pytest.approx(1.0)


@pytest.mark.usefixtures("_steady_clock")
def test_curves_have_a_time_at_every_length_and_one_of_their_own_for_each_contender() -> None:
    contenders = {name: CONTENDERS[name] for name in (BASELINE, LINEAR)}
    told: list[str] = []
    found = time_lengths([16, 32], contenders, BenchSettings(rounds=2, num_heads=2, width=8, on_call=told.append))
    assert list(found) == list(contenders)
    assert list(found[LINEAR].points) == [16, 32]
    assert all(point.timing is not None and len(point.timing.samples) == 2 for point in found[LINEAR].points.values())
    # All lengths and contenders in turns.
    all_of_them = [f"{name}, {n} tokens" for n in (16, 32) for name in contenders]
    assert told[:2] == [f"checking {name}" for name in contenders]
    assert told[2:6] == all_of_them
    assert sorted(told[2:]) == sorted(3 * all_of_them)
    assert as_record(found[LINEAR])["times"]["16"]["rounds"] == 2


def test_a_wrong_contender_gets_no_curve() -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
        return v * power[:, None]

    curve = time_lengths([8, 16], {"wrong": Contender(lambda _: wrong, reference.polarity_attention)}, BenchSettings(width=4))[
        "wrong"
    ]
    assert not curve.correct
    assert [point.timing for point in curve.points.values()] == [None, None]


def test_lengths_that_would_take_too_long_are_skipped_with_the_reason() -> None:
    softmax = {"softmax (SDPA)": CONTENDERS["softmax (SDPA)"]}
    curve = time_lengths([64, 2**18], softmax, BenchSettings(rounds=1, seconds=3.0, num_heads=1, width=8))["softmax (SDPA)"]
    assert curve.points[64].timing is not None
    assert curve.points[2**18].timing is None
    assert (curve.points[2**18].skipped or "").startswith("would take about")
