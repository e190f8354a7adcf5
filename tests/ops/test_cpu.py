"""The native kernel against the float64 oracle, where a kernel can go wrong: borders, layouts, threads, memory.

What all backends share is tested in test_polarity.py, test_numerics.py and test_laws.py, which run over this one too.
"""

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from oracle import random_inputs, relative_error, relative_error_by_head, with_gradients
from polaformer.ops.native import tensors as native_tensors
from polaformer.ops.polarity import cpu, plain, reference
from polaformer.ops.polarity.inputs import Inputs
from polaformer.ops.polarity.operator import polarity_attention

NAMES = ("out", "q", "k", "v", "power", "scale")
LIMITS = {torch.float32: (1e-6, 5e-6), torch.float64: (1e-12, 1e-12)}  # of values and of gradients, relative in L2
EXACT = pytest.mark.parametrize("dtype", LIMITS, ids=["fp32", "fp64"])
WIDTHS = (*range(2, 41), 48, 64, 72, 96, 128, 160)
# Rows of the first are padded before use, those of the second are used where they lie.
PADDED, DIRECT = 6, 32
# Large enough that the result depends on how large a query is: with one key it would else not, and its gradient be 0.
EPS = 100.0


@pytest.fixture(scope="module", autouse=True)
def _kernel_works_here():
    reason = cpu.unavailable_reason()
    if reason is not None:
        pytest.skip(f"backend cpu: {reason}")


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def poisoned(monkeypatch):
    """Called, it fills with NaN what the kernel works in and what it writes to."""
    yield lambda: (monkeypatch.setattr(native_tensors, "poison", True), torch.use_deterministic_algorithms(True))
    torch.use_deterministic_algorithms(False)


def by_kernel(q: Tensor, k: Tensor, v: Tensor, power: Tensor, scale: Tensor | None = None, **options) -> Tensor:
    return polarity_attention(q, k, v, power, scale=scale, backend="cpu", **options)


def by_oracle(q: Tensor, k: Tensor, v: Tensor, power: Tensor, scale: Tensor | None = None, **options) -> Tensor:
    return reference.polarity_attention(q, k, v, power, scale=scale, **options)


def inputs_with_scale(**sizes) -> list[Tensor]:
    """q, k, v, power and scale."""
    inputs = random_inputs(**sizes)
    return [*inputs, (0.5 + torch.rand_like(inputs[3])).detach().requires_grad_()]


def found_and_wanted(inputs: list[Tensor], cotangent: Tensor | None = None, **options) -> list[tuple[str, Tensor, Tensor]]:
    """Name, the kernel's and the oracle's: of the output and of every gradient."""
    cotangent = torch.randn_like(inputs[0]) if cotangent is None else cotangent
    wide = [x.detach().double().requires_grad_() for x in inputs]
    found = with_gradients(by_kernel, inputs, cotangent, **options)
    return list(zip(NAMES, found, with_gradients(by_oracle, wide, cotangent.double(), **options), strict=False))


def check(inputs: list[Tensor], cotangent: Tensor | None = None, **options) -> None:
    """Output and all gradients are within the limits of their dtype."""
    for name, found, wanted in found_and_wanted(inputs, cotangent, **options):
        error = relative_error(found, wanted)
        assert error <= LIMITS[inputs[0].dtype][name != "out"], (name, error)


def everything(inputs: list[Tensor], cotangent: Tensor, mask: Tensor | None = None, eps: float = 0.0) -> list[Tensor]:
    """What the kernel gives for q, k, v, power and perhaps scale, without autograd: output, denominators, gradients."""
    q, k, v, power, scale = (*(x.detach() for x in inputs), None)[:5]
    problem = Inputs(q, k, v, power, scale, mask, eps)
    out, norms = cpu.forward(problem)
    gradients = cpu.backward(cotangent, norms, problem)
    return [out, norms, *(x for x in gradients if x is not None)]


def same_bits(some: list[Tensor], others: list[Tensor]) -> bool:
    """NaN equals NaN here."""
    pairs = list(zip(some, others, strict=True))
    assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in pairs)
    return all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs)


# ---- widths and lengths ----


@EXACT
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_gives_the_oracles_values_and_gradients(width, dtype):
    check(inputs_with_scale(queries=9, keys=11, width=width, dtype=dtype), eps=1e-3)


