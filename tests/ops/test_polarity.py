"""The operator against its oracle, its place in PyTorch, and what it says about bad input."""

import pytest
import torch

import polaformer
from oracle import random_inputs, relative_error, truth, with_gradients
from polaformer.ops.polarity import operator as polarity
from polaformer.ops.polarity import plain, reference
from polaformer.ops.polarity.inputs import Inputs
from polaformer.ops.polarity.operator import polarity_attention

pytestmark = pytest.mark.usefixtures("each_backend")

SHAPES = {
    "self-attention": {},
    "cross-attention": {"queries": 4, "keys": 9},
    "one key": {"keys": 1},
    "one query": {"queries": 1},
    "one of each": {"batch": 1, "heads": 1, "queries": 1, "keys": 1, "width": 2},
    "narrowest head": {"width": 2},
    "odd head": {"width": 5},
    "wide head": {"width": 33, "queries": 11, "keys": 13},
}
MASKS = {
    "no mask": None,
    "all keys": [[True] * 5, [True] * 5],
    "some keys": [[True, False, True, True, False], [False, False, True, True, True]],
    "a sample without keys": [[False] * 5, [True, False, True, True, True]],
}


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_eq6_linear_form_equals_quadratic_form(shape, eps):
    inputs = random_inputs(**shape)
    cotangent = torch.randn_like(inputs[0])
    found = with_gradients(polarity_attention, inputs, cotangent, eps=eps)
    for name, a, b in zip(("out", "q", "k", "v", "power"), found, truth(inputs, cotangent, eps=eps), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_masked_form_equals_quadratic_form(mask, eps):
    mask = None if mask is None else torch.tensor(mask)
    inputs = random_inputs()
    cotangent = torch.randn_like(inputs[0])
    found = with_gradients(polarity_attention, inputs, cotangent, mask=mask, eps=eps)
    for a, b in zip(found, truth(inputs, cotangent, mask=mask, eps=eps), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -1e30, 7.0])
def test_content_under_the_mask_influences_nothing_and_gets_no_gradient(poison):
    mask = torch.tensor(MASKS["some keys"])
    inputs = random_inputs(dtype=torch.float32)
    cotangent = torch.randn_like(inputs[0])
    clean = with_gradients(polarity_attention, inputs, cotangent, mask=mask)
    q, k, v, power = (x.detach().clone() for x in inputs)
    k[~mask[:, None].expand(-1, 3, -1)] = poison
    v[~mask[:, None].expand(-1, 3, -1)] = poison
    poisoned = with_gradients(polarity_attention, [x.requires_grad_() for x in (q, k, v, power)], cotangent, mask=mask)
    for a, b in zip(clean, poisoned, strict=True):
        assert torch.equal(a, b)
    for gradient in poisoned[2:4]:
        assert (gradient[~mask[:, None].expand(-1, 3, -1)] == 0).all()


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_a_sample_without_any_key_gives_zeros(eps):
    mask = torch.tensor(MASKS["a sample without keys"])
    inputs = random_inputs(dtype=torch.float32)
    out, *gradients = with_gradients(polarity_attention, inputs, torch.ones(2, 3, 7, 6), mask=mask, eps=eps)
    assert (out[0] == 0).all()
    assert (out[1] != 0).any()
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize(("queries", "keys"), [(7, 0), (0, 5), (0, 0)])
def test_no_tokens_at_all(queries, keys):
    inputs = random_inputs(queries=queries, keys=keys)
    out, *gradients = with_gradients(polarity_attention, inputs, torch.ones(2, 3, queries, 6), eps=1e-6)
    assert out.shape == (2, 3, queries, 6)
    assert (out == 0).all()
    assert all(g.shape == x.shape and (g == 0).all() for g, x in zip(gradients, inputs, strict=True))


def test_an_empty_batch_gives_an_empty_output_and_zero_power_gradient():
    inputs = random_inputs(batch=0)
    out, *gradients = with_gradients(polarity_attention, inputs, torch.ones(0, 3, 7, 6))
    assert out.shape == (0, 3, 7, 6)
    assert gradients[3].abs().sum() == 0


def test_power_of_one_axis_serves_every_head():
    q, k, v, power = random_inputs()
    shared = power[0].detach().requires_grad_()
    found = with_gradients(polarity_attention, [q, k, v, shared], torch.ones_like(q))
    spread = with_gradients(
        polarity_attention, [q, k, v, shared.detach().expand(3, 6).clone().requires_grad_()], torch.ones_like(q)
    )
    assert torch.equal(found[0], spread[0])
    torch.testing.assert_close(found[4], spread[4].sum(dim=0))


def test_odd_heads_give_the_larger_half_to_the_same_sign_stream():
    q, k, v, power = random_inputs(width=5)
    same, opposite = reference.polarity_maps(q, k, power)
    out = polarity_attention(q, k, v, power)
    torch.testing.assert_close(out[..., :3], same @ v[..., :3])
    torch.testing.assert_close(out[..., 3:], opposite @ v[..., 3:])


