"""The layer's place in PyTorch: state, half precision, compilation, export."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from layers import GRID, pola, randomise, tokens
from oracle import relative_error
from polaformer import PolaAttention


@pytest.mark.parametrize("options", [{}, {"gate": "matrix"}, {"conv": "deformable"}, {"reduction": 2}], ids=str)
def test_n2_gradients_of_every_parameter_in_fp32(options):
    """Gate, convolution and all the rest: relative L2 error against float64."""
    layer, x = pola(dim=32, key_positions=GRID, **options), tokens(dim=32, batch=4).float().double()
    layer.float().double()
    cotangent = torch.randn_like(x).float().double()

    def run(layer, x, cotangent):
        layer.zero_grad()
        out = layer(x, grid=GRID)
        out.backward(cotangent)
        return {"out": out.detach()} | {name: p.grad.clone() for name, p in layer.named_parameters()}

    wanted = run(layer, x, cotangent)
    found = run(layer.float(), x.float(), cotangent.float())
    errors = {name: relative_error(found[name], wanted[name]) for name in wanted}
    assert max(errors.values()) <= 5e-6, errors


def test_state_dict_round_trip_is_bitwise():
    layer, x = pola(key_positions=GRID, gate="matrix"), tokens()
    other = pola(key_positions=GRID, gate="matrix")
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x, grid=GRID), layer(x, grid=GRID))


HALF_OPTIONS = [{}, {"reduction": 2}, {"conv": "deformable"}, {"gate": "matrix"}, {"polarity": "same"}]


@pytest.mark.parametrize("options", HALF_OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_modules_and_autocast(dtype, options):
    layer, x = PolaAttention(32, 2, key_positions=GRID, **options), tokens(dim=32).float()
    wanted = layer(x, grid=GRID)
    with torch.autocast("cpu", dtype=dtype):
        cast = layer(x, grid=(5, 4))
        assert cast.dtype == dtype
        cast.float().sum().backward()
    torch.testing.assert_close(layer(x, grid=(5, 4)), cast.float(), rtol=0.1, atol=2e-3)
    pure = layer.to(dtype)(x.to(dtype), grid=GRID)
    assert pure.dtype == dtype
    torch.testing.assert_close(pure.float(), wanted, rtol=0.1, atol=2e-3)


def test_the_layer_compiles_as_one_graph_and_trains():
    layer, x = randomise(PolaAttention(12, 2, key_positions=GRID)), tokens().float()
    compiled = torch.compile(lambda x: layer(x, grid=GRID), fullgraph=True)

    def run(function):
        layer.zero_grad()
        out = function(x)
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in layer.parameters())]

    for found, wanted in zip(run(compiled), run(lambda x: layer(x, grid=GRID)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.long
def test_a_reduction_compiles_with_dynamic_grids():
    layer = randomise(PolaAttention(12, 2, reduction=2))
    compiled = torch.compile(lambda x, grid: layer(x, grid=grid), fullgraph=True, dynamic=True, backend="aot_eager")
    for grid in ((4, 6), (5, 7), (6, 3)):
        x = tokens(grid[0] * grid[1]).float()
        torch.testing.assert_close(compiled(x, grid), layer(x, grid=grid), rtol=1e-4, atol=1e-4)


def test_the_layer_exports_to_plain_operations():
    class OnAGrid(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x, grid=GRID)

    model, x = OnAGrid(randomise(PolaAttention(12, 2, key_positions=GRID))), tokens().float()
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert all(target.startswith("aten.") or "getitem" in target for target in targets), targets
    x = tokens(batch=3).float()
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-4)


def _dilated() -> nn.Conv2d:
    return nn.Conv2d(16, 16, 3, padding=2, dilation=2, groups=16)


def test_a_convolution_of_another_kind_is_called_and_not_taken_for_a_plain_one():
    layer = PolaAttention(32, 2, kernel_size=3).double()
    layer.conv = _dilated().double()
    x = torch.randn(1, 25, 32, dtype=torch.float64)
    found = layer(x, grid=(5, 5))
    with torch.no_grad():
        plain = PolaAttention(32, 2, kernel_size=5).double()
        plain.load_state_dict({k: v for k, v in layer.state_dict().items() if "conv" not in k}, strict=False)
        plain.conv.weight.zero_()[..., ::2, ::2] = layer.conv.weight
        plain.conv.bias.copy_(layer.conv.bias)
    torch.testing.assert_close(found, plain(x, grid=(5, 5)), rtol=1e-10, atol=1e-12)


def test_hooks_and_pruning_of_the_convolution_work():
    layer, x = PolaAttention(32, 2), torch.randn(1, 25, 32)
    calls = []
    handle = layer.conv.register_forward_hook(lambda module, inputs, output: calls.append(output.shape))
    layer(x, grid=(5, 5))
    handle.remove()
    assert len(calls) == 1
    prune.random_unstructured(layer.conv, "weight", amount=0.5)
    for _ in range(2):
        layer(x, grid=(5, 5)).sum().backward()
    assert layer.conv.weight_orig.grad is not None


def test_a_profiler_sees_our_operators_also_in_inference():
    layer, x = PolaAttention(32, 2), torch.randn(1, 25, 32)
    with torch.inference_mode(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        layer(x, grid=(5, 5))
    assert {"polaformer::polarity_attention", "polaformer::gated_convolution"} <= {event.name for event in profiler.events()}


def test_what_a_hook_saw_of_the_projection_is_not_changed_afterwards():
    layer, x = PolaAttention(32, 2, key_positions=(5, 5)), torch.randn(1, 25, 32)
    nn.init.ones_(layer.key_positions.rows)
    seen = []
    layer.qkv.register_forward_hook(lambda module, inputs, output: seen.append((output, output.clone())))
    with torch.no_grad():
        layer(x, grid=(5, 5))
    assert torch.equal(*seen[0])
