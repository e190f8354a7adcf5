"""The ablations of the operator, and the explicit maps, against the oracle's maps."""

import pytest
import torch

from oracle import random_inputs, with_gradients
from polaformer.ops.polarity import reference, variants

MASK = torch.tensor([[True, False, True, True, False], [False, False, True, True, True]])


@pytest.mark.parametrize("eps", [0.0, 1e-2])
@pytest.mark.parametrize("mask", [None, MASK], ids=["all keys", "some keys"])
def test_maps_equal_the_oracle(mask, eps):
    q, k, _, power = random_inputs()
    for found, wanted in zip(
        variants.polarity_maps(q, k, power, mask=mask, eps=eps),
        reference.polarity_maps(q, k, power, mask=mask, eps=eps),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    found = variants.subtractive_map(q, k, power, mask=mask, eps=eps)
    torch.testing.assert_close(found, reference.subtractive_map(q, k, power, mask=mask, eps=eps), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("mask", [None, MASK], ids=["all keys", "some keys"])
def test_same_sign_attention_applies_the_same_sign_map_to_all_of_v(mask):
    inputs = random_inputs()
    cotangent = torch.randn_like(inputs[0])
    values = lambda v: v if mask is None else v * mask[:, None, :, None]  # noqa: E731
    found = with_gradients(lambda *t: variants.same_sign_attention(*t, mask=mask), inputs, cotangent)
    wanted = with_gradients(lambda q, k, v, p: reference.polarity_maps(q, k, p, mask=mask)[0] @ values(v), inputs, cotangent)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_subtractive_attention_applies_its_map():
    inputs = random_inputs(queries=3, keys=20)
    cotangent = torch.randn_like(inputs[0])
    found = with_gradients(variants.subtractive_attention, inputs, cotangent)
    wanted = with_gradients(lambda q, k, v, p: reference.subtractive_map(q, k, p) @ v, inputs, cotangent)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_same_sign_stream_is_safe_at_the_ends_of_the_range(scale):
    inputs = [
        x.detach().mul(s).requires_grad_()
        for x, s in zip(random_inputs(dtype=torch.float32), (scale, scale, 1, 1), strict=True)
    ]
    assert all(x.isfinite().all() for x in with_gradients(variants.same_sign_attention, inputs, torch.ones_like(inputs[0])))


@pytest.mark.parametrize(
    "function",
    [
        variants.same_sign_attention,
        lambda q, k, v, p: variants.subtractive_attention(q.abs(), k.abs(), v, p),  # away from sums of zero
        lambda q, k, v, p: torch.stack(variants.polarity_maps(q, k, p)) @ v,
        lambda q, k, v, p: variants.subtractive_map(q.abs(), k.abs(), p) @ v,
    ],
    ids=["same sign", "subtractive", "maps", "subtractive map"],
)
def test_n5_gradcheck_and_gradgradcheck(function):
    inputs = random_inputs(batch=1, heads=2, queries=3, keys=4, width=4)
    assert torch.autograd.gradcheck(function, inputs, atol=1e-8, rtol=1e-6)
    assert torch.autograd.gradgradcheck(function, inputs, atol=1e-8, rtol=1e-6)


def test_autocast_changes_nothing_inside():
    inputs = [x.detach() for x in random_inputs(dtype=torch.float32, queries=40, keys=40, width=16)]
    calls = (
        variants.same_sign_attention,
        variants.subtractive_attention,
        lambda q, k, v, p: variants.polarity_maps(q, k, p)[0],
    )
    plain = [f(*inputs) for f in calls]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(a, f(*inputs)) for a, f in zip(plain, calls, strict=True))
