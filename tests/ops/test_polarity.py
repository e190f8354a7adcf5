"""The operator against its oracle, its place in PyTorch, and what it says about bad input."""

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import polaformer
from oracle import random_inputs, relative_error, truth, with_gradients
from polaformer.ops import linear, polarity, reference
from polaformer.ops.polarity import polarity_attention

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
    plain = with_gradients(lambda *t: linear.forward(*t, mask, 1e-6)[0], inputs, cotangent)
    for a, b in zip(ours, plain, strict=True):
        assert relative_error(a, b) < 1e-12


@pytest.mark.parametrize("size", [1, 3, 5, 7, 100])
def test_tokens_in_blocks_of_any_size_give_the_same(size):
    inputs = [x.detach() for x in random_inputs(queries=11, keys=7)]
    mask, grad = torch.rand(2, 7) > 0.3, torch.randn(2, 3, 11, 6, dtype=torch.float64)
    out, norms = linear.forward(*inputs, mask, 1e-3)
    wanted = [out, norms, *linear.backward(grad, *inputs, norms, mask)]
    out, norms = linear.forward(*inputs, mask, 1e-3, size)
    for a, b in zip([out, norms, *linear.backward(grad, *inputs, norms, mask, size)], wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_long_sequences_are_taken_in_blocks():
    assert linear.block_size(torch.empty(4, 4, 3136, 32)) == 640
    assert linear.block_size(torch.empty(8, 3, 196, 64)) >= 196
    assert linear.block_size(torch.empty(4, 4, 3136, 32, device="meta")) is None
    inputs = random_inputs(batch=1, heads=1, queries=9000, keys=8500, width=64, dtype=torch.float32)
    assert linear.block_size(inputs[0]) < 8500
    cotangent = torch.randn_like(inputs[0])
    found = with_gradients(polarity_attention, inputs, cotangent)
    wanted = with_gradients(lambda *t: linear.forward(*t, None, 0.0)[0], inputs, cotangent)
    for a, b in zip(found, wanted, strict=True):
        assert relative_error(a, b) < 2e-6


def _transposed(x):
    """The same values in the layout of a fused projection, (B, T, H, D)."""
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("masked", [False, True])
def test_opcheck_passes_for_both_registered_operators(masked, layout):
    q, k, v, power = random_inputs(dtype=torch.float32)
    inputs = [q, k, v, power] if layout == "contiguous" else [_transposed(q), _transposed(k), _transposed(v), power]
    mask = torch.tensor(MASKS["some keys"]) if masked else None
    torch.library.opcheck(torch.ops.polaformer.polarity_attention.default, (*inputs, mask, 1e-6))
    out, norms = torch.ops.polaformer.polarity_attention(*inputs, mask, 1e-6)
    arguments = (torch.randn_like(out), *inputs, norms.detach(), mask, 1e-6)
    torch.library.opcheck(torch.ops.polaformer.polarity_attention_backward.default, arguments)


def test_forward_mode_and_function_transforms_see_the_derivative():
    inputs = [x.detach() for x in random_inputs()]
    tangents = [torch.randn_like(x) for x in inputs]
    _, found = torch.func.jvp(polarity_attention, tuple(inputs), tuple(tangents))
    step = 1e-6
    ahead, behind = ([x + s * t for x, t in zip(inputs, tangents, strict=True)] for s in (step, -step))
    wanted = (polarity_attention(*ahead) - polarity_attention(*behind)) / (2 * step)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    with torch.autograd.forward_ad.dual_level():
        dual = polarity_attention(*(torch.autograd.forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True)))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, found)
    gradient = torch.func.grad(lambda q: polarity_attention(q, *inputs[1:]).square().sum())(inputs[0])
    leaf = inputs[0].clone().requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(polarity_attention(leaf, *inputs[1:]).square().sum(), leaf)[0])
    mapped = torch.func.vmap(lambda q: polarity_attention(q, *inputs[1:]))(torch.stack([inputs[0], -inputs[0]]))
    torch.testing.assert_close(mapped[1], polarity_attention(-inputs[0], *inputs[1:]))


def test_second_derivatives_of_small_inputs_are_not_nan():
    q, k, v, power = random_inputs(dtype=torch.float32, power=3.0)
    q, k = (x.detach().mul(1e-20).requires_grad_() for x in (q, k))
    (gradient,) = torch.autograd.grad(polarity_attention(q, k, v, power).sum(), v, create_graph=True)
    assert not any(g.isnan().any() for g in torch.autograd.grad(gradient.square().sum(), (q, k, power)))


