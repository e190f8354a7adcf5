"""Performer, cosFormer, Hedgehog, Linformer, Synthesizer and kernelized attention against their formulas."""

from math import cos, pi, sin, sqrt

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oracle import relative_error
from polaformer import attention

HEADS, WIDTH = 3, 6
OPTIONS = {
    "performer": {"num_features": 20},
    "performer as published": {"num_features": 20, "as_published": True},
    "cosformer": {},
    "cosformer of 16": {"max_length": 16},
    "hedgehog": {},
    "linformer": {"max_length": 16, "rank": 4},
    "linformer as published": {"max_length": 16, "rank": 4, "as_published": True},
    "synthesizer": {"max_length": 16},
    "synthesizer of 14 keys": {"max_length": 16, "max_keys": 14},
    "kernelized": {},
}
LINEAR = [label for label in OPTIONS if not label.startswith(("synthesizer", "kernelized"))]


def create(label, dtype=torch.float64, width=WIDTH, **options):
    core = attention.create(label.split()[0], num_heads=HEADS, head_dim=width, **(OPTIONS.get(label, {}) | options))
    for parameter in core.parameters():
        torch.nn.init.normal_(parameter)
    return core.to(dtype)


def qkv(queries=7, keys=7, dtype=torch.float64, batch=2, width=WIDTH):
    return [torch.randn(batch, HEADS, n, width, dtype=dtype) for n in (queries, keys, keys)]


def random_mask(keys, batch=2):
    """At least one key per sample exists."""
    mask = torch.rand(batch, keys) < 0.6
    mask[torch.arange(batch), torch.randint(keys, (batch,))] = True
    return mask


def existing(mask, sample, keys):
    return [i for i in range(keys) if mask is None or mask[sample, i]]


def normalised(scores, divisor_at_least=0.0):
    """Scores (query, key) with rows normalised to sum to 1."""
    return scores / scores.sum(dim=-1, keepdim=True).clamp(min=divisor_at_least)


def performer_map(core, q, k, mask, sample, head):
    """The features token by token, with the max over the keys that count."""
    published, width = core.as_published, q.shape[-1]
    rows = core.projection
    q, k = (x[sample, head] / width**0.25 for x in (q, k))
    kept = existing(mask, sample, len(k))
    if published:
        q, k = q / width**0.25, k / width**0.25
        k = torch.stack([k[i] if i in kept else torch.zeros_like(k[i]) for i in range(len(k))])
    else:
        k = k[kept]
    largest = (rows @ k.mT).max()
    queries = torch.stack([(rows @ x - x @ x / 2 - (rows @ x).max()).exp() + 1e-4 for x in q])
    keys = torch.stack([(rows @ x - x @ x / 2 - largest).exp() + 1e-4 for x in k])
    weights = normalised(queries @ keys.mT)
    return weights[:, kept] if published else weights


def cosformer_map(core, q, k, mask, sample, head):
    length = core.max_length or max(q.shape[2], k.shape[2])
    kept = existing(mask, sample, k.shape[2])
    rows = [
        [q[sample, head, t].relu() @ k[sample, head, i].relu() * cos(pi / 2 * (t - i) / length) for i in kept]
        for t in range(q.shape[2])
    ]
    return normalised(torch.tensor(rows), 1e-6)


def hedgehog_map(core, q, k, mask, sample, head):
    def features(x):
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], dim=-1)

    kept = existing(mask, sample, k.shape[2])
    queries = features(q[sample, head] @ core.query_map[head])
    return normalised(queries @ features(k[sample, head, kept] @ core.key_map[head]).mT)


def linformer_map(core, q, k, mask, sample, head):
    kept = existing(mask, sample, k.shape[2])
    mixing = core.projection[head][:, kept]
    mixtures = sum(mixing[:, n, None] * k[sample, head, i] for n, i in enumerate(kept))
    return (q[sample, head] @ mixtures.mT / sqrt(q.shape[-1])).softmax(dim=-1) @ mixing


def synthesizer_map(core, q, k, mask, sample, head):
    kept = existing(mask, sample, k.shape[2])
    scores = q[sample, head] @ k[sample, head, kept].mT / sqrt(q.shape[-1])
    return (scores + core.synthetic[head][: q.shape[2]][:, kept]).softmax(dim=-1)


def kernelized_map(core, q, k, mask, sample, head):
    kept, scale = existing(mask, sample, k.shape[2]), q.shape[-1] ** -0.25
    q, k = q[sample, head] * scale, k[sample, head] * scale
    return torch.tensor([[(-((x - k[i]) ** 2).sum() / 2).exp() for i in kept] for x in q])


