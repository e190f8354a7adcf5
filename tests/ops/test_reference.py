"""The oracle against formulas written out a third time, and the published formulation."""

import pytest
import torch

from oracle import random_inputs
from polaformer.ops.polarity import reference


def test_maps_are_the_sums_of_eq6_written_as_loops():
    q, k, _, power = (x.detach() for x in random_inputs(batch=1, heads=2, queries=3, keys=4, width=3))
    same, opposite = reference.polarity_maps(q, k, power)
    for h in range(2):
        for t in range(3):
            weights = {True: torch.zeros(4).double(), False: torch.zeros(4).double()}
            for i in range(4):
                for d in range(3):
                    agree = bool(q[0, h, t, d] * k[0, h, i, d] > 0)
                    weights[agree][i] += (q[0, h, t, d] * k[0, h, i, d]).abs() ** power[h, d]
            torch.testing.assert_close(same[0, h, t], weights[True] / weights[True].sum())
            torch.testing.assert_close(opposite[0, h, t], weights[False] / weights[False].sum())


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.1])
@pytest.mark.parametrize("width", [2, 5, 6])
def test_the_published_form_is_the_same_function(width, eps):
    q, k, v, power = random_inputs(width=width)
    published = reference.published_polarity_attention(q, k, v, power, eps=eps)
    torch.testing.assert_close(published, reference.polarity_attention(q, k, v, power, eps=eps), rtol=1e-10, atol=1e-12)


def test_with_eps_rows_sum_to_slightly_less_than_one():
    q, k, _, power = random_inputs()
    same, _ = reference.polarity_maps(q, k, power, eps=1e-3)
    assert ((same.sum(-1) < 1) & (same.sum(-1) > 0.5)).all()


def test_eq4_the_signed_parts_add_up_to_the_inner_product():
    q, k, _, _ = random_inputs(power=1.0)
    log_same, log_opposite = reference._log_weights(q, k, torch.ones(3, 6), None)
    torch.testing.assert_close(log_same.exp() - log_opposite.exp(), q @ k.mT)


def test_eq5_the_subtractive_form_goes_negative_and_is_unbounded():
    """Why the paper leaves it: its rows sum to one, but with negative and with huge entries."""
    q, k, _, power = random_inputs(batch=4, queries=64, keys=64)
    weights = reference.subtractive_map(q, k, power)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(4, 3, 64, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    assert (weights < 0).any()
    assert weights.abs().max() > 10


def test_nan_is_not_hidden_and_no_keys_are_no_error():
    q, k, _, power = (x.detach() for x in random_inputs())
    assert reference.subtractive_map(q, k[:, :, :0], power).shape == (2, 3, 7, 0)
    k[0, 0, 0, 0] = float("nan")
    assert all(weights[0, 0].isnan().any() for weights in reference.polarity_maps(q, k, power))


def test_a_mask_removes_keys():
    q, k, _, power = random_inputs()
    mask = torch.tensor([[True, False, True, True, False]]).expand(2, -1)
    for masked, shorter in zip(
        reference.polarity_maps(q, k, power, mask=mask), reference.polarity_maps(q, k[:, :, mask[0]], power), strict=True
    ):
        torch.testing.assert_close(masked[..., mask[0]], shorter)
        assert (masked[..., ~mask[0]] == 0).all()
