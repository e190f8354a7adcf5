"""What the tail of the layer refuses before any work, and what is empty: its kernel would read beyond the tensors.

The same for both operators as they are registered with PyTorch, which anybody can call.
"""

import pytest
import torch

from polaformer.ops.gated_convolution import plain
from polaformer.ops.gated_convolution.inputs import ConvolutionInputs
from polaformer.ops.gated_convolution.operator import gated_convolution
from polaformer.ops.polarity.operator import polarity_attention

BATCH, GRID, CHANNELS, WIDTH = 2, (4, 4), 8, 4


def right(**changed):
    """attended, values, weight, bias, gate by name, one prefix token, and the grid."""
    tensors = {
        "attended": torch.randn(BATCH, 17, CHANNELS),
        "values": torch.randn(BATCH, 16, CHANNELS),
        "weight": torch.randn(WIDTH, 1, 3, 3),
        "bias": torch.randn(WIDTH),
        "gate": torch.randn(BATCH, 17, CHANNELS),
        "grid": GRID,
    }
    return tensors | changed


WRONG = {
    "a grid without cells": ({"grid": (0, 4)}, "the grid is 0×4 but values has 16 tokens"),
    "a huge grid": ({"grid": (4000, 4000)}, "the grid is 4000×4000 but values has 16 tokens"),
    "a negative grid": ({"grid": (-4, -4)}, "the grid is -4×-4"),
    "values of four axes": ({"values": torch.randn(BATCH, 4, 4, CHANNELS)}, "give both 3 axes"),
    "attended of two axes": ({"attended": torch.randn(17, CHANNELS)}, "give both 3 axes"),
    "another batch": ({"values": torch.randn(1, 16, CHANNELS)}, "with equal batch and channel sizes"),
    "other channels": ({"values": torch.randn(BATCH, 16, 4)}, "with equal batch and channel sizes"),
    "fewer tokens than cells": ({"attended": torch.randn(BATCH, 15, CHANNELS)}, "attended has 15 tokens but values has 16"),
    "a dense convolution": ({"weight": torch.randn(WIDTH, WIDTH, 3, 3)}, r"weight has shape \(4, 4, 3, 3\)"),
    "an even kernel": ({"weight": torch.randn(WIDTH, 1, 3, 2)}, "odd kernel sizes"),
    "a kernel of one axis": ({"weight": torch.randn(WIDTH, 1, 3)}, "odd kernel sizes"),
    "a kernel without taps": ({"weight": torch.randn(WIDTH, 1, 0, 3)}, "odd kernel sizes"),
    "heads that do not divide": (
        {"weight": torch.randn(3, 1, 3, 3), "bias": None},
        "width 3 but there are 8 channels",
    ),
    "heads without width": ({"weight": torch.randn(0, 1, 3, 3), "bias": None}, "heads of width 0"),
    "a short bias": ({"bias": torch.randn(WIDTH - 1)}, r"bias has shape \(3,\); give \(4,\)"),
    "a short gate": ({"gate": torch.randn(BATCH, 16, CHANNELS)}, r"gate has shape \(2, 16, 8\)"),
    "a gate of four axes": ({"gate": torch.randn(1, BATCH, 17, CHANNELS)}, r"gate has shape \(1, 2, 17, 8\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_shapes_of_the_convolution_are_refused(case):
    changed, told = WRONG[case]
    tensors = right(**changed)
    with pytest.raises(ValueError, match=told):
        gated_convolution(**tensors)
    *rest, grid = tensors.values()
    with pytest.raises(ValueError, match=told):
        torch.ops.polaformer.gated_convolution(*rest, *grid)
    with pytest.raises(ValueError, match=told):
        torch.ops.polaformer.gated_convolution_backward(torch.randn_like(tensors["attended"]), *rest, *grid)


def test_what_the_registered_convolution_cannot_read_is_refused():
    *rest, grid = right().values()
    grad = torch.randn(BATCH, 17, CHANNELS)
    with pytest.raises(ValueError, match=r"gate has shape \(1, 17, 8\)"):
        torch.ops.polaformer.gated_convolution(*rest[:4], rest[4][:1], *grid)
    with pytest.raises(ValueError, match=r"grad has shape \(2, 16, 8\)"):
        torch.ops.polaformer.gated_convolution_backward(grad[:, 1:], *rest, *grid)
    with pytest.raises(TypeError, match=r"values torch\.float16 on cpu.* all tokens in one of torch\.float32"):
        torch.ops.polaformer.gated_convolution(rest[0], rest[1].half(), *rest[2:], *grid)
    with pytest.raises(TypeError, match=r"grad torch\.float64 on cpu"):
        torch.ops.polaformer.gated_convolution_backward(grad.double(), *rest, *grid)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("batch", "tokens", "grid", "channels"),
    [(2, 0, (0, 4), 8), (2, 3, (4, 0), 8), (0, 17, (4, 4), 8), (2, 17, (4, 4), 0), (2, 3, (0, 0), 8)],
)
def test_what_is_empty_gives_what_is_empty_and_zero_gradients(batch, tokens, grid, channels, gated):
    attended = torch.randn(batch, tokens, channels, requires_grad=True)
    values = torch.randn(batch, grid[0] * grid[1], channels, requires_grad=True)
    weight, bias = torch.randn(WIDTH, 1, 3, 3, requires_grad=True), torch.randn(WIDTH, requires_grad=True)
    gate = torch.randn_like(attended).requires_grad_() if gated else None
    leaves = [x for x in (attended, values, weight, bias, gate) if x is not None]
    results = []
    for function in (gated_convolution, lambda *arguments: plain.forward(ConvolutionInputs(*arguments))):
        out = function(attended, values, weight, bias, gate, grid)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    with torch.no_grad():
        assert torch.equal(gated_convolution(attended, values, weight, bias, gate, grid), results[1][0])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not results[0][3].any()


# ---- the operator ----


def heads(**changed):
    """q, k, v, power, scale, mask, eps, backend by name: what the registered operator is given."""
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    rest = {"scale": None, "mask": None, "eps": 0.0, "backend": "cpu"}
    return {"q": q, "k": k, "v": v, "power": torch.full((3, 4), 3.0)} | rest | changed


WRONG_HEADS = {
    "q of three axes": ({"q": torch.randn(3, 5, 4)}, ValueError, "q has shape"),
    "k of another batch": ({"k": torch.randn(1, 3, 7, 4)}, ValueError, "k has shape"),
    "fewer values than keys": ({"v": torch.randn(2, 3, 6, 4)}, ValueError, "v has shape"),
    "powers of one head": ({"power": torch.full((1, 4), 3.0)}, ValueError, "power has shape"),
    "powers without heads": ({"power": torch.full((4,), 3.0)}, ValueError, r"power has shape \(4,\).* give \(3, 4\)"),
    "scales without heads": ({"scale": torch.ones(4)}, ValueError, r"scale has shape \(4,\).* give \(3, 4\)"),
    "a short mask": ({"mask": torch.ones(2, 6, dtype=torch.bool)}, ValueError, "mask has shape"),
    "a mask of numbers": ({"mask": torch.ones(2, 7)}, TypeError, "mask has dtype"),
    "negative eps": ({"eps": -1e-6}, ValueError, "eps is -1e-06; give 0"),
    "values of another dtype": ({"v": torch.randn(2, 3, 7, 4).half()}, TypeError, "give them one dtype"),
}


@pytest.mark.parametrize("case", WRONG_HEADS)
def test_wrong_tensors_are_refused_by_the_registered_operator_too(case):
    changed, error, told = WRONG_HEADS[case]
    given = heads(**changed)
    with pytest.raises(error, match=told):
        torch.ops.polaformer.polarity_attention(*given.values())
    q, k, v, power, scale, mask, eps, backend = given.values()
    norms = torch.ones(2, 3, 5, 2)
    with pytest.raises(error, match=told):
        torch.ops.polaformer.polarity_attention_backward(
            torch.randn(2, 3, 5, 4), norms, q, k, v, power, scale, mask, eps, backend
        )


@pytest.mark.parametrize(
    ("grad", "norms", "error", "told"),
    [
        (torch.randn(2, 3, 4, 4), torch.ones(2, 3, 5, 2), ValueError, r"grad has shape \(2, 3, 4, 4\)"),
        (torch.randn(2, 3, 5, 4), torch.ones(2, 3, 5), ValueError, r"norms has shape \(2, 3, 5\)"),
        (torch.randn(2, 3, 5, 4).half(), torch.ones(2, 3, 5, 2), TypeError, r"grad has dtype torch\.float16"),
        (torch.randn(2, 3, 5, 4), torch.ones(2, 3, 5, 2).double(), TypeError, r"norms has dtype torch\.float64"),
    ],
)
def test_wrong_gradients_are_refused_by_the_registered_derivative(grad, norms, error, told):
    q, k, v, power, scale, mask, eps, backend = heads().values()
    with pytest.raises(error, match=told):
        torch.ops.polaformer.polarity_attention_backward(grad, norms, q, k, v, power, scale, mask, eps, backend)


def test_the_registered_operators_compute_where_nothing_is_wrong():
    given = heads(backend="torch")
    out, norms = torch.ops.polaformer.polarity_attention(*given.values())
    q, k, v, power, scale, mask, eps, backend = given.values()
    assert torch.equal(out, polarity_attention(q, k, v, power, backend="torch"))
    found = torch.ops.polaformer.polarity_attention_backward(out, norms, q, k, v, power, scale, mask, eps, backend)
    assert len(found) == 4
    *rest, grid = right().values()
    assert torch.equal(torch.ops.polaformer.gated_convolution(*rest, *grid), gated_convolution(*rest, grid))