@EXACT
@pytest.mark.parametrize("width", [PADDED, DIRECT])
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 6, 7, 12, 13, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1023, 1024, 1025])
def test_every_number_of_tokens_around_a_block_or_chunk(tokens, width, dtype):
    for queries, keys in ((tokens, 5), (5, tokens)):
        inputs = inputs_with_scale(batch=1, heads=2, queries=queries, keys=keys, width=width, dtype=dtype)
        check(inputs, eps=EPS if keys == 1 else 0.0)


@EXACT
def test_more_tokens_than_the_most_chunks_of_the_least_size_hold(dtype):
    for queries, keys in ((64 * 512 + 1, 2), (2, 64 * 512 + 1)):
        inputs = random_inputs(batch=1, heads=1, queries=queries, keys=keys, width=3, dtype=dtype)
        with torch.no_grad():
            inputs[2].abs_()  # the mean of so many numbers of both signs would be near 0
        check(inputs, torch.rand_like(inputs[0]), eps=EPS)


@pytest.mark.parametrize("width", [PADDED, DIRECT])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 5, 5)])
def test_what_is_empty_gives_zeros(batch, queries, keys, width, poisoned):
    poisoned()
    inputs = inputs_with_scale(batch=batch, queries=queries, keys=keys, width=width, dtype=torch.float32)
    for mask in (None, torch.ones(batch, keys, dtype=torch.bool)):
        out, _, *gradients = everything(inputs, torch.ones(batch, 3, queries, width), mask, eps=1e-6)
        assert out.shape == (batch, 3, queries, width)
        for found, x in zip((out, *gradients), (inputs[0], *inputs), strict=True):
            assert found.shape == x.shape
            assert (found == 0).all()


# ---- masks ----


def _mask(*kept: slice | int) -> Tensor:
    """1,200 keys: 19 blocks of 64 or 10 of 128, three chunks."""
    mask = torch.zeros(1200, dtype=torch.bool)
    for part in kept:
        mask[part] = True
    return mask


MASKS = {
    "no first block": _mask(slice(128, None)),
    "no blocks in the middle": _mask(slice(0, 128), slice(384, None)),
    "no first chunk": _mask(slice(512, None)),
    "no middle chunk": _mask(slice(0, 512), slice(1024, None)),
    "no last chunk": _mask(slice(0, 1024)),
    "one chunk": _mask(slice(512, 1024)),
    "one block": _mask(slice(640, 768)),
    "one more than a block": _mask(slice(640, 769)),
    "every other key": _mask(slice(0, None, 2)),
    "first key": _mask(0),
    "last key": _mask(1199),
    "a key in the middle": _mask(777),
    "no key": _mask(),
}


@EXACT
@pytest.mark.parametrize("width", [PADDED, DIRECT])
@pytest.mark.parametrize("case", MASKS)
def test_masks_that_empty_blocks_and_chunks(case, width, dtype):
    mask = torch.stack([MASKS[case], MASKS[case].roll(100)])
    inputs = inputs_with_scale(heads=1, queries=3, keys=1200, width=width, dtype=dtype)
    check(inputs, mask=mask, eps=EPS)


@pytest.mark.parametrize("width", [PADDED, DIRECT])
@pytest.mark.parametrize("hidden", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("case", MASKS)
def test_what_a_mask_hides_changes_no_bit_and_gets_no_gradient(case, hidden, width, poisoned):
    mask = torch.stack([MASKS[case], MASKS[case].roll(100)])
    inputs = [x.detach() for x in inputs_with_scale(heads=2, queries=3, keys=1200, width=width, dtype=torch.float32)]
    cotangent = torch.randn_like(inputs[0])
    clean = everything(inputs, cotangent, mask)
    absent = ~mask[:, None].expand(-1, 2, -1)
    inputs[1][absent] = inputs[2][absent] = hidden
    poisoned()
    found = everything(inputs, cotangent, mask)
    assert same_bits(found, clean)
    assert (found[3][absent] == 0).all()
    assert (found[4][absent] == 0).all()


# ---- layouts ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("width", [PADDED, DIRECT])
def test_a_fused_projection_is_read_where_it_lies_and_results_lie_likewise(width, heads, dtype, monkeypatch):
    read = []
    original = cpu.TensorView
    monkeypatch.setattr(cpu, "TensorView", lambda data, *strides: (read.append(data), original(data, *strides))[1])
    fused = torch.randn(2, 70, 3, heads, width, dtype=dtype, requires_grad=True)
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))  # (B, H, N, D)
    power = random_inputs(heads=heads, width=width, dtype=dtype)[3]
    out = by_kernel(q, k, v, power)
    assert out.transpose(1, 2).is_contiguous()
    assert {x.data_ptr() for x in (q, k, v)} <= set(read)
    read.clear()
    cotangent = torch.randn(2, 70, heads, width, dtype=dtype).transpose(1, 2)
    gradients = torch.autograd.grad(out, (q, k, v, power), cotangent)
    assert all(g.transpose(1, 2).is_contiguous() for g in gradients[:3])
    assert {x.data_ptr() for x in (q, k, v, cotangent)} <= set(read)
    dense = [x.detach().contiguous().requires_grad_() for x in (q, k, v, power)]
    assert same_bits([out, *gradients], with_gradients(by_kernel, dense, cotangent.contiguous()))