def test_eps_below_the_range_of_fp32_still_counts():
    inputs = [x.detach().mul(s) for x, s in zip(random_inputs(dtype=torch.float32), (1e-30, 1e-30, 1, 1), strict=True)]
    out = polarity_attention(*inputs, eps=1e-50)
    torch.testing.assert_close(
        out.double(), reference.polarity_attention(*(x.double() for x in inputs), eps=1e-50), rtol=1e-3, atol=1e-6
    )
    assert out.abs().max() < 1e-3


def test_compiles_as_one_graph_with_dynamic_batch_and_length():
    compiled = torch.compile(polarity_attention, fullgraph=True, dynamic=True)
    for shape in (
        {"batch": 2, "queries": 7, "keys": 5},
        {"batch": 3, "queries": 9, "keys": 11},
        {"batch": 4, "queries": 12, "keys": 6},
    ):
        inputs = random_inputs(dtype=torch.float32, **shape)
        cotangent = torch.randn_like(inputs[0])
        for a, b in zip(
            with_gradients(compiled, inputs, cotangent), with_gradients(polarity_attention, inputs, cotangent), strict=True
        ):
            torch.testing.assert_close(a, b)
    assert len(torch._dynamo.utils.counters["graph_break"]) == 0


class _Exportable(torch.nn.Module):
    def forward(self, q, k, v, power, mask):
        return polarity_attention(q, k, v, power, mask=mask, eps=1e-6)


def test_an_exported_graph_holds_plain_aten_operations_and_follows_dynamic_sizes():
    inputs = [x.detach() for x in random_inputs(dtype=torch.float32)]
    mask = torch.tensor(MASKS["some keys"])
    batch, queries, keys = (torch.export.Dim(name) for name in ("batch", "queries", "keys"))
    shapes = ({0: batch, 2: queries}, {0: batch, 2: keys}, {0: batch, 2: keys}, {}, {0: batch, 1: keys})
    program = torch.export.export(_Exportable(), (*inputs, mask), dynamic_shapes=shapes)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert all(target.startswith("aten.") for target in targets), targets
    others = [x.detach() for x in random_inputs(batch=3, queries=9, keys=4, dtype=torch.float32)]
    mask = torch.rand(3, 4) > 0.3
    torch.testing.assert_close(program.module()(*others, mask), _Exportable()(*others, mask))


def test_flop_counter_counts_what_the_plain_path_does():
    inputs = [x.detach() for x in random_inputs(queries=7, keys=9, width=6)]
    assert _flops(lambda: polarity_attention(*inputs)) == _flops(lambda: linear.forward(*inputs, None, 0.0)) > 0
    norms = linear.forward(*inputs, None, 0.0)[1]
    grad = torch.ones_like(inputs[0])
    counted = _flops(lambda: torch.ops.polaformer.polarity_attention_backward(grad, *inputs, norms, None, 0.0))
    assert counted == _flops(lambda: linear.backward(grad, *inputs, norms, None)) > 0


def test_eq10_the_operator_costs_4NCd_and_its_denominators_4NC():
    batch, heads, num_tokens, width = 2, 3, 50, 8
    channels = heads * width
    inputs = [x.to("meta") for x in random_inputs(batch=batch, heads=heads, queries=num_tokens, keys=num_tokens, width=width)]
    macs = batch * (4 * num_tokens * channels * width + 4 * num_tokens * channels)
    assert _flops(lambda: polarity_attention(*inputs)) == 2 * macs


def _flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize(
    "options", [{}, {"eps": 1e-3}, {"mask": torch.tensor(MASKS["some keys"])}], ids=["plain", "eps", "mask"]
)
def test_n5_gradcheck_and_gradgradcheck(options, layout):
    def function(q, k, v, power):
        if layout == "strided":
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        return polarity_attention(q, k, v, power, **options)

    inputs = random_inputs(queries=4, width=4, heads=2)
    assert torch.autograd.gradcheck(function, inputs, atol=1e-8, rtol=1e-6)
    assert torch.autograd.gradgradcheck(function, inputs, atol=1e-8, rtol=1e-6)


