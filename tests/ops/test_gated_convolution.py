"""The tail of the layer, (attended + convolution) ⊙ gate: the native kernel against PyTorch's own convolution in float64."""

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from oracle import relative_error
from polaformer import PolaAttention
from polaformer.ops.gated_convolution import cpu
from polaformer.ops.gated_convolution import plain as plain_form
from polaformer.ops.gated_convolution.inputs import ConvolutionInputs
from polaformer.ops.gated_convolution.operator import gated_convolution
from polaformer.ops.native import tensors as native_tensors

# batch, prefix tokens, (height, width), heads, head width, kernel, gate, bias
needs_kernel = pytest.mark.skipif(cpu.unavailable_reason() is not None, reason="the kernel cannot be built here")
CASES = {
    "a grid": (2, 0, (5, 7), 3, 8, (5, 5), True, True),
    "prefix tokens": (1, 1, (14, 14), 2, 32, (5, 5), True, True),
    "two prefix tokens, no bias": (2, 2, (3, 50), 1, 5, (3, 5), True, False),
    "a sequence": (1, 0, (1, 40), 2, 12, (1, 7), False, True),
    "neither gate nor bias": (3, 0, (9, 6), 2, 24, (3, 3), False, False),
    "a kernel larger than the grid": (2, 1, (2, 2), 1, 16, (7, 7), True, True),
    "one cell": (1, 0, (1, 1), 1, 3, (5, 5), True, True),
    "a kernel of one": (2, 0, (4, 4), 2, 7, (1, 1), True, True),
    "several strips": (1, 1, (61, 150), 1, 17, (5, 5), True, True),
    "eleven taps": (1, 0, (12, 13), 2, 9, (3, 11), True, True),
    "a row in several pieces": (1, 1, (2, 700), 1, 6, (5, 5), True, True),
    "no samples": (0, 0, (4, 4), 2, 8, (5, 5), True, True),
}


def plain(*arguments) -> torch.Tensor:
    """The plain form, called as the operator is."""
    return plain_form.forward(ConvolutionInputs(*arguments))


def tensors(case, dtype):
    """attended, values (a part of a fused projection), weight, bias, gate; leaves."""
    batch, prefix, (height, width), heads, head_width, kernel, gated, biased = CASES[case]
    channels, tokens = heads * head_width, prefix + height * width
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = torch.randn(batch, tokens, 3 * channels, dtype=dtype)[:, prefix:, 2 * channels :]
    weight = torch.randn(head_width, 1, *kernel, dtype=wide)
    bias = torch.randn(head_width, dtype=wide) if biased else None
    gate = torch.randn(batch, tokens, channels, dtype=dtype) if gated else None
    found = (torch.randn(batch, tokens, channels, dtype=dtype), values, weight, bias, gate)
    return [None if x is None else x.requires_grad_() for x in found], (height, width)


def with_gradients(function, inputs, grid, cotangent):
    out = function(*inputs, grid)
    return [out.detach(), *torch.autograd.grad(out, [x for x in inputs if x is not None], cotangent.to(out.dtype))]


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_values_and_all_gradients_are_those_of_pytorchs_convolution(case, dtype):
    inputs, grid = tensors(case, dtype)
    cotangent = torch.randn_like(inputs[0])
    found = with_gradients(gated_convolution, inputs, grid, cotangent)
    wide = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    wanted = with_gradients(plain, wide, grid, cotangent.double())
    limits = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
    for a, b, x in zip(found, wanted, [inputs[0], *(x for x in inputs if x is not None)], strict=True):
        assert a.dtype == x.dtype
        assert a.shape == b.shape
        assert relative_error(a, b) <= limits[dtype]


