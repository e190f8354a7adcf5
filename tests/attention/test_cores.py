"""Pola in all polarities, softmax and linear attention; test_every_core.py tests what holds for every mechanism."""

import pytest
import torch
import torch.nn.functional as F

from oracle import relative_error
from polaformer import attention
from polaformer.attention.mechanisms.pola import POLARITIES, PolaCore

MASK = torch.tensor([[True, False, True, True, False], [False, False, True, True, True]])
CORES = {name: {} for name in ("linear", "pola", "softmax")} | {f"pola-{p}": {"polarity": p} for p in POLARITIES[1:]}


def create(label, dtype=torch.float64, width=6):
    core = attention.create(label.split("-")[0], num_heads=3, head_dim=width, **CORES[label])
    for parameter in core.parameters():
        torch.nn.init.normal_(parameter)
    return core.to(dtype)


def qkv(dtype=torch.float64, queries=4, keys=5, width=6):
    return [torch.randn(2, 3, n, width, dtype=dtype) for n in (queries, keys, keys)]


def apply_maps(maps, v):
    """The output that the maps imply."""
    if set(maps) == {"same", "opposite"}:
        half = (v.shape[-1] + 1) // 2
        return torch.cat([maps["same"] @ v[..., :half], maps["opposite"] @ v[..., half:]], dim=-1)
    (only,) = maps.values()
    return only @ v


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [6, 5])
@pytest.mark.parametrize("label", CORES)
def test_explicit_maps_are_what_forward_applies(label, width, masked):
    core, (q, k, v) = create(label, width=width), qkv(width=width)
    mask = MASK if masked else None
    values = v * MASK[:, None, :, None] if masked else v
    maps = core.weights(q, k, mask=mask)
    assert all(m.shape == (2, 3, 4, 5) for m in maps.values())
    torch.testing.assert_close(core(q, k, v, mask=mask), apply_maps(maps, values), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("label", CORES)
def test_content_under_the_mask_changes_nothing(label):
    core, (q, k, v) = create(label, torch.float32), qkv(torch.float32)
    clean = core(q, k, v, mask=MASK)
    hidden = ~MASK[:, None].expand(-1, 3, -1)
    k[hidden], v[hidden] = float("nan"), float("inf")
    torch.testing.assert_close(core(q, k, v, mask=MASK), clean)
    assert all(m.isfinite().all() for m in core.weights(q, k, mask=MASK).values())


@pytest.mark.parametrize("label", CORES)
def test_a_masked_key_is_an_absent_key(label):
    core, (q, k, v) = create(label), qkv()
    kept = MASK[0]
    masked = core(q, k, v, mask=kept.expand(2, -1))
    torch.testing.assert_close(masked, core(q, k[:, :, kept], v[:, :, kept]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("label", CORES)
def test_a_sample_without_keys_gives_zeros_and_finite_gradients(label):
    core = create(label, torch.float32)
    q, k, v = (x.requires_grad_() for x in qkv(torch.float32))
    mask = torch.tensor([[False] * 5, [True] * 5])
    out = core(q, k, v, mask=mask)
    assert (out[0] == 0).all()
    assert all((m[0] == 0).all() for m in core.weights(q, k, mask=mask).values())
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("label", [label for label in CORES if label != "pola-subtract"])
def test_half_precision_stays_close_to_float64(label, dtype):
    """Row N1 through the core: the learnable scale must not lose digits before the operator."""
    core, (q, k, v) = create(label).float(), qkv(torch.float64, queries=40, keys=200)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    out = core(q, k, v)
    assert out.dtype == dtype
    wanted = core.double()(q.double(), k.double(), v.double())
    assert relative_error(out, wanted) <= {torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]


@pytest.mark.parametrize("scale", [-12.0, -90.0])
def test_a_scale_near_zero_and_huge_queries_give_no_nan(scale):
    core = PolaCore(3, 6)
    torch.nn.init.constant_(core.scale, scale)
    q, k, v = (x.requires_grad_() for x in qkv(torch.float32))
    out = core(q, k, v)
    assert all(x.isfinite().all() for x in (out, *torch.autograd.grad(out.sum(), (q, k, v))))
    large = [x.detach().half().sign() * 60000 for x in (q, k)]
    assert PolaCore(3, 6)(*large, v.half()).isfinite().all()


def test_softmax_takes_a_scale():
    q, k, v = qkv()
    core = attention.create("softmax", num_heads=3, head_dim=6, scale=2.0)
    torch.testing.assert_close(core(q, k, v), torch.softmax(q @ k.mT * 2.0, dim=-1) @ v)


def test_linear_attention_keeps_its_digits_for_negative_inputs():
    q, k, v = qkv(torch.float32)
    found = create("linear", torch.float32)(q - 30, k - 30, v)
    torch.testing.assert_close(
        found.double(), create("linear")(q.double() - 30, k.double() - 30, v.double()), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("label", ["softmax", "linear", "pola"])
@pytest.mark.parametrize(
    "heads", [{"num_heads": 0, "head_dim": 4}, {"num_heads": 2, "head_dim": -4}, {"num_heads": 2, "head_dim": 2.0}]
)
def test_impossible_heads_are_refused(label, heads):
    with pytest.raises(ValueError, match="give an integer ≥ 1"):
        attention.create(label, **heads)


@pytest.mark.parametrize("label", CORES)
def test_zero_vectors_give_no_nan(label):
    core = create(label, torch.float32)
    q, k, v = (torch.zeros_like(x).requires_grad_() for x in qkv(torch.float32))
    out = core(q, k, v)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_softmax_is_eq1():
    q, k, v = qkv()
    wanted = torch.softmax(q @ k.mT / 6**0.5, dim=-1) @ v
    torch.testing.assert_close(create("softmax")(q, k, v), wanted)


def test_softmax_takes_a_bias_and_the_others_refuse_it():
    q, k, v = qkv()
    bias = torch.randn(3, 4, 5, dtype=torch.float64)
    wanted = torch.softmax((q @ k.mT / 6**0.5 + bias).masked_fill(~MASK[:, None, None], float("-inf")), dim=-1) @ v
    core = create("softmax")
    torch.testing.assert_close(core(q, k, v, mask=MASK, bias=bias), wanted)
    torch.testing.assert_close(core.weights(q, k, mask=MASK, bias=bias)["softmax"] @ v, wanted)
    for label in ("linear", "pola"):
        with pytest.raises(ValueError, match="this mechanism forms no N×M scores"):
            create(label)(q, k, v, bias=bias)


def test_eq2_linear_attention_is_the_elu_feature_map_normalised():
    q, k, v = qkv()
    scores = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    torch.testing.assert_close(create("linear")(q, k, v), scores / scores.sum(-1, keepdim=True) @ v)


def test_positive_polarity_is_linear_attention_with_relu_features():
    core, (q, k, v) = create("pola-positive"), qkv()
    scale = F.softplus(core.scale)[:, None]
    power = core.exponent()[:, None]
    scores = ((q / scale).relu() ** power) @ ((k / scale).relu() ** power).mT
    torch.testing.assert_close(core(q, k, v), scores / scores.sum(-1, keepdim=True) @ v)


def test_eq9_powers_lie_between_one_and_one_plus_alpha_and_start_in_the_middle():
    core = PolaCore(2, 4, alpha=4.0)
    assert (core.exponent() == 3).all()
    with torch.no_grad():
        core.power.copy_(torch.linspace(-9, 9, 8).reshape(2, 4))
    assert ((core.exponent() > 1) & (core.exponent() < 5)).all()
    assert core.bfloat16().exponent().dtype == torch.float32


def test_without_learn_scale_there_is_no_scale():
    core = PolaCore(2, 4, learn_scale=False)
    assert [name for name, _ in core.named_parameters()] == ["power"]


def test_unknown_names_and_options_are_refused_with_a_hint():
    with pytest.raises(ValueError, match=r"unknown mechanism 'sofmax'; did you mean 'softmax'\? choose one of"):
        attention.create("sofmax", num_heads=2, head_dim=4)
    with pytest.raises(TypeError, match="'pola' does not take alhpa; its options are: alpha, polarity"):
        attention.create("pola", num_heads=2, head_dim=4, alhpa=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 1}, "head width is 1, but each polarity needs a channel of v"),
        ({"alpha": 0.0}, "alpha is 0.0; give a number > 0"),
        ({"polarity": "all"}, "polarity is 'all'; choose one of both, same, positive, subtract"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"backend": "cuda"}, "backend is 'cuda'; choose one of auto, torch, cpu, triton, reference"),
        ({"polarity": "same", "backend": "reference"}, "polarity 'same' is computed in plain PyTorch only"),
    ],
)
def test_settings_that_do_not_fit_are_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        attention.create("pola", **({"num_heads": 2, "head_dim": 4} | options))


