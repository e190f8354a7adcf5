"""How far an attention is from its reference: output and gradients."""

import torch

from polaformer.analysis.agreement import Difference, differences, random_inputs, worst
from polaformer.bench.contenders import softmax_by_maps
from polaformer.ops.polarity import reference
from polaformer.ops.polarity.operator import polarity_attention

SHAPE = (1, 2, 24, 6)


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


def test_inputs_without_a_size_leave_the_error_as_it_is() -> None:
    inputs = random_inputs((1, 1, 4, 4), magnitude=0.0)
    assert worst(differences(lambda q, k, v, power: v + q, lambda q, k, v, power: v, inputs)) == float("inf")


def test_a_truth_in_pieces_is_the_truth() -> None:
    inputs = random_inputs((2, 2, 33, 7), dtype=torch.float64)
    for piece in (1, 10, 33, 100):
        assert worst(differences(softmax_by_maps, softmax_by_maps, inputs, piece=piece)) < 1e-14
