"""The Triton kernels against the float64 oracle, run by Triton's interpreter: nothing here has seen a GPU.

Triton decides between compiler and interpreter when a kernel is decorated. So the kernels are imported anew, with
TRITON_INTERPRET set, for this file only; what the process did with triton before, and does afterwards, is untouched.
"""

import importlib
import importlib.util
import sys

import pytest
import torch

from oracle import random_inputs, relative_error, relative_error_by_head, truth
from polaformer.ops.polarity import reference
from polaformer.ops.polarity import triton as backend
from polaformer.ops.polarity.inputs import Inputs

triton = pytest.importorskip("triton")
# The interpreter computes with numpy, which speaks of every infinity; those here are meant.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
KERNELS = "polaformer.ops.polarity.triton_kernels"
NAMES = ("out", "q", "k", "v", "power", "scale")


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """The kernels, built for the interpreter."""
    before = sys.modules.pop(KERNELS, None)
    interpreter = importlib.import_module("triton.runtime.interpreter")
    prepare, untouched = interpreter._patch_lang, triton.language.range

    def prepare_once(kernel):
        return prepare(kernel) if triton.language.range is untouched else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        # It prepares triton's language for a launch, and again for every helper that a kernel calls: a third of the time.
        patch.setattr(interpreter, "_patch_lang", prepare_once)
        yield importlib.import_module(KERNELS)
    sys.modules.pop(KERNELS)
    if before is not None:
        sys.modules[KERNELS] = before