def test_strided_inputs_give_what_contiguous_ones_give():
    fused = torch.randn(2, 7, 3, 4, 6, dtype=torch.float64, requires_grad=True)  # (B, N, q k v ·, H, D)
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    power = random_inputs(heads=4)[3]
    assert not q.is_contiguous()
    strided = polarity_attention(q, k, v, power)
    dense = polarity_attention(q.contiguous(), k.contiguous(), v.contiguous(), power)
    assert torch.equal(strided, dense)
    gradients = [torch.autograd.grad(out.square().sum(), fused, retain_graph=True)[0] for out in (strided, dense)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_output_has_the_input_dtype_and_gradients_that_of_their_inputs(dtype):
    inputs = random_inputs(dtype=dtype)
    out, *gradients = with_gradients(polarity_attention, inputs, torch.ones_like(inputs[0]))
    assert out.dtype == dtype
    assert [g.dtype for g in gradients] == [x.dtype for x in inputs]


def test_autocast_changes_nothing_inside():
    inputs = random_inputs(dtype=torch.float32, queries=50, keys=60, width=16)
    plain = with_gradients(polarity_attention, inputs, torch.ones_like(inputs[0]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = with_gradients(polarity_attention, inputs, torch.ones_like(inputs[0]))
    for a, b in zip(plain, cast, strict=True):
        assert torch.equal(a, b)


def test_nan_outside_the_mask_is_not_hidden():
    for index in range(3):
        inputs = [x.detach() for x in random_inputs(dtype=torch.float32)]
        inputs[index][0, 0, 2, 1] = float("nan")
        assert polarity_attention(*inputs).isnan().any()


def test_eps_at_the_ends_of_the_range_gives_zeros_never_nan():
    for scale in (1e-30, 1e-20, 1e20, 1e30):
        inputs = [
            x.detach().mul(s).requires_grad_()
            for x, s in zip(random_inputs(dtype=torch.float32), (scale, scale, 1, 1), strict=True)
        ]
        out, *gradients = with_gradients(polarity_attention, inputs, torch.ones_like(inputs[0]), eps=1e-6)
        wanted = truth(inputs, torch.ones_like(inputs[0]), eps=1e-6)[0]
        assert not any(x.isnan().any() for x in (out, *gradients))
        torch.testing.assert_close(out.double(), wanted, rtol=1e-3, atol=1e-4)
    assert scale == 1e30
    assert out.abs().max() > 0.1


def test_what_is_kept_for_backward_is_the_inputs_and_two_numbers_a_query():
    kept = []
    inputs = random_inputs(batch=2, heads=3, queries=40, keys=50, width=8, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        polarity_attention(*inputs, mask=torch.ones(2, 50, dtype=torch.bool))
    given = {x.data_ptr() for x in inputs}
    extra = [t for t in kept if t.data_ptr() not in given]
    assert sorted(tuple(t.shape) for t in extra) == [(2, 3, 40, 2), (2, 50)]


def test_the_plain_path_that_is_exported_has_the_same_values_and_gradients():
    inputs = random_inputs()
    cotangent = torch.randn_like(inputs[0])
    mask = torch.tensor(MASKS["some keys"])
    ours = with_gradients(polarity_attention, inputs, cotangent, mask=mask, eps=1e-6)
    exported = with_gradients(lambda *t: plain.attention(Inputs(*t, mask=mask, eps=1e-6))[0], inputs, cotangent)
    for a, b in zip(ours, exported, strict=True):
        assert relative_error(a, b) < 1e-12


@pytest.mark.parametrize("size", [1, 3, 5, 7, 100])
def test_tokens_in_blocks_of_any_size_give_the_same(size):
    inputs = [x.detach() for x in random_inputs(queries=11, keys=7)]
    mask, grad = torch.rand(2, 7) > 0.3, torch.randn(2, 3, 11, 6, dtype=torch.float64)
    given = Inputs(*inputs, mask=mask, eps=1e-3)
    out, norms = plain.attention(given)
    wanted = [out, norms, *plain.attention_backward(grad, norms, given)]
    out, norms = plain.attention(given, size)
    for a, b in zip([out, norms, *plain.attention_backward(grad, norms, given, size)], wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_long_sequences_are_taken_in_blocks():
    assert plain.block_size(torch.empty(4, 4, 3136, 32)) == 640
    assert plain.block_size(torch.empty(8, 3, 196, 64)) >= 196
    assert plain.block_size(torch.empty(4, 4, 3136, 32, device="meta")) is None
    inputs = random_inputs(batch=1, heads=1, queries=9000, keys=8500, width=64, dtype=torch.float32)
    assert plain.block_size(inputs[0]) < 8500
    cotangent = torch.randn_like(inputs[0])
    found = with_gradients(polarity_attention, inputs, cotangent)
    wanted = with_gradients(lambda *t: plain.attention(Inputs(*t))[0], inputs, cotangent)
    for a, b in zip(found, wanted, strict=True):
        assert relative_error(a, b) < 2e-6


def test_reference_backend_is_the_oracle():
    inputs = random_inputs(dtype=torch.float32)
    found = polarity_attention(*inputs, backend="reference")
    assert found.dtype == torch.float32
    assert torch.equal(found, reference.polarity_attention(*inputs))


def test_the_public_name_is_the_operator():
    assert polaformer.polarity_attention is polarity.polarity_attention