@pytest.mark.parametrize("width", [PADDED, DIRECT])
def test_a_gradient_without_strides_counts_as_what_it_stands_for(width):
    inputs = random_inputs(queries=70, keys=66, width=width, dtype=torch.float32)
    gradients = torch.autograd.grad(by_kernel(*inputs).sum(), inputs)
    dense = with_gradients(by_kernel, inputs, torch.ones_like(inputs[0]))
    assert same_bits(list(gradients), dense[1:])
    row = torch.randn(width)  # its last stride is 1, the others are 0
    repeated = with_gradients(by_kernel, inputs, row.expand_as(inputs[0]))
    dense = with_gradients(by_kernel, inputs, row.expand_as(inputs[0]).contiguous())
    assert same_bits(repeated, dense)


LAYOUTS = {
    "every other channel": lambda x: torch.stack([x, torch.full_like(x, 7.0)], dim=-1).flatten(-2)[..., ::2],
    "channels first": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "batch last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "inside a larger tensor": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 4), value=7.0)[..., 1:-4, 3:-2],
}


@pytest.mark.parametrize("width", [5, DIRECT])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_other_layout_gives_the_same_bits(layout, width):
    inputs = [x.detach() for x in random_inputs(queries=70, keys=66, width=width, dtype=torch.float32)]
    cotangent = torch.randn_like(inputs[0])
    moved = [*map(LAYOUTS[layout], inputs[:3]), inputs[3].T.contiguous().T]
    assert not moved[0].is_contiguous()
    assert same_bits(everything(moved, LAYOUTS[layout](cotangent)), everything(inputs, cotangent))


def test_samples_and_heads_that_share_memory_are_read_once_for_each():
    q, k, v, power = (x.detach() for x in random_inputs(dtype=torch.float32))
    shared = [x[:1, :1].expand_as(x) for x in (q, k, v)]
    dense = [x.clone(memory_format=torch.contiguous_format) for x in shared]
    assert same_bits(everything([*shared, power], q), everything([*dense, power], q))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("width", [2, 3, 5, 7, 9, 15, 17, 31, 32, 33, 47])
