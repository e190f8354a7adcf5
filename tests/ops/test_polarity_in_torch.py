"""The operator's place in PyTorch: registration, compilation, export, derivatives of every kind, counting."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from oracle import random_inputs, with_gradients
from polaformer.ops.polarity import plain, reference
from polaformer.ops.polarity.inputs import Inputs
from polaformer.ops.polarity.operator import polarity_attention

pytestmark = pytest.mark.usefixtures("each_backend")

MASK = torch.tensor([[True, False, True, True, False], [False, False, True, True, True]])


def _transposed(x):
    """The same values in the layout of a fused projection, (B, T, H, D)."""
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("masked", [False, True])
def test_opcheck_passes_for_both_registered_operators(masked, layout):
    q, k, v, power = random_inputs(dtype=torch.float32)
    inputs = [q, k, v, power] if layout == "contiguous" else [_transposed(q), _transposed(k), _transposed(v), power]
    mask = MASK if masked else None
    scale = torch.full((3, 6), 0.7, requires_grad=True) if masked else None
    torch.library.opcheck(torch.ops.polaformer.polarity_attention.default, (*inputs, scale, mask, 1e-6, "auto"))
    out, norms = torch.ops.polaformer.polarity_attention(*inputs, scale, mask, 1e-6, "auto")
    arguments = (torch.randn_like(out), norms.detach(), *inputs, scale, mask, 1e-6, "auto")
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


@pytest.mark.parametrize("option", ["scale", "mask", "eps"])
def test_inference_has_the_same_bits_as_training(option):
    """It leaves PyTorch's registration out, and must leave out nothing else."""
    inputs = random_inputs(dtype=torch.float32)
    options = {option: {"scale": torch.linspace(0.5, 2, 6), "mask": MASK, "eps": 0.1}[option]}
    trained = polarity_attention(*inputs, **options)
    with torch.no_grad():
        inferred = polarity_attention(*inputs, **options)
    assert trained.requires_grad
    assert torch.equal(inferred, trained)
    assert not torch.allclose(inferred, polarity_attention(*inputs))


def test_compiles_as_one_graph_with_dynamic_batch_and_length():
    graphs, counts = CompileCounterWithBackend("inductor"), []
    compiled = torch.compile(polarity_attention, backend=graphs, fullgraph=True, dynamic=True)
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
        counts.append(graphs.frame_count)
    assert len(set(counts)) == 1  # the first shape's graph serves the others


class _Exportable(torch.nn.Module):
    def forward(self, q, k, v, power, mask):
        return polarity_attention(q, k, v, power, mask=mask, eps=1e-6)


def test_an_exported_graph_holds_plain_aten_operations_and_follows_dynamic_sizes():
    inputs = [x.detach() for x in random_inputs(dtype=torch.float32)]
    mask = MASK
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
    assert _flops(lambda: polarity_attention(*inputs)) == _flops(lambda: plain.attention(Inputs(*inputs))) > 0
    norms = plain.attention(Inputs(*inputs))[1]
    grad = torch.ones_like(inputs[0])
    counted = _flops(lambda: torch.ops.polaformer.polarity_attention_backward(grad, norms, *inputs, None, None, 0.0, "auto"))
    assert counted == _flops(lambda: plain.attention_backward(grad, norms, Inputs(*inputs))) > 0


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
@pytest.mark.parametrize("options", [{}, {"eps": 1e-3}, {"mask": MASK}], ids=["plain", "eps", "mask"])
def test_n5_gradcheck_and_gradgradcheck(options, layout, each_backend):
    def function(q, k, v, power):
        if layout == "strided":
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        return polarity_attention(q, k, v, power, **options)

    inputs = random_inputs(queries=4, width=4, heads=2)
    assert torch.autograd.gradcheck(function, inputs, atol=1e-8, rtol=1e-6)
    if each_backend == "torch" or (layout == "strided" and not options):  # second derivatives are those of the plain path
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
        third(polarity_attention), third(lambda *t: plain.attention(Inputs(*t))[0]), rtol=1e-8, atol=1e-8
    )