def slow_map(core, q, k, mask):
    """The map of the core's formula, one sample and head after the other; absent keys are left out, not set to zero."""
    one = globals()[f"{core.name}_map"]
    weights = torch.zeros(*q.shape[:3], k.shape[2], dtype=q.dtype)
    for sample in range(q.shape[0]):
        for head in range(q.shape[1]):
            weights[sample, head][:, existing(mask, sample, k.shape[2])] = one(core, q, k, mask, sample, head).to(q.dtype)
    return weights


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (4, 9), (13, 5), (1, 1)])
@pytest.mark.parametrize("label", OPTIONS)
def test_output_and_map_are_those_of_the_formula(label, queries, keys, masked):
    core, (q, k, v) = create(label), qkv(queries, keys)
    mask = random_mask(keys) if masked else None
    with torch.no_grad():
        wanted = slow_map(core, q, k, mask)
        torch.testing.assert_close(core.weights(q, k, mask=mask)[core.name], wanted, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(core(q, k, v, mask=mask), wanted @ v, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("label", OPTIONS)
def test_content_under_the_mask_changes_neither_results_nor_gradients(label):
    core, (q, k, v) = create(label), qkv(5, 8)
    mask = random_mask(8)
    hidden = ~mask[:, None].expand(-1, HEADS, -1)
    results = []
    for key_content, value_content in ((0.0, 0.0), (float("nan"), float("inf")), (float("-inf"), 1e300)):
        k[hidden], v[hidden] = key_content, value_content
        leaves = [x.clone().requires_grad_() for x in (q, k, v)] + list(core.parameters())
        out = core(*leaves[:3], mask=mask)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


# As published, Performer counts masked keys; cosFormer without max_length derives L from the padded length.
@pytest.mark.parametrize("label", [x for x in OPTIONS if x not in ("performer as published", "cosformer")])
def test_a_padded_tail_is_as_if_it_were_not_there(label):
    core, (q, k, v) = create(label), qkv(9, 9)
    mask = torch.arange(9).expand(2, 9) < 6
    padded = core(q, k, v, mask=mask)[:, :, :6]
    torch.testing.assert_close(padded, core(q[:, :, :6], k[:, :, :6], v[:, :, :6]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("label", OPTIONS)
def test_a_sample_does_not_depend_on_the_others(label):
    core, (q, k, v) = create(label), qkv(5, 8)
    mask = random_mask(8)
    k[1] *= 20
    alone = core(q[:1], k[:1], v[:1], mask=mask[:1])
    torch.testing.assert_close(core(q, k, v, mask=mask)[:1], alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("label", OPTIONS)
def test_a_sample_without_keys_gives_zeros_and_finite_gradients(label):
    core = create(label, torch.float32)
    q, k, v = (x.requires_grad_() for x in qkv(4, 5, torch.float32))
    mask = torch.tensor([[False] * 5, [False, True, False, False, False]])
    out = core(q, k, v, mask=mask)
    assert (out[0] == 0).all()
    assert (core.weights(q, k, mask=mask)[core.name][0] == 0).all()
    with torch.autograd.set_detect_anomaly(True):  # no intermediate NaN either
        out = core(q, k, v, mask=mask)
        gradients = torch.autograd.grad(out.sum(), (q, k, v, *core.parameters()))
    assert all(x.isfinite().all() for x in (out, *gradients))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [0.0, 1e4])
@pytest.mark.parametrize("label", OPTIONS)
def test_zero_and_huge_vectors_give_no_nan(label, size, dtype):
    core = create(label, torch.float32)
    q, k, v = qkv(6, 9, torch.float32)
    leaves = [(x * scale).to(dtype).requires_grad_() for x, scale in ((q, size), (k, size), (v, 1.0))]
    for mask in (None, random_mask(9)):
        out = core(*leaves, mask=mask)
        assert out.dtype == dtype
        gradients = torch.autograd.grad(out.float().sum(), [*leaves, *core.parameters()])
        assert out.isfinite().all()
        assert not any(x.isnan().any() for x in gradients)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("label", OPTIONS)
def test_gradients_are_those_of_the_function(label, masked):
    core = create(label, width=3, **({"max_length": 4} if "max_length" in OPTIONS[label] else {}))
    mask = torch.tensor([[True, False, True]]) if masked else None
    inputs = [x.requires_grad_() for x in qkv(2, 3, batch=1, width=3)]
    parameters = list(core.parameters())
    assert torch.autograd.gradcheck(lambda q, k, v, *_: core(q, k, v, mask=mask), (*inputs, *parameters))


class Shapes(TorchDispatchMode):
    """Records the shape of every tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.seen |= {tuple(x.shape) for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        return out


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("label", LINEAR)
def test_what_is_called_linear_forms_nothing_of_queries_by_keys(label, masked):
    length = {"max_length": 320} if "max_length" in OPTIONS[label] else {}
    core, (q, k, v) = create(label, torch.float32, **length), qkv(211, 307, torch.float32)
    assert core.facts.cost == "linear"
    with Shapes() as shapes:
        core(q, k, v, mask=random_mask(307) if masked else None)
    assert any(211 in shape for shape in shapes.seen)
    assert not any(211 in shape and 307 in shape for shape in shapes.seen)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("performer", {"num_features": 0}, "'performer': num_features is 0; give an integer ≥ 1"),
        ("cosformer", {"max_length": 1.5}, "'cosformer': max_length is 1.5; give an integer ≥ 1"),
        ("linformer", {"max_length": 0}, "'linformer': max_length is 0; give an integer ≥ 1"),
        ("linformer", {"max_length": 4, "rank": -1}, "'linformer': rank is -1; give an integer ≥ 1"),
        ("synthesizer", {"max_length": True}, "'synthesizer': max_length is True; give an integer ≥ 1"),
        ("kernelized", {"dropout": 1.0}, "'kernelized': dropout is 1.0; give a number ≥ 0 and < 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused_at_construction(name, options, message):
    with pytest.raises(ValueError, match=message):
        attention.create(name, num_heads=2, head_dim=4, **options)


LONG_QUERIES, LONG_KEYS = (17, 3), (3, 17)


@pytest.mark.parametrize(
    ("label", "lengths"),
    [
        ("cosformer of 16", LONG_QUERIES),
        ("cosformer of 16", LONG_KEYS),
        ("linformer", LONG_KEYS),
        ("synthesizer", LONG_QUERIES),
        ("synthesizer", LONG_KEYS),
        ("synthesizer of 14 keys", LONG_KEYS),
    ],
)
def test_longer_sequences_than_max_length_are_refused(label, lengths):
    core, (q, k, v) = create(label), qkv(*lengths)
    for call in (lambda: core(q, k, v), lambda: core.weights(q, k)):
        with pytest.raises(
            ValueError, match=r"got 17 (tokens, .*max_length|queries, .*max_length|keys, .*max_keys)=17 or more"
        ):
            call()


def test_linformer_bounds_the_keys_only():
    q, k, v = qkv(40, 16)
    assert create("linformer")(q, k, v).shape == (2, HEADS, 40, WIDTH)


@pytest.mark.parametrize("name", ["linformer", "synthesizer"])
def test_max_length_has_to_be_given_to_those_with_parameters_for_each_token(name):
    assert attention.facts(name).needs_length
    with pytest.raises(TypeError, match="give max_length"):
        attention.create(name, num_heads=2, head_dim=4)


@pytest.mark.parametrize("label", OPTIONS)
def test_the_settings_are_shown(label):
    for name, value in OPTIONS[label].items():
        assert f"{name}={value}" in repr(create(label))


# Performer


def softmax_attention(q, k, v, scale):
    return torch.softmax(q @ k.mT * scale, dim=-1) @ v


def test_performer_comes_close_to_softmax_attention_with_many_features():
    """As published it comes close to scores ⟨q, k⟩/D instead: x is scaled twice. For larger vectors the 1e-4 would dominate."""
    q, k, v = qkv(20, 30)
    q, k = q * 0.6, k * 0.6
    for published, near, far in ((False, WIDTH**-0.5, 1 / WIDTH), (True, 1 / WIDTH, WIDTH**-0.5)):
        out = create("performer", num_features=20000, as_published=published)(q, k, v)
        assert relative_error(out, softmax_attention(q, k, v, near)) < 0.1
        assert relative_error(out, softmax_attention(q, k, v, far)) > 0.15


def test_performer_counts_absent_keys_in_the_normaliser_only_as_published():
    q, k, _ = qkv(4, 8)
    mask = torch.arange(8).expand(2, 8) < 3
    assert torch.allclose(create("performer").weights(q, k, mask=mask)["performer"].sum(-1), torch.ones(2, HEADS, 4).double())
    published = create("performer", as_published=True).weights(q, k, mask=mask)["performer"]
    assert (published.sum(-1) < 0.9).all()
    assert (published[..., 3:] == 0).all()


def test_performer_draws_gaussian_rows_that_are_orthogonal_in_blocks():
    rows = create("performer", width=16, num_features=16 * 40 + 5).projection
    assert rows.shape == (16 * 40 + 5, 16)
    for block in rows.split(16):
        products = block @ block.mT
        torch.testing.assert_close(products, products.diagonal().diag(), atol=1e-4, rtol=0)
    squares = rows.square().sum(-1)  # χ² with 16 degrees of freedom: mean 16, variance 32
    assert abs(squares.mean() - 16) < 1
    assert 22 < squares.var() < 45
    torch.testing.assert_close(rows.mean(0), torch.zeros(16, dtype=rows.dtype), atol=0.2, rtol=0)
    torch.testing.assert_close(rows.mT @ rows / len(rows), torch.eye(16, dtype=rows.dtype), atol=0.25, rtol=0)


def test_performers_directions_have_no_preferred_sign():
    rows = create("performer", width=1, num_features=200).projection
    assert 70 < (rows > 0).sum() < 130
    first = torch.stack([create("performer", width=4, num_features=1).projection[0, 0] for _ in range(200)])
    assert 70 < (first > 0).sum() < 130


def test_performers_projection_is_saved_and_not_learned():
    core, other = create("performer"), create("performer")
    q, k, v = qkv()
    assert not list(core.parameters())
    assert list(core.state_dict()) == ["projection"]
    assert not torch.equal(core(q, k, v), other(q, k, v))
    other.load_state_dict(core.state_dict())
    torch.testing.assert_close(core(q, k, v), other(q, k, v), rtol=0, atol=0)


@pytest.mark.parametrize("size", [0.5, 2000.0])
def test_performers_absent_keys_do_not_set_the_max(size):
    """With one feature, all unmasked keys can be below the zero of a masked one; with a large gap that would overflow."""
    core = create("performer", torch.float32, num_features=1)
    k = -core.projection * torch.linspace(size, 2 * size, 5)[:, None]
    k = k.expand(2, HEADS, -1, -1).clone().requires_grad_()
    q, _, v = qkv(4, 5, torch.float32)
    kept = torch.tensor([True, True, False, True, False])
    out = core(q, k, v, mask=kept.expand(2, 5))
    torch.testing.assert_close(out, core(q, k[:, :, kept], v[:, :, kept]))
    assert all(x.isfinite().all() for x in (out, *torch.autograd.grad(out.sum(), k)))


# cosFormer


def test_cosformers_length_is_that_of_the_call_unless_given():
    q, k, v = qkv(5, 9)
    torch.testing.assert_close(create("cosformer")(q, k, v), create("cosformer", max_length=9)(q, k, v))
    assert not torch.allclose(create("cosformer")(q, k, v), create("cosformer", max_length=10)(q, k, v))


def test_cosformers_features_are_sines_and_cosines_of_positions_from_one():
    core = create("cosformer", max_length=10)
    x = torch.rand(1, HEADS, 4, WIDTH, dtype=torch.float64)
    queries, keys = core.features(x, x, None)
    for t in range(4):
        angle = pi / 2 * (t + 1) / 10
        torch.testing.assert_close(queries[:, :, t], torch.cat([x[:, :, t] * sin(angle), x[:, :, t] * cos(angle)], dim=-1))
    torch.testing.assert_close(keys, queries)


def test_cosformers_normaliser_is_held_above_a_millionth():
    q, k, _ = (x.abs() for x in qkv(3, 3))
    assert torch.allclose(create("cosformer").weights(q, k)["cosformer"].sum(-1), torch.ones(2, HEADS, 3).double())
    faint = create("cosformer").weights(q * 1e-9, k)["cosformer"]
    scores = 1e-9 * q @ k.mT * torch.tensor([[cos(pi / 6 * (t - i)) for i in range(3)] for t in range(3)])
    torch.testing.assert_close(faint, scores / 1e-6, rtol=1e-6, atol=0)


# Hedgehog


def test_hedgehog_starts_with_identity_maps_apart_for_queries_and_keys():
    core = attention.create("hedgehog", num_heads=HEADS, head_dim=WIDTH)
    assert sum(p.numel() for p in core.parameters()) == 2 * HEADS * WIDTH**2
    assert {name for name, _ in core.named_parameters()} == {"query_map", "key_map"}
    assert all((p == torch.eye(WIDTH)).all() for p in core.parameters())


@pytest.mark.parametrize("size", [30.0, 90.0, 1000.0])
def test_hedgehog_keeps_its_value_where_features_underflow(size):
    """softmax(x) itself underflows there: in float32 at every size, in float64 at a size of 1000."""
    core, (q, k, v) = attention.create("hedgehog", num_heads=HEADS, head_dim=WIDTH), qkv(6, 4)
    q, k = (x * size for x in (q, k))
    queries, keys = (torch.cat([x.log_softmax(-1), (-x).log_softmax(-1)], dim=-1) for x in (q, k))
    scores = (queries[:, :, :, None] + keys[:, :, None]).logsumexp(dim=-1)  # (B, H, N, M)
    wanted = scores.softmax(dim=-1) @ v
    assert relative_error(core.double()(q, k, v), wanted) < 1e-9
    assert relative_error(core.float()(q.float(), k.float(), v.float()), wanted) < 1e-3


# Linformer


def test_linformers_projection_is_learned_and_as_published_fixed_but_saved():
    ours = attention.create("linformer", num_heads=HEADS, head_dim=WIDTH, max_length=2048, rank=64)
    published = attention.create("linformer", num_heads=HEADS, head_dim=WIDTH, max_length=2048, rank=64, as_published=True)
    assert [name for name, _ in ours.named_parameters()] == ["projection"]
    assert not list(published.parameters())
    for core in (ours, published):
        assert core.state_dict()["projection"].shape == (HEADS, 64, 2048)
        assert abs(core.projection.std() - 0.02) < 1e-3
        assert abs(core.projection.mean()) < 1e-3
    published.load_state_dict(ours.state_dict())
    q, k, v = qkv()
    torch.testing.assert_close(published(q, k, v), ours(q, k, v))


def test_linformer_has_128_mixtures_unless_told_otherwise():
    assert attention.create("linformer", num_heads=2, head_dim=4, max_length=9).projection.shape == (2, 128, 9)


# Synthesizer


def test_synthesizer_without_its_own_map_is_softmax_attention():
    core, (q, k, v) = create("synthesizer"), qkv(5, 9)
    torch.nn.init.zeros_(core.synthetic)
    torch.testing.assert_close(core(q, k, v), softmax_attention(q, k, v, WIDTH**-0.5))


def test_synthesizers_own_map_starts_by_the_xavier_rule_and_learns():
    core = attention.create("synthesizer", num_heads=2, head_dim=4, max_length=96)
    assert core.synthetic.shape == (2, 96, 96)
    assert core.synthetic.abs().max() <= sqrt(3 / (2 * 96))
    assert abs(core.synthetic.std() * sqrt(2 * 96) - 1) < 0.03
    q, k, v = (torch.randn(3, 2, n, 4) for n in (5, 9, 9))
    core(q, k, v, mask=torch.arange(9).expand(3, 9) < 7).square().sum().backward()
    gradient = core.synthetic.grad
    assert (gradient[:, :5, :7] != 0).all()
    assert (gradient[:, 5:] == 0).all()
    assert (gradient[:, :, 7:] == 0).all()
    oblong = attention.create("synthesizer", num_heads=2, head_dim=4, max_length=150, max_keys=42).synthetic
    assert oblong.shape == (2, 150, 42)
    assert oblong.abs().max() <= sqrt(6 / (2 * (150 + 42)))
    assert abs(oblong.std() * sqrt(2 * 96) - 1) < 0.03


# Kernelized


def test_kernelized_drops_weights_in_training_only():
    core, (q, k, v) = create("kernelized", dropout=0.25), qkv(40, 50)
    plain = create("kernelized")
    torch.testing.assert_close(plain.train()(q, k, v), plain.eval()(q, k, v), rtol=0, atol=0)
    torch.testing.assert_close(core.eval()(q, k, v), plain(q, k, v), rtol=0, atol=0)
    torch.manual_seed(3)
    out = core.train()(q, k, v)
    torch.manual_seed(3)
    weights = core.weights(q, k)["kernelized"]
    torch.testing.assert_close(out, weights @ v)
    kept = weights != 0
    assert abs(kept.double().mean() - 0.75) < 0.02
    torch.testing.assert_close(weights[kept], plain.weights(q, k)["kernelized"][kept] / 0.75)


def test_kernelized_weights_stay_between_zero_and_one_whatever_rounding_does():
    q, k, _ = qkv(30, 30, torch.float32)
    weights = create("kernelized", torch.float32).weights(q * 1e4, torch.cat([q, k], dim=2) * 1e4)["kernelized"]
    assert ((weights >= 0) & (weights <= 1)).all()


def test_kernelized_is_not_normalised():
    core, (q, k, v) = create("kernelized"), qkv(4, 9)
    twice = core(q, torch.cat([k, k], dim=2), torch.cat([v, v], dim=2))
    torch.testing.assert_close(twice, 2 * core(q, k, v))