@needs_kernel
def test_no_image_is_made_and_the_result_lies_as_tokens():
    inputs, grid = tensors("prefix tokens", torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        out = gated_convolution(*inputs, grid)
    names = {event.name for event in profiler.events()}
    assert not {"aten::conv2d", "aten::convolution", "aten::copy_", "aten::contiguous"} & names
    assert out.is_contiguous()


@pytest.mark.parametrize("case", ["prefix tokens", "several strips", "neither gate nor bias"])
def test_the_number_of_threads_changes_no_bit_and_uninitialised_memory_is_never_used(case, monkeypatch):
    inputs, grid = tensors(case, torch.float32)
    cotangent, before = torch.randn_like(inputs[0]), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = with_gradients(gated_convolution, inputs, grid, cotangent)
        torch.set_num_threads(2)
        monkeypatch.setattr(native_tensors, "poison", True)
        torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
        together = with_gradients(gated_convolution, inputs, grid, cotangent)
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_a_gate_for_all_samples_gets_the_sum_of_their_gradients():
    (attended, values, weight, bias, gate), grid = tensors("a grid", torch.float64)
    shared = gate.detach()[0].requires_grad_()
    cotangent = torch.randn_like(attended)
    found = with_gradients(gated_convolution, (attended, values, weight, bias, shared), grid, cotangent)
    wanted = with_gradients(plain, (attended, values, weight, bias, shared), grid, cotangent)
    assert all(relative_error(a, b) < 1e-13 for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("case", ["two prefix tokens, no bias", "neither gate nor bias", "a grid"])
def test_first_and_second_derivatives_pass_gradcheck(case, monkeypatch):
    monkeypatch.setitem(CASES, "small", (1, CASES[case][1], (2, 3), 1, 2, (3, 3), *CASES[case][6:]))
    inputs, grid = tensors("small", torch.float64)

    def function(*leaves):
        rest = iter(leaves)
        return gated_convolution(*(None if x is None else next(rest) for x in inputs), grid)

    leaves = [x.detach().requires_grad_() for x in inputs if x is not None]
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("case", ["prefix tokens", "neither gate nor bias"])
def test_opcheck_passes_for_both_registered_operators(case):
    inputs, grid = tensors(case, torch.float32)
    torch.library.opcheck(torch.ops.polaformer.gated_convolution.default, (*inputs, *grid))
    arguments = (torch.randn_like(inputs[0]), *inputs, *grid)
    torch.library.opcheck(torch.ops.polaformer.gated_convolution_backward.default, arguments)


def test_a_gradient_that_lies_otherwise_changes_no_stride_of_the_result():
    inputs, grid = tensors("neither gate nor bias", torch.float32)
    grad = torch.randn_like(inputs[0]).mT.contiguous().mT
    torch.library.opcheck(torch.ops.polaformer.gated_convolution_backward.default, (grad, *inputs, *grid))


def test_the_kernel_is_left_alone_where_its_compiler_knew_no_float16(monkeypatch):
    inputs, grid = tensors("a grid", torch.float16)
    monkeypatch.setattr(cpu, "has_float16", lambda: False)
    monkeypatch.setattr(cpu, "_call", None)
    gated_convolution(*inputs, grid).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_compiles_as_one_graph(dtype):
    inputs, grid = tensors("prefix tokens", dtype)
    cotangent = torch.randn_like(inputs[0])
    compiled = torch.compile(lambda *x: gated_convolution(*x, grid), fullgraph=True, backend="eager")
    found = with_gradients(lambda *x: compiled(*x[:-1]), inputs, grid, cotangent)
    wanted = with_gradients(gated_convolution, inputs, grid, cotangent)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_layer_in_half_precision_compiles_as_one_graph(dtype):
    layer, x = PolaAttention(16, 2).to(dtype), torch.randn(1, 20, 16, dtype=dtype)
    compiled = torch.compile(lambda x: layer(x, grid=(5, 4)), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), layer(x, grid=(5, 4)))


@pytest.mark.parametrize("recorded", [False, True])
def test_views_that_are_negated_only_when_they_are_read_are_read_negated(recorded):
    inputs, grid = tensors("prefix tokens", torch.float32)
    inputs = [x.detach() for x in inputs]
    bias = inputs[3].clone().requires_grad_(recorded)
    for index in (0, 1, 2, 4):
        views, wanted = list(inputs), list(inputs)
        views[index], wanted[index] = torch._neg_view(inputs[index]), -inputs[index]
        views[3] = wanted[3] = bias
        assert torch.equal(gated_convolution(*views, grid), gated_convolution(*wanted, grid))


def test_a_default_device_is_not_taken_for_that_of_the_tensors():
    inputs, grid = tensors("a grid", torch.float32)
    wanted = with_gradients(gated_convolution, inputs, grid, torch.ones_like(inputs[0]))
    ones = torch.ones_like(inputs[0])
    with torch.device("meta"):
        found = with_gradients(gated_convolution, inputs, grid, ones)
        with torch.no_grad():
            assert torch.equal(gated_convolution(*inputs, grid), wanted[0])
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@needs_kernel
def test_a_long_sequence_takes_no_room_of_its_length():
    """The kernel's own memory is for a piece of a row; kept between calls, it shows as growth of the process."""
    program = (
        "import torch; from polaformer.ops.gated_convolution.operator import gated_convolution as f\n"
        "def high(): return int(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1])\n"
        "w = torch.randn(16, 1, 5, 5); x = torch.randn(1, 300_000, 16)\n"
        "f(x[:, :10], x[:, :10], w, None, None, (1, 10)); before = high()\n"
        "out = f(x, x, w, None, None, (1, 300_000)); print(high() - before)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert int(found.stdout) < 19_200 + 8_000  # kB: the result, and a little


def test_without_a_compiler_the_registered_operators_give_the_same(monkeypatch):
    inputs, grid = tensors("prefix tokens", torch.float32)
    cotangent = torch.randn_like(inputs[0])
    native = with_gradients(gated_convolution, inputs, grid, cotangent)
    monkeypatch.setattr(cpu, "_missing_kernel", lambda: "there is none")
    without = with_gradients(gated_convolution, inputs, grid, cotangent)
    assert all(relative_error(a, b) < 3e-6 for a, b in zip(native, without, strict=True))


def test_the_flop_counter_counts_what_it_counts_for_pytorchs_convolution():
    inputs, grid = tensors("prefix tokens", torch.float32)
    counts = []
    for function in (gated_convolution, plain):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            function(*inputs, grid)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