def test_n5_gradcheck_with_isolated_zeros():
    q, k, v, _ = random_inputs(queries=4, width=4, heads=2)
    with torch.no_grad():
        q[0, 0, 1, 2] = 0.0
        k[1, 1, 3, 0] = 0.0
    power = (4 + torch.rand(2, 4, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(polarity_attention, [q, k, v, power], atol=1e-8, rtol=1e-6)
    assert torch.autograd.gradgradcheck(polarity_attention, [q, k, v, power], atol=1e-8, rtol=1e-6)


def test_third_derivatives_are_those_of_the_plain_path():
    inputs = random_inputs(batch=1, heads=1, queries=2, keys=3, width=2, power=3.0)
    inputs = [x.detach().double().requires_grad_() for x in inputs]

    def third(function):
        value = function(*inputs).square().sum()
        for _ in range(2):
            (gradient,) = torch.autograd.grad(value, inputs[0], create_graph=True)
            value = gradient.square().sum()
        return torch.autograd.grad(value, inputs[0])[0]

    torch.testing.assert_close(
        third(polarity_attention), third(lambda *t: linear.forward(*t, None, 0.0)[0]), rtol=1e-8, atol=1e-8
    )


def test_reference_backend_is_the_oracle():
    inputs = random_inputs(dtype=torch.float32)
    found = polarity_attention(*inputs, backend="reference")
    assert found.dtype == torch.float32
    assert torch.equal(found, reference.polarity_attention(*inputs))


def _bad_inputs():
    q, k, v, power = (x.detach() for x in random_inputs(dtype=torch.float32))
    mask = torch.ones(2, 5, dtype=torch.bool)
    return {
        "rank of q": ((q[0], k, v, power), {}, ValueError, "q has shape (3, 7, 6); give 4 axes"),
        "rank of k": ((q, k[0], v, power), {}, ValueError, "k has shape (3, 5, 6)"),
        "rank of v": ((q, k, v[None], power), {}, ValueError, "v has shape (1, 2, 3, 5, 6)"),
        "batch": ((q, k[:1], v[:1], power), {}, ValueError, "k has shape (1, 3, 5, 6) but q has shape (2, 3, 7, 6)"),
        "heads": ((q, k[:, :2], v[:, :2], power), {}, ValueError, "batch, heads and head width must agree"),
        "width": ((q, k[..., :4], v[..., :4], power), {}, ValueError, "head width must agree"),
        "v and k": ((q, k, v[:, :, :4], power), {}, ValueError, "v has shape (2, 3, 4, 6) but k has shape (2, 3, 5, 6)"),
        "width 1": ((q[..., :1], k[..., :1], v[..., :1], power[..., :1]), {}, ValueError, "head width 1; give at least 2"),
        "power shape": (
            (q, k, v, power[:2]),
            {},
            ValueError,
            "power has shape (2, 6) but q has 3 heads of width 6; give power of shape (3, 6) or (6,)",
        ),
        "power of four axes": ((q, k, v, power[None, :, None]), {}, ValueError, "give power of shape (3, 6) or (6,)"),
        "mask shape": (
            (q, k, v, power),
            {"mask": mask[:, :4]},
            ValueError,
            "mask has shape (2, 4) but there are 2 samples of 5 keys",
        ),
        "mask dtype": (
            (q, k, v, power),
            {"mask": mask.float()},
            TypeError,
            "mask has dtype torch.float32; give a boolean mask",
        ),
        "mask list": ((q, k, v, power), {"mask": mask.tolist()}, TypeError, "mask is a list"),
        "integers": ((q.long(), k, v, power), {}, TypeError, "q has dtype torch.int64; give a floating-point tensor"),
        "integer power": ((q, k, v, power.long()), {}, TypeError, "power has dtype torch.int64"),
        "complex": ((q.cfloat(), k, v, power), {}, TypeError, "q has dtype torch.complex64"),
        "array": ((q.numpy(), k, v, power), {}, TypeError, "q is a ndarray; give a torch.Tensor"),
        "dtypes": (
            (q, k.half(), v, power),
            {},
            TypeError,
            "q, k and v have dtypes torch.float32, torch.float16 and torch.float32",
        ),
        "narrow power": (
            (q, k, v, power.half()),
            {},
            TypeError,
            "power has dtype torch.float16, which cannot hold torch.float32",
        ),
        "bf16 power for fp16": ((q.half(), k.half(), v.half(), power.bfloat16()), {}, TypeError, "cannot hold torch.float16"),
        "devices": ((q, k.to("meta"), v, power), {}, ValueError, "different devices (q on cpu, k on meta"),
        "backend": (
            (q, k, v, power),
            {"backend": "tritn"},
            ValueError,
            "backend is 'tritn'; choose one of auto, torch, reference",
        ),
        "negative eps": ((q, k, v, power), {"eps": -1e-6}, ValueError, "eps is -1e-06; give 0"),
        "eps not a number": ((q, k, v, power), {"eps": float("nan")}, ValueError, "eps is nan"),
        "eps infinite": ((q, k, v, power), {"eps": float("inf")}, ValueError, "eps is inf"),
        "eps a string": ((q, k, v, power), {"eps": "1e-6"}, TypeError, "eps is a str; give a number"),
    }


@pytest.mark.parametrize("case", _bad_inputs())
def test_bad_input_is_refused_with_what_was_given_and_what_to_give(case):
    arguments, options, error, message = _bad_inputs()[case]
    with pytest.raises(error, match=re.escape(message)):
        polarity_attention(*arguments, **options)


def test_the_public_name_is_the_operator():
    assert polaformer.polarity_attention is polarity.polarity_attention
