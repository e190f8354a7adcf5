"""Which backend serves where, and what is said where one cannot."""

import itertools
import subprocess
import sys
import warnings
from textwrap import dedent

import pytest
import torch
from torch import Tensor

from oracle import random_inputs, truth, with_gradients
from polaformer.ops.native import library
from polaformer.ops.polarity import backends, cpu, plain, triton
from polaformer.ops.polarity.inputs import Inputs
from polaformer.ops.polarity.operator import polarity_attention

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _nothing_chosen_before():
    _forget()
    yield
    _forget()


def _forget() -> None:
    backends._fastest.cache_clear()
    library.warned_reasons.clear()


@pytest.fixture
def kernel():
    """The module of the native kernel, where it works."""
    reason = cpu.unavailable_reason()
    if reason is not None:
        pytest.skip(f"backend cpu: {reason}")
    return cpu


def tokens(dtype: torch.dtype = torch.float32, width: int = 6, device: str = "cpu") -> Tensor:
    return torch.empty(2, 3, 7, width, dtype=dtype, device=device)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("recorded", [False, True])
def test_views_that_are_negated_only_when_they_are_read_are_read_negated(backend, recorded, kernel):
    """As the imaginary part of a conjugate is: its memory holds the negative of its values."""
    tensors = [x.detach() for x in random_inputs(dtype=torch.float32)[:3]]
    wanted, views = [-x for x in tensors], [torch._neg_view(x) for x in tensors]
    assert all(view.is_neg() for view in views)
    power = torch.full((3, 6), 3.0, requires_grad=recorded)
    for chosen in itertools.product((False, True), repeat=3):
        mixed = [view if one else x for one, view, x in zip(chosen, views, wanted, strict=True)]
        found = polarity_attention(*mixed, power, backend=backend)
        assert torch.equal(found, polarity_attention(*wanted, power, backend=backend))


# ---- auto ----