@pytest.fixture
def _poisoned():
    """Uninitialised memory holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def calls(kernels, monkeypatch):
    """The arguments of every launch, as (kernel, grid, arguments)."""
    launched = []

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*args, **options):
                launched.append((self.kernel.__name__, grid, args))
                return self.kernel[grid](*args, **options)

            return launch

    for name in ("find_peaks", "summarise", "attend", "attend_backward", "state_backward", "summarise_backward"):
        monkeypatch.setattr(kernels, name, Recorder(getattr(kernels, name)))
    return launched


def random_scale(heads, width):
    return 0.5 + torch.rand(heads, width)


def by_kernels(inputs, cotangent, *, scale=None, mask=None, eps=0.0):
    """The output and the gradients of q, k, v, power and, if given, scale."""
    with torch.no_grad():
        given = Inputs(*inputs, scale, mask, eps)
        out, norms = backend.forward(given)
        gradients = backend.backward(cotangent.to(out.dtype), norms, given)
    return [out, *(g for g in gradients if g is not None)]


def by_oracle(inputs, cotangent, *, scale=None, **options):
    """The same in float64 from the explicit maps, q and k divided by the scale."""
    if scale is None:
        return truth(inputs, cotangent, **options)
    q, k, v, power, s = (x.detach().double().requires_grad_() for x in (*inputs, scale))
    out = reference.polarity_attention(q / s[:, None], k / s[:, None], v, power, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v, power, s), cotangent.double())]


def check(inputs, *, values=1e-6, gradients=5e-6, **options):
    """Compares everything with the oracle."""
    cotangent = torch.randn(inputs[0].shape).to(inputs[0].dtype)
    found, wanted = by_kernels(inputs, cotangent, **options), by_oracle(inputs, cotangent, **options)
    assert len(found) == len(wanted)
    for name, f, w in zip(NAMES, found, wanted, strict=False):
        limit = values if name == "out" else gradients
        assert relative_error(f, w) < limit, (name, relative_error(f, w))
    return found


SHAPES = {
    2: (2, 2, 7, 5),
    5: (1, 2, 7, 40),
    16: (1, 1, 32, 64),
    17: (2, 1, 40, 33),
    24: (1, 1, 9, 50),
    32: (1, 1, 65, 31),
    64: (1, 1, 35, 70),
    80: (1, 1, 17, 40),
    128: (1, 1, 5, 20),
    256: (1, 1, 3, 18),
}


@pytest.mark.parametrize("width", SHAPES)
@pytest.mark.usefixtures("_poisoned")
def test_values_and_all_gradients_equal_the_oracles_at_every_width(width):
    inputs = random_inputs(*SHAPES[width], width, dtype=torch.float32)
    check(inputs, scale=random_scale(*inputs[3].shape))


@pytest.mark.parametrize("width", [17, 64])
def test_half_precision_inputs_lose_no_more_than_rounding_the_result(width):
    inputs = random_inputs(1, 1, 40, 70, width, dtype=torch.float16)
    found = check(inputs, values=5e-4, gradients=1e-3, scale=random_scale(1, width))
    assert [x.dtype for x in found] == [torch.float16] * 4 + [torch.float32] * 2


def test_bfloat16_is_widened_for_the_interpreter_which_rounds_it_wrongly():
    found = check(random_inputs(1, 1, 9, 20, 16, dtype=torch.bfloat16), values=4e-3, gradients=4e-3)
    assert [x.dtype for x in found] == [torch.bfloat16] * 4 + [torch.float32]


def test_without_a_scale_there_is_no_gradient_of_it():
    inputs = random_inputs(1, 2, 5, 9, 6, dtype=torch.float32)
    check(inputs)
    with torch.no_grad():
        norms = backend.forward(Inputs(*inputs))[1]
        assert backend.backward(torch.ones_like(inputs[0]), norms, Inputs(*inputs))[4] is None


def test_one_power_for_all_heads_may_be_an_expanded_view():
    q, k, v, _ = random_inputs(1, 3, 5, 9, 6, dtype=torch.float32)
    power = torch.tensor([1.0, 3.0, 2.5, 1.5, 4.0, 2.0]).expand(3, -1)
    check([q, k, v, power])
    check([q, k, v, torch.full((3, 6), 3.0)])


@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_content_under_the_mask_influences_nothing_and_gets_no_gradient(eps):
    inputs = random_inputs(3, 1, 9, 70, 6, dtype=torch.float32)
    mask = torch.rand(3, 70) < 0.6
    mask[0, 32:64] = False
    mask[1] = False
    cotangent = torch.randn(3, 1, 9, 6)
    wanted = by_oracle(inputs, cotangent, mask=mask, eps=eps)
    hidden = ~mask[:, None, :, None].expand_as(inputs[1])
    for x, bad in ((inputs[1], float("nan")), (inputs[2], float("inf"))):
        x.data[hidden] = bad
    found = by_kernels(inputs, cotangent, mask=mask, eps=eps)
    for name, f, w in zip(NAMES, found, wanted, strict=False):
        assert relative_error(f, w) < 5e-6, name
    assert not found[0][1].any()
    assert not found[1][1].any()
    assert not found[2][hidden].any()
    assert not found[3][hidden].any()


def test_eps_is_added_in_true_units_at_any_magnitude():
    inputs = random_inputs(1, 1, 9, 40, 6, dtype=torch.float32, power=3.0)
    for size, eps in ((1e-3, 1e-15), (1e3, 1e20), (1e-6, 1e-6)):
        scaled = [inputs[0] * size, inputs[1] * size, *inputs[2:]]
        out = backend.forward(Inputs(*(x.detach() for x in scaled), eps=eps))[0]
        wanted, without = (truth(scaled, torch.ones(1, 1, 9, 6), eps=added)[0] for added in (eps, 0.0))
        assert relative_error(out, wanted) < 1e-6, (size, eps)
        assert relative_error(without, wanted) > 0.1, "eps matters here"
    check(inputs, eps=0.5)


def test_beside_a_far_larger_eps_values_and_gradients_vanish():
    q, k, v, power = random_inputs(1, 1, 9, 5, 6, dtype=torch.float32, power=3.0)
    found = by_kernels([q * 1e-12, k * 1e-12, v, power], torch.ones(1, 1, 9, 6), eps=1e-6)
    assert all(not x.any() for x in found[:4])


def test_eps_without_any_key_mass_gives_zeros():
    q, k, v, power = random_inputs(1, 1, 4, 5, 6, dtype=torch.float32)
    found = by_kernels([q, torch.zeros_like(k), v, power], torch.ones(1, 1, 4, 6), eps=1e-6)
    assert all(not x.any() for x in found)


def test_a_query_that_meets_no_mass_in_a_stream_gets_zeros_and_passes_no_gradient():
    q, k, v, power = random_inputs(1, 2, 6, 9, 6, dtype=torch.float32)
    with torch.no_grad():
        k[:, 0] = k[:, 0].abs()
        q[:, 0] = q[:, 0].abs()
        q[:, :, 2] = 0.0
        q[:, 1, 3, ::2] = 0.0
        k[:, 1, 4] = 0.0
    out, dq, dk, *_ = check([q, k, v, power])
    assert not out[0, 0, :, 3:].any()
    assert out[0, 0, 0, :3].all()
    assert not out[0, :, 2].any()
    assert not dq[0, :, 2].any()
    assert not dq[0, 1, 3, ::2].any()
    assert not dk[0, 1, 4].any()


# A head each: the magnitudes of its queries and keys.
MAGNITUDES = ((1e-30, 1e-30), (1e30, 1e30), (1e30, 1e-30), (1e-20, 1e5), (1e-34, 1.0), (1.0, 1e37))


def test_no_digits_are_lost_at_extreme_magnitudes():
    q, k, v, _ = random_inputs(1, len(MAGNITUDES), 9, 20, 8, dtype=torch.float32)
    # One power a head: else one channel outweighs the others, and true gradients are differences of equal numbers.
    power = torch.linspace(1.3, 4.7, len(MAGNITUDES))[:, None].expand(-1, 8)
    with torch.no_grad():
        q *= torch.tensor([a for a, _ in MAGNITUDES])[:, None, None]
        k *= torch.tensor([b for _, b in MAGNITUDES])[:, None, None]
    cotangent = torch.randn(1, len(MAGNITUDES), 9, 8)
    scale = random_scale(len(MAGNITUDES), 8)
    found, wanted = (run([q, k, v, power], cotangent, scale=scale) for run in (by_kernels, by_oracle))
    for name, f, w in zip(NAMES, found, wanted, strict=True):
        errors = relative_error_by_head(f, w)
        assert errors.max() < (1e-6 if name == "out" else 5e-6), (name, errors)


def test_subnormal_and_largest_floats_mixed_give_no_nan_and_the_right_values():
    q, k, v, power = random_inputs(1, 2, 9, 20, 6, dtype=torch.float32)
    with torch.no_grad():
        for x in (q, k):
            x[0, 0] *= 1e-43
            x[0, 1] = x[0, 1].sign() * 10.0 ** (torch.rand_like(x[0, 1]) * 82 - 44)
            x[0, 1, 0] = torch.finfo(torch.float32).max
            x[0, 1, 1] = 1.4e-45
    assert 0 < q[0, 0].abs()[q[0, 0] != 0].min() < torch.finfo(torch.float32).tiny
    cotangent = torch.randn(1, 2, 9, 6)
    found, wanted = by_kernels([q, k, v, power], cotangent), truth([q, k, v, power], cotangent)
    assert relative_error_by_head(found[0], wanted[0]).max() < 1e-4
    assert relative_error_by_head(found[4], wanted[4]).max() < 1e-4
    assert not any(x.isnan().any() for x in found)


def test_scales_of_extreme_magnitude_do_not_overflow():
    q, k, v, _ = random_inputs(1, 2, 5, 9, 6, dtype=torch.float32)
    power = torch.tensor([[3.3], [4.7]]).expand(-1, 6)
    check([q, k, v, power], scale=random_scale(2, 6) * torch.tensor([[1e-30], [1e30]]))


def test_a_fused_projection_is_read_in_place_and_answered_in_its_own_layout(calls):
    batch, tokens, heads, width = 2, 9, 2, 6
    projection = torch.randn(batch, tokens, 3, heads, width)
    q, k, v = projection.permute(2, 0, 3, 1, 4)
    power = 1 + 4 * torch.rand(heads, width)
    cotangent = torch.randn(batch, tokens, heads, width).transpose(1, 2)
    found = by_kernels([q, k, v, power], cotangent)
    read = {(name, args[0].data_ptr()) for name, _, args in calls} | {
        (name, args[4].data_ptr()) for name, _, args in calls if name not in ("find_peaks", "attend")
    }
    assert {("attend", q.data_ptr()), ("find_peaks", k.data_ptr()), ("summarise", k.data_ptr())} <= read
    assert {("summarise", v.data_ptr()), ("summarise_backward", k.data_ptr()), ("summarise_backward", v.data_ptr())} <= read
    assert {("attend_backward", q.data_ptr()), ("state_backward", q.data_ptr())} <= read
    assert {("attend_backward", cotangent.data_ptr()), ("state_backward", cotangent.data_ptr())} <= read
    assert all(x.transpose(1, 2).is_contiguous() and not x.is_contiguous() for x in found[:4])
    copied = by_kernels([q.contiguous(), k.contiguous(), v.contiguous(), power], cotangent.contiguous())
    assert all(x.is_contiguous() for x in copied)
    assert all(torch.equal(a, b) for a, b in zip(found, copied, strict=True))


def test_channels_that_do_not_lie_beside_each_other_are_copied_first():
    q, k, v, power = random_inputs(1, 2, 5, 9, 6, dtype=torch.float32)
    turned = [x.detach().mT.contiguous().mT for x in (q, k, v)]
    assert turned[0].stride(-1) != 1
    cotangent = torch.ones(1, 1, 1, 1).expand(1, 2, 5, 6)
    wanted = by_kernels([q, k, v, power], cotangent.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(by_kernels([*turned, power], cotangent), wanted, strict=True))


def test_several_splits_are_summed_and_repeats_are_bitwise_equal(calls, monkeypatch):
    inputs = random_inputs(1, 1, 70, 130, 4, dtype=torch.float32)
    cotangent = torch.randn(1, 1, 70, 4)
    mask = torch.rand(1, 130) < 0.9
    first, second = (by_kernels(inputs, cotangent, mask=mask, eps=1e-3) for _ in range(2))
    assert {(name, grid[1]) for name, grid, _ in calls if name != "attend"} == {
        ("find_peaks", 3),
        ("summarise", 3),
        ("attend_backward", 3),
        ("state_backward", 3),
        ("summarise_backward", 3),
    }
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for f, w in zip(first, by_oracle(inputs, cotangent, mask=mask, eps=1e-3), strict=True):
        assert relative_error(f, w) < 1e-6
    monkeypatch.setattr(backend, "INTERPRETED_SPLITS", 1)
    for f, w in zip(by_kernels(inputs, cotangent, mask=mask, eps=1e-3), first, strict=True):
        assert relative_error(f, w) < 1e-6


@pytest.mark.parametrize("first", [1e-20, 1e20])
def test_one_split_of_far_larger_keys_than_the_others_sets_the_shift_of_all(first):
    q, k, v, power = (x.detach() for x in random_inputs(1, 1, 5, 70, 6, dtype=torch.float32))
    k[:, :, :32] *= first
    assert backend._num_splits(k, backend._sizes(k)) == 3
    out = backend.forward(Inputs(q, k, v, power))[0]
    assert relative_error(out, reference.polarity_attention(q.double(), k.double(), v.double(), power.double())) < 1e-6


def test_splits_take_every_token_once_and_none_is_without_any(monkeypatch):
    for wanted in (1, 2, 3, 7, 100):
        monkeypatch.setattr(backend, "INTERPRETED_SPLITS", wanted)
        for tokens in (1, 31, 32, 33, 64, 200, 1000, 3136):
            x = torch.empty(1, 1, tokens, 16)
            sizes = backend._sizes(x)
            splits = backend._num_splits(x, sizes)
            taken = backend._per_split(tokens, splits, sizes)
            assert splits <= wanted
            assert taken % sizes.block == 0
            assert (splits - 1) * taken < tokens <= splits * taken


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_nothing_in_gives_nothing_or_zeros_out(shape):
    inputs = random_inputs(*shape, 6, dtype=torch.float32)
    found = by_kernels(inputs, torch.ones_like(inputs[0]), scale=random_scale(2, 6), eps=1e-6)
    assert [x.shape for x in found] == [x.shape for x in (inputs[0], *inputs, inputs[3])]
    assert all(not x.any() for x in found)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_in_the_input_show(bad):
    for place in range(3):
        inputs = [x.detach() for x in random_inputs(1, 2, 5, 9, 6, dtype=torch.float32)]
        inputs[place][0, 0, 3, 1] = bad
        out = backend.forward(Inputs(*inputs))[0]
        wanted = torch.zeros_like(out, dtype=torch.bool)
        # A query spoils its own row, a key all rows, a value its column.
        wanted[((0, 0, 3), (0, 0), (0, 0, slice(None), 1))[place]] = True
        assert torch.equal(~out.isfinite(), wanted), place


def test_nan_shows_also_where_no_key_has_the_needed_sign():
    q, k, v, power = (x.detach() for x in random_inputs(1, 1, 3, 5, 6, dtype=torch.float32))
    q[0, 0, 1, 2] = float("nan")
    k[..., 2] = 0.0
    assert backend.forward(Inputs(q, k, v, power))[0].isnan().any(dim=-1).tolist() == [[[False, True, False]]]


def test_what_the_kernels_cannot_take_is_refused():
    q, k, v, power = random_inputs(1, 1, 3, 5, 6)
    with pytest.raises(ValueError, match=r"supports float16, bfloat16 and float32 but the tensors are torch\.float64"):
        backend.forward(Inputs(q, k, v, power))
    wide = torch.ones(1, 1, 3, 300)
    with pytest.raises(ValueError, match=r"heads of width up to 256, .* but these have 300"):
        backend.forward(Inputs(wide, wide, wide, wide[0, :, 0]))


def test_unavailable_reason_says_what_is_missing(monkeypatch):
    assert backend.unavailable_reason() is None
    monkeypatch.delenv("TRITON_INTERPRET")
    x = torch.ones(1, 1, 2, 4)
    if not torch.cuda.is_available():
        assert backend.unavailable_reason().startswith("there is no CUDA or ROCm device")
        with pytest.raises(RuntimeError, match="there is no CUDA or ROCm device"):
            backend.forward(Inputs(x, x, x, x[0, :, 0]))
    monkeypatch.setitem(sys.modules, "triton", None)
    backend._installed.cache_clear()
    try:
        assert backend.unavailable_reason().startswith("triton is not installed")
    finally:
        backend._installed.cache_clear()


def test_kernels_built_for_a_device_refuse_cpu_tensors(kernels, monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    x = torch.ones(1, 1, 2, 4)
    with pytest.raises(ValueError, match=r"it computes on CUDA and ROCm devices .* but the tensors are on cpu"):
        backend.forward(Inputs(x, x, x, x[0, :, 0]))


def test_the_interpreter_leaves_tritons_language_as_it_was():
    language = triton.language
    parts = (language, language.core, language.math, language.tensor)
    before = [dict(vars(part)) for part in parts]
    by_kernels(random_inputs(1, 1, 3, 5, 6, dtype=torch.float32), torch.ones(1, 1, 3, 6))
    assert [dict(vars(part)) for part in parts] == before


def test_on_a_device_warps_and_stages_are_timed_once_for_a_width_and_the_results_are_the_same(kernels, monkeypatch):
    inputs, cotangent = random_inputs(1, 1, 40, 50, 6, dtype=torch.float32), torch.randn(1, 1, 40, 6)
    plain = by_kernels(inputs, cotangent, eps=1e-3)
    timed = []

    def time(call, quantiles):
        call()
        timed.append(call)
        return [len(timed) % 4.0] * len(quantiles)

    tuned = kernels.tuned()
    launchers = [kernel for kernel in vars(tuned).values() if hasattr(kernel, "configs")]
    assert len(launchers) == 6
    for kernel in launchers:
        monkeypatch.setattr(kernel, "_do_bench", time)
        monkeypatch.setattr(kernel, "cache", {})
    monkeypatch.setattr(backend, "_tunes", lambda q: True)
    found = by_kernels(inputs, cotangent, eps=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert len(timed) == sum(len(kernel.configs) for kernel in launchers)
    assert all(len(kernel.cache) == 1 for kernel in launchers)
    # Not for another length, but for another width.
    by_kernels(random_inputs(1, 2, 33, 9, 6, dtype=torch.float32), torch.randn(1, 2, 33, 6), eps=1e-3)
    assert all(len(kernel.cache) == 1 for kernel in launchers)
    by_kernels(random_inputs(1, 1, 3, 5, 5, dtype=torch.float32), torch.randn(1, 1, 3, 5), eps=1e-3)
    assert all(len(kernel.cache) == 2 for kernel in launchers)


@pytest.mark.usefixtures("_poisoned")
def test_nothing_is_timed_where_equal_bits_are_wanted_everywhere(monkeypatch):
    class OnDevice:
        is_cuda = True

    assert not backend._tunes(OnDevice())
    torch.use_deterministic_algorithms(False)
    assert backend._tunes(OnDevice())
    assert not backend._tunes(torch.empty(1))
    monkeypatch.setenv("POLAFORMER_TUNE", "0")
    assert not backend._tunes(OnDevice())


def launch_types(kernel, options):
    """The type of each argument and the constants, as a launch with float16 tensors and all options would give them."""
    pointers = {"q", "k", "v", "out", "grad", "dq", "dk", "dv"}
    parameters = {"power", "scale", "peaks", "memory", "counts", "norms", "dmemory", "dpower", "dscale"}
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(pointers & types.keys(), "*fp16") | dict.fromkeys(parameters & types.keys(), "*fp32")
    types |= dict.fromkeys({"count", "eps_mantissa", "eps_exponent"} & types.keys(), "fp32")
    types |= dict.fromkeys({"mask"} & types.keys(), "*u8") | dict.fromkeys(options.keys() & types.keys(), "constexpr")
    return types, {(kernel.arg_names.index(name),): value for name, value in options.items() if name in types}


def test_the_kernels_also_compile_for_a_device(monkeypatch, tmp_path):
    """The interpreter forgives what the compiler does not; no device is needed to compile for one."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    # What triton 3.10 will take: no multiply-add but those written as such.
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    spec = importlib.util.spec_from_file_location("kernels_for_a_device", sys.modules[KERNELS].__file__)
    compiled = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compiled)
    assert not compiled.INTERPRETED
    sizes = backend._sizes(torch.empty(1, 1, 1, 16, dtype=torch.float16))
    for name, wanted in {
        "find_peaks": (None,),
        "summarise": ("bf16x3", "state_tile"),
        "attend": ("bf16x3", "half", "token_tile"),
        "attend_backward": ("bf16x3", "half", "token_tile"),
        "state_backward": ("bf16x3", "half", "state_tile"),
        "summarise_backward": ("bf16x3", "token_tile"),
    }.items():
        kernel = getattr(compiled, name)
        types, constants = launch_types(kernel, backend._options(sizes, *wanted))
        source = ASTSource(fn=kernel, signature=types, constexprs=constants)
        done = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": sizes.num_warps})
        assert ("mma.sync" in done.asm["ptx"]) == (name != "find_peaks"), name
        assert done.metadata.shared <= 64 * 1024, name


def test_subnormal_inputs_pass_no_gradient():
    """One key: nothing depends on q or k, and what is left of terms that cancel would be divided by the smallest number."""
    inputs = [x.detach() for x in random_inputs(batch=1, heads=4, queries=2, keys=1, width=5, dtype=torch.float32)]
    inputs[0], inputs[1] = inputs[0].sign() * 1e-45, inputs[1].sign() * 1e-45
    inputs[2] *= 1e3
    found = by_kernels(inputs, 1e3 * torch.randn_like(inputs[0]))
    assert all(x.isfinite().all() for x in found)
    assert not found[1].any()
    assert not found[2].any()
