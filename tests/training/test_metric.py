"""Which of two values of a metric is better, and how they are printed."""

import pytest

from polaformer.training.metric import Metric

NAN = float("nan")


@pytest.mark.parametrize(
    ("higher", "value", "than", "better"),
    [
        (True, 2.0, 1.0, True),
        (True, 1.0, 2.0, False),
        (True, 1.0, 1.0, False),
        (False, 1.0, 2.0, True),
        (False, 2.0, 1.0, False),
        (False, 1.0, 1.0, False),
        (True, -5.0, None, True),
        (False, 5.0, None, True),
        (True, NAN, None, False),
        (False, NAN, 1.0, False),
    ],
)
def test_of_two_values_the_better_one_and_of_equal_ones_the_earlier_is_kept(
    higher: bool, value: float, than: float | None, better: bool
) -> None:
    assert Metric("score", higher_is_better=higher).is_better(value, than) is better


def test_a_value_is_printed_with_its_unit() -> None:
    assert Metric("top5_accuracy", "%").text(98.6123) == "98.61 %"
    assert Metric("error", digits=4).text(0.12345) == "0.1235"
    assert Metric("top5_accuracy").label == "top5 accuracy"
    assert Metric("error").text(None) == "–"