def test_freed_memory_is_kept_by_the_first_layer_core_or_call_and_not_by_importing():
    program = """
        import polaformer.backbones, torch
        from polaformer import attention, polarity_attention
        from polaformer.ops.allocator import keep_freed_memory as keep
        found = [keep.cache_info().currsize]
        q = torch.ones(1, 1, 4, 2)
        for use in (
            lambda: attention.WindowAttention(4, 2, 2),
            lambda: attention.create("hedgehog", num_heads=2, head_dim=2),
            lambda: polarity_attention(q, q, q, torch.full((1, 2), 2.0)),
        ):
            keep.cache_clear()
            use()
            found.append(keep.cache_info().currsize)
        print(found)
    """
    found = subprocess.run([sys.executable, "-c", dedent(program)], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout == "[0, 1, 1, 1]\n"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_auto_on_a_cpu_is_the_native_kernel(dtype, kernel, monkeypatch):
    if dtype == torch.float16 and not cpu.has_float16():
        pytest.skip("the compiler knows no float16")
    assert backends.choose("auto", tokens(dtype)) is kernel
    calls = []
    original = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda *arguments: (calls.append(arguments[0].q.dtype), original(*arguments))[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        polarity_attention(*random_inputs(dtype=dtype))
    assert calls == [dtype]


def test_auto_elsewhere_is_the_plain_path_and_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device in ("meta", "mps", "xpu"):
            assert backends._fastest(device, torch.float32, 6) == "torch"
        assert backends.choose("auto", tokens(device="meta")) is plain


def test_auto_on_a_gpu_is_triton_where_it_works(monkeypatch):
    monkeypatch.setattr(triton, "unavailable_reason", lambda: None)
    assert backends._fastest("cuda", torch.bfloat16, triton.MAX_WIDTH) == "triton"
    assert backends._fastest("cuda", torch.float64, 32) == "torch"
    assert backends._fastest("cuda", torch.float32, triton.MAX_WIDTH + 1) == "torch"
    _forget()
    monkeypatch.setattr(triton, "unavailable_reason", lambda: "it is broken")
    assert backends._fastest("cuda", torch.bfloat16, 32) == "torch"


def test_a_kernel_without_float16_leaves_that_to_the_plain_path_and_says_why(kernel, monkeypatch):
    monkeypatch.setattr(cpu, "has_float16", lambda: False)
    with pytest.warns(UserWarning, match=r"polarity attention, slower: its compiler does not support float16$") as told:
        chosen = [backends.choose("auto", tokens(torch.float16, width)) for width in (4, 6)]
    assert chosen == [plain] * 2
    assert len(told) == 1
    assert backends.choose("auto", tokens(torch.bfloat16)) is kernel
    with pytest.raises(ValueError, match="'cpu' cannot be used: its compiler does not support float16; use 'auto' or 'torch'"):
        backends.choose("cpu", tokens(torch.float16))


def test_a_broken_kernel_is_told_of_once_however_many_kinds_of_tensors_there_are(monkeypatch):
    monkeypatch.setattr(cpu, "unavailable_reason", lambda: "it is broken")
    with pytest.warns(UserWarning, match=r"slower: it is broken$") as told:
        chosen = [backends.choose("auto", tokens(dtype, width)) for dtype, width in itertools.product(DTYPES, (4, 6))]
    assert chosen == [plain] * 8
    assert len(told) == 1


# ---- a backend by its name ----


@pytest.mark.parametrize("name", ["torch", "cpu", "triton"])
def test_a_name_stands_for_one_module(name, monkeypatch):
    module = {"torch": plain, "cpu": cpu, "triton": triton}[name]
    monkeypatch.setattr(module, "unavailable_reason", lambda: None)
    monkeypatch.setattr(triton, "_interprets", lambda: True)
    assert backends.choose(name, tokens()) is module
    monkeypatch.setattr(module, "unavailable_reason", lambda: "it is broken")
    with pytest.raises(ValueError, match="cannot be used") as caught:
        backends.choose(name, tokens())
    wanted = f"polarity_attention: backend {name!r} cannot be used: it is broken; use 'auto' or 'torch'"
    assert str(caught.value) == wanted


def test_triton_refuses_tensors_on_a_cpu_in_one_line_that_says_what_to_do(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    inputs = random_inputs(dtype=torch.float32)
    with pytest.raises(ValueError, match="triton") as caught:
        polarity_attention(*inputs, backend="triton")
    assert "\n" not in str(caught.value)
    assert "use 'auto' or 'torch'" in str(caught.value)


REFUSED = {
    "cpu, tensors elsewhere": ("cpu", tokens(device="meta"), "it computes on the CPU but the tensors are on meta"),
    "triton, float64": (
        "triton",
        tokens(torch.float64),
        "it supports float16, bfloat16 and float32 but the tensors are torch.float64",
    ),
    "triton, too wide": (
        "triton",
        tokens(width=257),
        "it supports heads of width up to 256, which fit on a multiprocessor, but these have 257",
    ),
    "triton, tensors elsewhere": (
        "triton",
        tokens(device="meta"),
        "it computes on CUDA and ROCm devices (with TRITON_INTERPRET=1 anywhere) but the tensors are on meta",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_a_backend_cannot_take_are_refused_with_the_reason(case, monkeypatch):
    name, q, reason = REFUSED[case]
    monkeypatch.setattr(backends.MODULES[name], "unavailable_reason", lambda: None)
    monkeypatch.setattr(triton, "_interprets", lambda: False)
    assert backends._refusal_reason(name, q.device.type, q.dtype, q.shape[3]) == reason
    with pytest.raises(ValueError, match="cannot be used") as caught:
        backends.choose(name, q)
    assert str(caught.value) == f"polarity_attention: backend {name!r} cannot be used: {reason}; use 'auto' or 'torch'"


@pytest.mark.parametrize("masked", [False, True])
def test_the_reference_serves_tensors_with_gradients(masked):
    inputs = random_inputs(dtype=torch.float32)
    mask = torch.rand(2, 5) > 0.4 if masked else None
    cotangent = torch.randn_like(inputs[0])
    found = with_gradients(polarity_attention, inputs, cotangent, backend="reference", mask=mask)
    assert [x.dtype for x in found] == [torch.float32] * 5
    for a, b in zip(found, truth(inputs, cotangent, mask=mask), strict=True):
        assert (b != 0).any()
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-6)


# ---- what works here ----


def test_the_status_has_a_row_for_every_backend_that_has_a_name():
    rows = backends.status()
    assert [row.name for row in rows] == ["torch", "cpu", "triton", "reference"] == list(backends.BACKENDS[1:])
    assert [row.works for row in rows if row.name in ("torch", "reference")] == [True, True]
    for row in rows:
        module = backends.MODULES.get(row.name)
        assert row.works == (module is None or module.unavailable_reason() is None)
        assert row.reason
        assert "\n" not in row.reason


@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_the_status_shows_why_a_backend_does_not_work(name, monkeypatch):
    monkeypatch.setattr(backends.MODULES[name], "unavailable_reason", lambda: "it is broken")
    assert backends.Status(name, False, "it is broken") in backends.status()
    monkeypatch.setattr(backends.MODULES[name], "unavailable_reason", lambda: None)
    monkeypatch.setattr(backends.cpu, "options", lambda: ["-march=native"])
    monkeypatch.setattr(backends.cpu, "has_threads", lambda: True)
    what = {"cpu": "a native kernel for this processor", "triton": "fused kernels for GPUs"}[name]
    assert backends.Status(name, True, what) in backends.status()


# ---- all alike ----


def _fused(heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    projected = torch.randn(2, 7, 3, heads, width, dtype=dtype)
    return [projected[:, :, i].transpose(1, 2) for i in range(3)]


LAYOUTS = {
    "contiguous": lambda heads, width, dtype: [torch.randn(2, heads, 7, width, dtype=dtype) for _ in range(3)],
    "fused projection": _fused,
    "fused queries alone": lambda heads, width, dtype: [
        _fused(heads, width, dtype)[0],
        *(torch.randn(2, heads, 5, width, dtype=dtype) for _ in range(2)),
    ],
    "channels first": lambda heads, width, dtype: [torch.randn(2, heads, width, 7, dtype=dtype).mT for _ in range(3)],
    "one sample for all": lambda heads, width, dtype: [
        torch.randn(1, heads, 7, width, dtype=dtype).expand(2, -1, -1, -1) for _ in range(3)
    ],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "width"), [(3, 6), (2, 32), (1, 16)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_backends_lay_out_their_results_alike(layout, heads, width, dtype, kernel):
    q, k, v = LAYOUTS[layout](heads, width, dtype)
    power, scale = torch.full((heads, width), 2.0), torch.full((heads, width), 0.7)
    results = {}
    for name in ("torch", "cpu"):
        module = backends.MODULES[name]
        inputs = Inputs(q, k, v, power, scale, eps=1e-6)
        out, norms = module.forward(inputs)
        results[name] = [out, norms, *module.backward(torch.randn_like(out), norms, inputs)]
    for a, b in zip(results["torch"], results["cpu"], strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    out, _, grad_q, grad_k, _, _, _ = results["cpu"]
    assert out.stride() == grad_q.stride()
    fused = layout.startswith("fused")
    assert out.transpose(1, 2).is_contiguous() == (fused or heads == 1)
    assert grad_k.is_contiguous() == (layout != "fused projection" or heads == 1)


def test_what_pytorch_is_told_of_layouts_is_what_comes_back(kernel):
    """torch.compile plans with the strides of the operator's stand-in."""
    for layout, name in itertools.product(LAYOUTS, ("torch", "cpu")):
        q, k, v = LAYOUTS[layout](3, 6, torch.float32)
        power = torch.full((3, 6), 2.0)
        real = torch.ops.polaformer.polarity_attention(q, k, v, power, None, None, 0.0, name)
        with torch._subclasses.FakeTensorMode() as mode:
            planned = torch.ops.polaformer.polarity_attention(*map(mode.from_tensor, (q, k, v, power)), None, None, 0.0, name)
        for a, b in zip(real, planned, strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_a_backend_is_what_the_protocol_asks_for():
    for module in backends.MODULES.values():
        verbs = ("describe", "unavailable_reason", "unsupported_reason", "forward", "backward")
        assert all(callable(getattr(module, name)) for name in verbs)
    assert plain.unavailable_reason() is None
    inputs = Inputs(*(x.detach() for x in random_inputs()), eps=1e-3)
    torch.testing.assert_close(plain.forward(inputs)[0], plain.attention(inputs)[0], rtol=1e-12, atol=1e-12)