def test_a_switch_must_be_true_or_false():
    with pytest.raises(TypeError, match="learn_scale is 'false'; give True or False"):
        attention.create("pola", num_heads=2, head_dim=4, learn_scale="false")


def test_the_reference_backend_can_be_chosen():
    q, k, v = qkv()
    torch.testing.assert_close(PolaCore(3, 6, backend="reference").double()(q, k, v), PolaCore(3, 6).double()(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_map_of_softmax_does_not_overflow_where_the_call_does_not(dtype):
    """Scores of 90,000 before the scale of 1/√6 exceed half precision, and must do no harm."""
    core, (q, k, _) = create("softmax", torch.float32), qkv(dtype)
    q, k = q.sign() * 120, k.sign() * 120
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = core.weights(q, k, mask=MASK)["softmax"]
    assert weights.dtype == torch.float32
    wanted = core.weights(q.double(), k.double(), mask=MASK)["softmax"]
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 3, 4))


@pytest.mark.parametrize("masked", [False, True])
def test_a_bias_that_hides_every_key_gives_zeros_in_call_and_map(masked):
    """PyTorch's fused attention gives zeros there, and so must the map."""
    core, (q, k, v), mask = create("softmax"), qkv(), MASK if masked else None
    bias = torch.randn(3, 4, 5, dtype=torch.float64)
    bias[1, 2], bias[0, 0, :3] = float("-inf"), float("-inf")
    leaves = [x.requires_grad_() for x in (q, k)]
    out, weights = core(*leaves, v, mask=mask, bias=bias), core.weights(*leaves, mask=mask, bias=bias)["softmax"]
    assert (out[:, 1, 2] == 0).all()
    assert (weights[:, 1, 2] == 0).all()
    values = v if mask is None else v * mask[:, None, :, None]
    torch.testing.assert_close(weights @ values, out, rtol=1e-9, atol=1e-9)
    assert all(g.isfinite().all() for g in torch.autograd.grad(weights.square().sum(), leaves))