def test_half_precision_is_float32_rounded_once(width, dtype):
    if dtype == torch.float16 and not cpu.has_float16():
        pytest.skip("the compiler knows no float16")
    inputs = [x.detach() for x in inputs_with_scale(queries=13, keys=70, width=width, dtype=dtype)]
    cotangent, mask = torch.randn_like(inputs[0]), torch.rand(2, 70) > 0.3
    narrow = everything(inputs, cotangent, mask)
    wide = everything([x.float() for x in inputs], cotangent.float(), mask)
    assert same_bits(narrow, [x.to(n.dtype) for x, n in zip(wide, narrow, strict=True)])
    assert [x.dtype for x in narrow] == [dtype, torch.float32, dtype, dtype, dtype, torch.float32, torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_number_of_16_bits_comes_out_as_it_went_in_and_ties_go_to_the_even_one(dtype):
    if dtype == torch.float16 and not cpu.has_float16():
        pytest.skip("the compiler knows no float16")
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[numbers.abs() < torch.finfo(dtype).max / 2].float().sort().values.to(dtype)
    below, above = (x.reshape(1, -1, 1, 2) for x in (numbers[:-2], numbers[1:-1]))  # a head for every two numbers
    power, positive, opposed = torch.ones(below.shape[1], 2), torch.ones_like(below), torch.tensor([1.0, -1.0]).to(dtype)
    # The query meets one channel in each stream: with one key the output is its value, with two alike the mean of theirs.
    q = opposed.expand_as(below)
    assert torch.equal(cpu.forward(Inputs(q, positive, above, power))[0], above)
    both = torch.cat([below, above], dim=2)
    mean = (below.float() / 2 + above.float() / 2).to(dtype)
    assert torch.equal(cpu.forward(Inputs(q, torch.ones_like(both), both, power))[0], mean)


# ---- one weight for both streams, or two ----


def _unlike_heads(dtype: torch.dtype, keys: int = 40, width: int = 8) -> tuple[list[Tensor], dict[str, bool]]:
    """A head of every kind in one problem, and whether one weight serves both of its streams."""
    kinds = {
        "noise": True,
        "dead channels": True,
        "positive keys 1e20 times larger": False,
        "positive keys 1e20 times smaller": False,
        "one channel 1e20 times larger on one side": False,
        "a channel without negative keys": False,
        "a channel without positive keys": False,
        "no negative keys": False,
        "all channels dead": True,
        "larger by 1e3": True,
    }
    q, k, v = (torch.randn(1, len(kinds), n, width, dtype=torch.float64) for n in (12, keys, keys))
    _meet_one_sign_alone(q)
    factors = dict(zip(kinds, k[0], strict=True))
    factors["dead channels"][:, ::3] = 0
    factors["positive keys 1e20 times larger"].mul_(torch.where(k[0, 2] > 0, 1e20, 1.0))
    factors["positive keys 1e20 times smaller"].mul_(torch.where(k[0, 3] > 0, 1e-20, 1.0))
    factors["one channel 1e20 times larger on one side"][:, 5].mul_(torch.where(k[0, 4, :, 5] < 0, 1e20, 1.0))
    factors["a channel without negative keys"][:, 3].abs_()
    factors["a channel without positive keys"][:, 3].abs_().neg_()
    factors["no negative keys"].abs_()
    factors["all channels dead"].zero_()
    factors["larger by 1e3"].mul_(torch.where(k[0, 9] > 0, 1e3, 1.0))
    power = torch.full((len(kinds), width), 2.5, dtype=torch.float64)  # 1e50: beyond the range of float32
    return [x.to(dtype).requires_grad_() for x in (q, k, v, power)], kinds


def _meet_one_sign_alone(q: Tensor) -> None:
    """Makes some queries meet keys of one sign only in a stream, so that the other sign's, however large, are not to matter."""
    q[..., :3, :].abs_()
    q[..., 3:6, :].abs_().neg_()


def _whole_exponents(k: Tensor, power: Tensor) -> Tensor:
    """c of the kernel: (2, B, H, D), -1e6 where a sign has no key."""
    peaks = torch.stack([k.amax(dim=-2), (-k).amax(dim=-2)]).clamp(min=0).detach()
    return torch.where(peaks == 0, -1e6, (power * peaks.log2()).round())


@EXACT
def test_heads_of_every_kind_in_one_call(dtype):
    inputs, kinds = _unlike_heads(dtype)
    c = _whole_exponents(inputs[1], inputs[3])
    assert ((c[0] - c[1]).abs() <= 30).all(dim=-1)[0].tolist() == list(kinds.values())
    for name, found, wanted in found_and_wanted(inputs):
        limit = LIMITS[dtype][name != "out"]
        errors = dict(zip(kinds, relative_error_by_head(found, wanted).tolist(), strict=True))
        assert max(errors.values()) <= limit, (name, errors)
        if name == "k":  # gradients of keys of one sign may be 1e20 times those of the other: each counts
            for side in (inputs[1] > 0, inputs[1] < 0):
                errors = dict(zip(kinds, relative_error_by_head(found * side, wanted * side).tolist(), strict=True))
                assert max(errors.values()) <= limit, (name, errors)


@EXACT
def test_heads_do_not_see_how_others_are_weighed(dtype):
    inputs, kinds = _unlike_heads(dtype)
    cotangent = torch.randn_like(inputs[0])
    together = everything(inputs, cotangent)
    for head in range(len(kinds)):
        part = slice(head, head + 1)
        alone = everything([*(x[:, part] for x in inputs[:3]), inputs[3][part]], cotangent[:, part])
        assert same_bits(alone, [x[:, part] if x.ndim == 4 else x[part] for x in together]), list(kinds)[head]


@EXACT
@pytest.mark.parametrize("width", [PADDED, DIRECT])
@pytest.mark.parametrize("larger", ["positive", "negative"])
@pytest.mark.parametrize("apart", [29, 30, 31, 32, 127])
def test_the_border_between_one_weight_and_two(apart, larger, width, dtype):
    q, k, v, _ = (x.detach() for x in random_inputs(batch=1, heads=1, queries=20, keys=30, width=width, dtype=torch.float64))
    _meet_one_sign_alone(q)
    k = k / torch.where(k > 0, k.amax(dim=-2, keepdim=True), -k.amin(dim=-2, keepdim=True))  # the peaks are 1
    k = k * torch.where((k > 0) == (larger == "positive"), 2.0**apart, 1.0)
    power = torch.ones(1, width)
    c = _whole_exponents(k, power)
    assert ((c[0] - c[1]).abs() == apart).all()
    check([x.to(dtype).requires_grad_() for x in (q, k, v, power)])


# ---- threads ----

SHARED_WORK = {
    "by head": {"batch": 2, "heads": 4, "queries": 70, "keys": 90, "width": DIRECT},
    "by head, many chunks": {"batch": 2, "heads": 4, "queries": 600, "keys": 1100, "width": PADDED},
    "in phases": {"batch": 1, "heads": 2, "queries": 1100, "keys": 1300, "width": DIRECT},
    "in phases, one head": {"batch": 1, "heads": 1, "queries": 3000, "keys": 2600, "width": PADDED},
    "by head with one thread, in phases with two": {"batch": 1, "heads": 5, "queries": 1300, "keys": 700, "width": DIRECT},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("way", SHARED_WORK)
def test_the_number_of_threads_changes_no_bit(way, masked, dtype, poisoned):
    inputs = inputs_with_scale(**SHARED_WORK[way], dtype=dtype)
    mask = torch.rand(inputs[1].shape[0], inputs[1].shape[2]) > 0.4 if masked else None
    cotangent = torch.randn_like(inputs[0])
    torch.set_num_threads(1)
    alone = everything(inputs, cotangent, mask, eps=1e-4)
    poisoned()
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert same_bits(everything(inputs, cotangent, mask, eps=1e-4), alone)


@pytest.mark.parametrize("repeats", [40, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("way", ["by head", "in phases"])
def test_n7_repeats_give_the_same_bits(way, repeats):
    """Row N7, with two threads, forward and backward."""
    sizes = {
        "by head": {"batch": 2, "heads": 4, "queries": 70, "keys": 64, "width": DIRECT},
        "in phases": {"batch": 1, "heads": 2, "queries": 520, "keys": 530, "width": 16},
    }[way]
    inputs = random_inputs(**sizes, dtype=torch.float32)
    cotangent = torch.randn_like(inputs[0])
    torch.set_num_threads(2)
    first = everything(inputs, cotangent)
    assert all(same_bits(everything(inputs, cotangent), first) for _ in range(repeats))


def test_calls_from_many_threads_of_the_program_do_not_meet():
    """The kernel runs without Python's lock, and keeps memory for each thread."""
    torch.set_num_threads(2)
    shapes = [{"queries": 30 * i, "keys": 700 - 40 * i, "width": 4 + 7 * i} for i in range(1, 9)]
    problems = [random_inputs(**shape, dtype=torch.float32) for shape in shapes]
    wanted = [everything(inputs, inputs[0].detach()) for inputs in problems]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda inputs: everything(inputs, inputs[0].detach()), problems * 10))
    assert all(same_bits(a, b) for a, b in zip(found, wanted * 10, strict=True))


# ---- what memory holds ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [3, PADDED, 16, 24, DIRECT, 33, 72])
def test_memory_is_written_before_it_is_read(width, masked, dtype, poisoned):
    problems = [
        inputs_with_scale(heads=2, queries=19, keys=70, width=width, dtype=dtype),
        inputs_with_scale(batch=1, heads=2, queries=600, keys=530, width=width, dtype=dtype),
        random_inputs(heads=4, queries=3, keys=1, width=width, dtype=dtype),
    ]
    with torch.no_grad():
        problems[0][1][:, 1].abs_()  # one weight for the first head, two for the second
    masks = [torch.rand(x[1].shape[0], x[1].shape[2]) > 0.5 if masked else None for x in problems]
    cotangents = [torch.randn_like(x[0]) for x in problems]
    clean = [everything(*problem, eps=1e-5) for problem in zip(problems, cotangents, masks, strict=True)]
    poisoned()
    assert torch.empty(3).isnan().all()
    for problem, wanted in zip(zip(problems, cotangents, masks, strict=True), clean, strict=True):
        assert not any(x.isnan().any() for x in wanted)
        assert same_bits(everything(*problem, eps=1e-5), wanted)


def test_poison_reaches_what_the_kernel_works_in(monkeypatch):
    """Else the tests above would prove nothing: the field arrives where the kernel looks for it."""
    seen = []
    library, _ = cpu._kernel()
    monkeypatch.setattr(native_tensors, "poison", True)
    monkeypatch.setattr(cpu, "_kernel", lambda: (_Watched(library, seen), None))
    inputs = [x.detach() for x in random_inputs(dtype=torch.float32)]
    cpu.forward(Inputs(*inputs))
    assert seen == [(1, 6)]


class _Watched:
    """The library, and what its problems hold: poison and width."""

    def __init__(self, library, seen):
        self.library, self.seen = library, seen

    def polarity_attention(self, problem):
        self.seen.append((problem._obj.poison, problem._obj.width))
        return self.library.polarity_attention(problem)


GROWTH = """
import torch
from polaformer.ops.polarity import cpu
from polaformer.ops.polarity.inputs import Inputs

def pages(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

def growth(call):
    open("/proc/self/clear_refs", "w").write("5")  # the highest mark begins anew
    before = pages("VmRSS")
    kept = call()
    held = sum(x.numel() * x.element_size() for x in kept if x is not None)
    return (pages("VmHWM") - before - held) / 2**20, kept

def problem(tokens):
    return [torch.randn(1, 2, tokens, 32) for _ in range(4)]

power = torch.full((2, 32), 3.0)
q, k, v, grad = problem(4096)
cpu.backward(grad, cpu.forward(Inputs(q, k, v, power))[1], Inputs(q, k, v, power))
alive = []
for tokens in (2**16, 2**18):
    q, k, v, grad = problem(tokens)
    extra, (out, norms) = growth(lambda: cpu.forward(Inputs(q, k, v, power)))
    back, gradients = growth(lambda: cpu.backward(grad, norms, Inputs(q, k, v, power)))
    alive += [q, k, v, grad, out, norms, *gradients]
    print(extra, back)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="peaks of memory are read from Linux's /proc")
def test_n9_the_kernels_own_memory_does_not_grow_with_the_tokens():
    """Beyond inputs and results, in MiB, forward and backward, at 65,536 and 262,144 tokens."""
    run = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    extra = [float(word) for word in run.stdout.split()]
    assert len(extra) == 4
    assert max(extra) < 8, extra
    assert min(extra) > -8, f"results were put into memory that was there before, so that nothing was measured: {extra}"


# ---- magnitudes ----


@EXACT
@pytest.mark.parametrize("width", [PADDED, DIRECT])
def test_nan_shows_where_it_should_and_nowhere_else(width, dtype):
    clean = [x.detach() for x in random_inputs(queries=9, keys=8, width=width, dtype=dtype)]
    cotangent = torch.randn_like(clean[0])
    untouched = everything(clean, cotangent)
    for index, name in enumerate(("q", "k", "v")):
        inputs = [x.clone() for x in clean]
        inputs[index][1, 2, 3, 1] = float("nan")
        found = everything(inputs, cotangent)
        shown = found[0].isnan()
        assert shown[1, 2, 3, : (width + 1) // 2].any(), name
        expected = torch.zeros_like(shown)
        if name == "q":
            expected[1, 2, 3] = True
        elif name == "k":
            expected[1, 2] = True
        else:
            expected[1, 2, :, 1] = True
        assert torch.equal(shown, expected), name
        assert any(g[1, 2].isnan().any() for g in found[2:5]), name
        for a, b in zip(found[:5], untouched[:5], strict=True):
            assert torch.equal(a[0], b[0]), name
            assert torch.equal(a[1, :2], b[1, :2]), name


@EXACT
@pytest.mark.parametrize("width", [PADDED, DIRECT])
@pytest.mark.parametrize("infinity", [float("inf"), -float("inf")])
def test_infinity_stays_in_its_head(infinity, width, dtype):
    clean = [x.detach() for x in random_inputs(queries=9, keys=8, width=width, dtype=dtype)]
    untouched = everything(clean, clean[0])
    for index in range(3):
        inputs = [x.clone() for x in clean]
        inputs[index][1, 2, 3, 1] = infinity
        found = everything(inputs, clean[0])
        assert not found[0][1, 2].isfinite().all()
        for a, b in zip(found[:5], untouched[:5], strict=True):
            assert torch.equal(a[0], b[0])
            assert torch.equal(a[1, :2], b[1, :2])


def test_errors_do_not_grow_with_the_number_of_tokens():
    """Sums over a million tokens are made of short ones."""
    q, k, v, power = (x.detach() for x in random_inputs(1, 1, 2**20, 2**20, width=4, dtype=torch.float32))
    grad = torch.randn_like(q)
    wide = [x.double() for x in (q, k, v, power)]
    out, norms = cpu.forward(Inputs(q, k, v, power))
    truth, true_norms = cpu.forward(Inputs(*wide))
    assert relative_error(out, truth) < 1e-6
    found = cpu.backward(grad, norms, Inputs(q, k, v, power))[:3]
    wanted = cpu.backward(grad.double(), true_norms, Inputs(*wide))[:3]
    for gradient, true_gradient in zip(found, wanted, strict=True):
        assert relative_error(gradient, true_gradient) < 2e-6


@pytest.mark.parametrize("threads", [1, 2])
def test_the_kernel_is_given_the_threads_of_torch(threads, monkeypatch):
    given = []

    class Recorder:
        def polarity_attention(self, problem):
            given.append(problem._obj.threads)
            return 0

        polarity_attention_backward = polarity_attention

    torch.set_num_threads(threads)
    q, k, v, power = random_inputs(batch=1, heads=1, queries=3, keys=3, width=4, dtype=torch.float32)
    monkeypatch.setattr(cpu, "_kernel", lambda: (Recorder(), None))
    _, norms = cpu.forward(Inputs(q, k, v, power))
    cpu.backward(q, norms, Inputs(q, k, v, power))
    assert given == [threads, threads]


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="threads are counted in Linux's /proc")
def test_the_kernel_starts_the_threads_that_it_is_given():
    if not cpu.has_threads():
        pytest.skip("the compiler knows no OpenMP")
    count = (
        "import os, torch; from polaformer.ops.polarity import cpu; from polaformer.ops.polarity.inputs import Inputs; "
        "torch.set_num_threads({threads}); "
        "q = torch.ones(32).expand(4, 8, 64, 32); p = torch.ones(8, 32); cpu.unavailable_reason(); "
        "before = len(os.listdir('/proc/self/task')); cpu.forward(Inputs(q, q, q, p)); "
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    commands = [[sys.executable, "-c", count.format(threads=threads)] for threads in (1, 3)]
    started = [int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for command in commands]
    assert started == [0, 2]


@pytest.mark.skipif(not os.path.exists("/proc/cpuinfo") or "CXX" in os.environ, reason="what is widest is not known")
def test_the_kernel_is_compiled_for_the_widest_vectors_here():
    if "-march=native" not in cpu.options():
        pytest.skip("the compiler knows no -march=native")
    flags = Path("/proc/cpuinfo").read_text().split()
    wanted = 64 if "avx512f" in flags else 32 if "avx" in flags else 16
    library, _ = cpu._kernel()
    assert library is not None
    assert library.vector_bytes() == wanted


@EXACT
@pytest.mark.parametrize("width", [PADDED, DIRECT])
def test_the_unshifted_form_agrees_at_unit_scale(width, dtype):
    q, k, v, power = (x.detach() for x in random_inputs(queries=20, keys=30, width=width, dtype=dtype))
    safe, unsafe = (cpu.forward(Inputs(q, k, v, power, eps=1e-6), shifted=shifted)[0] for shifted in (True, False))
    assert relative_error(unsafe, safe) < 1e-5
    assert not torch.equal(unsafe, safe)


@pytest.mark.parametrize("width", [PADDED, DIRECT])
def test_the_safe_form_is_right_at_1e20(width):
    q, k, v, power = (x.detach() for x in random_inputs(queries=20, keys=30, width=width, dtype=torch.float32, power=3.0))
    safe = cpu.forward(Inputs(q * 1e20, k * 1e20, v, power))[0]
    assert relative_error(safe, reference.polarity_attention(q.double(), k.double(), v.double(), power)) < 5e-6


@pytest.mark.parametrize("width", [PADDED, DIRECT])
def test_the_unshifted_form_overflows_at_1e20(width):
    q, k, v, power = (x.detach() for x in random_inputs(queries=20, keys=30, width=width, dtype=torch.float32, power=3.0))
    assert not cpu.forward(Inputs(q * 1e20, k * 1e20, v, power), shifted=False)[0].isfinite().any()


def test_n3_far_from_unit_scale_values_are_as_exact_as_near_it_and_more_so_than_plain_ones():
    """Magnitudes of q and of k over 61 decades, one power a head."""
    scales = [10.0**i for i in range(-30, 31, 6)]
    cells = list(itertools.product(scales, scales, (1.001, 1.5, 3.0, 5.0, 8.0)))
    scales_q, scales_k, powers = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in zip(*cells, strict=True))
    q, k, v = (torch.randn(1, len(cells), n, 16, dtype=torch.float64) for n in (8, 10, 10))
    inputs = [(q * scales_q).float(), (k * scales_k).float(), v.float(), powers[:, 0].expand(-1, 16).float().contiguous()]
    wanted = reference.polarity_attention(*(x.double() for x in inputs))
    ours, plain_ones = (relative_error_by_head(module.forward(Inputs(*inputs))[0], wanted).max() for module in (cpu, plain))
    assert ours < 5e-6
    assert ours < plain_ones


@EXACT
def test_subnormal_numbers_count(dtype):
    smallest = torch.finfo(dtype).smallest_normal
    q, k, v, power = random_inputs(batch=1, heads=1, width=DIRECT, dtype=dtype, power=1.5)
    q, k = ((x.detach() * 0.2 * smallest).requires_grad_() for x in (q, k))
    assert (k.abs() < smallest).any()
    wanted = reference.polarity_attention(*(x.detach().double() for x in (q * 2.0**20, k * 2.0**20, v, power)))
    assert relative_error(by_kernel(q, k, v, power), wanted) < LIMITS[dtype][0]


def test_large_powers_of_tiny_numbers_are_not_taken_for_zeros():
    q, k, v, power = (x.detach() for x in random_inputs(dtype=torch.float32, power=3000.0))
    q, k = q.sign() * 1e-30 * (1 + 1e-4 * q.abs()), k.sign() * 1e-30 * (1 + 1e-4 * k.abs())
    out = cpu.forward(Inputs(q, k, v, power))[0]
    wanted = reference.polarity_attention(q.double(), k.double(), v.double(), power.double())
    assert relative_error(out, wanted) < 2e-3


def test_results_lie_by_the_strides_that_were_given_not_by_those_of_a_copy():
    q, k, v = (torch.randn(2, 5, 3, 64)[..., ::2].transpose(1, 2) for _ in range(3))
    arguments = (q, k, v, torch.full((3, 32), 3.0), None, None, 0.0, "cpu")
    torch.library.opcheck(torch.ops.polaformer.polarity_attention.default, arguments)


@pytest.mark.numerics
@pytest.mark.parametrize("options", ["-mno-avx", "-mno-avx512f", "-D__AVX512F__", "-U__FLT16_MAX__"])
def test_other_widths_of_vectors_and_older_compilers_compute_the_same(options, tmp_path):
    program = (
        "import torch, sys; sys.path.insert(0, 'tests')\n"
        "from polaformer import PolaAttention\n"
        "from oracle import *; from polaformer.ops.polarity.operator import polarity_attention as f\n"
        "for width in (2, 5, 8, 17, 32, 64):\n"
        "    for dtype, limit in ((torch.float32, 2e-6), (torch.float64, 1e-12), (torch.float16, 1e-3)):\n"
        "        inputs = random_inputs(queries=70, keys=67, width=width, dtype=dtype); g = torch.randn_like(inputs[0])\n"
        "        errors = [relative_error(a, b) for a, b in zip(with_gradients(f, inputs, g), truth(inputs, g))]\n"
        "        assert max(errors) < limit, (width, dtype, errors)\n"
        "layer = PolaAttention(64, 2); x = torch.randn(1, 49, 64)\n"
        "wide = layer(x, (7, 7)); half = layer.half()(x.half(), (7, 7)); assert relative_error(half, wide) < 5e-3\n"
    )
    environment = os.environ | {"CXX": f"g++ {options}", "POLAFORMER_CACHE": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment)
    assert found.returncode == 0, found.stderr
