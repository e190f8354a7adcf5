"""Positive sequence entropy (Eq. 7), and what of the paper's theorem holds."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import polaformer
from polaformer import positive_sequence_entropy as pse


def test_eq7_values():
    assert pse(torch.tensor([1.0, 1.0, 1.0, 1.0])).item() == pytest.approx(math.log(4))
    assert pse(torch.tensor([0.0, 3.0, 0.0])).item() == 0.0
    x = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    assert pse(x).item() == pytest.approx(-sum(v / 8 * math.log(v / 8) for v in (1, 2, 5)), rel=1e-14)


def test_any_axis_and_any_common_factor():
    x = torch.rand(3, 4, 5, dtype=torch.float64)
    for dim in (0, 1, 2, -1, -3):
        assert pse(x, dim=dim).shape == tuple(n for i, n in enumerate(x.shape) if i != dim % 3)
        torch.testing.assert_close(pse(x * 1e-300, dim=dim), pse(x, dim=dim))
    assert pse(torch.tensor([3e38, 3e38])).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_fp32(dtype):
    x = torch.full((60000,), 1.0, dtype=dtype)
    assert pse(x).item() == pytest.approx(math.log(60000), rel=1e-2)
    assert pse(x).dtype == dtype


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0.5, -0.25, 1.0], "holds the entry -0.25"),
        ([0.0, 0.0, 0.0], "holds only zeros"),
        ([0.5, float("nan"), -1.0], "holds the entry nan"),
        ([0.5, float("inf"), 1.0], "holds the entry inf"),
    ],
)
def test_rows_without_an_entropy_are_an_error_unless_told_otherwise(row, message):
    x = torch.tensor([[1.0, 2.0, 3.0], row])
    with pytest.raises(ValueError, match=re.escape(f"row (1,) along axis -1 of x, shape (2, 3), {message}")):
        pse(x)
    told = pse(x, invalid="nan")
    assert told[0].isfinite()
    assert told[1].isnan()


def test_gradients_are_finite_beside_zeros_and_rows_without_an_entropy():
    x = torch.tensor([[1.0, 0.0, 3.0], [0.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(pse(x, invalid="nan").nansum(), x)
    share = torch.tensor([0.25, 0.75], dtype=torch.float64)
    entropy = -(share * share.log()).sum()
    torch.testing.assert_close(gradient[0, [0, 2]], -(share.log() + entropy) / 4)
    assert gradient[0, 1].isfinite()
    assert (gradient[1] == 0).all()


def test_n5_gradcheck_and_gradgradcheck():
    x = (0.1 + torch.rand(3, 5, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(pse, (x,), atol=1e-8, rtol=1e-6)
    assert torch.autograd.gradgradcheck(pse, (x,), atol=1e-8, rtol=1e-6)


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="x is a list; give a floating-point tensor"):
        pse([1.0, 2.0])
    with pytest.raises(ValueError, match="invalid is 'ignore'; choose 'error' or 'nan'"):
        pse(torch.ones(3), invalid="ignore")
    with pytest.raises(TypeError, match=r"x has dtype torch.int64"):
        pse(torch.ones(3, dtype=torch.long))
    with pytest.raises(ValueError, match="at least one entry along axis -1"):
        pse(torch.ones(3, 0))


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20), st.floats(1.0, 8.0))
def test_law_a_power_above_one_never_raises_the_entropy_of_positive_numbers(numbers, power):
    """What holds of Theorem 1: for the numbers of a row themselves."""
    x = torch.tensor(numbers, dtype=torch.float64)
    assert pse(x**power) <= pse(x) + 1e-12


@pytest.mark.parametrize(
    ("keys", "power"), [([[1.5, 1.5], [2.0, 0.01]], 2.0), ([[1.0, 0.0], [0.9, 0.9]], 3.0)], ids=["square", "cube"]
)
def test_theorem1_does_not_hold_for_inner_products(keys, power):
    """Convex, increasing g, applied to queries and keys, can raise the entropy of a row of inner products."""
    q, k = torch.ones(2, dtype=torch.float64), torch.tensor(keys, dtype=torch.float64)
    before, after = pse(k @ q), pse((k**power) @ (q**power))
    assert after > before + 0.01


def test_theorem1_is_true_as_a_statistic():
    """On random positive queries and keys the entropy falls in nearly every row."""
    q, k = torch.rand(500, 1, 16, dtype=torch.float64), torch.rand(500, 32, 16, dtype=torch.float64)
    before, after = pse((q * k).sum(-1)), pse((q**3 * k**3).sum(-1))
    assert (after < before).double().mean() > 0.99


def test_the_public_name():
    assert polaformer.positive_sequence_entropy is pse
