"""Mechanisms that attend through a few tokens: Nyström attention, Skyformer, Informer; each against its formula in loops."""

from dataclasses import replace
from math import ceil, log

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oracle import relative_error
from polaformer import attention
from polaformer.attention.core import Facts

HEADS, WIDTH = 3, 6
# Few enough landmarks that the lengths below are not all plain softmax attention.
CORES = {
    "nystrom": {"num_landmarks": 4},
    "skyformer": {"num_landmarks": 5},
    "informer": {"factor": 2},
}
LENGTHS = [(1, 1), (2, 3), (5, 5), (13, 13), (16, 16), (3, 17), (17, 3), (19, 23)]


def create(name, **options):
    return attention.create(name, num_heads=HEADS, head_dim=WIDTH, **(CORES[name] | options))


def qkv(queries=13, keys=13, batch=2, dtype=torch.float64):
    torch.manual_seed(1000 * queries + keys)
    return [torch.randn(batch, HEADS, n, WIDTH, dtype=dtype) for n in (queries, keys, keys)]


def scattered(keys, batch=2):
    """A different mask per sample: two thirds of the keys, then about a third; at least one."""
    position = torch.arange(keys)
    return torch.stack([(position * 7 + sample) % 3 >= 1 + sample for sample in range(batch)]) | (position == keys - 1)


def seeded(function, *arguments, **options):
    torch.manual_seed(7)
    return function(*arguments, **options)


def by_head(function, q, k, v, mask, cross):
    """Apply a function of one sample and head to all of them; masked tokens are zeros as keys, and as queries unless cross."""
    mask = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool) if mask is None else mask
    out = torch.zeros_like(q)
    for b in range(len(q)):
        keys = [int(i) for i in mask[b].nonzero()]
        queries = list(range(q.shape[2])) if cross else keys
        for h in range(HEADS):
            rows = torch.zeros_like(q[b, h])
            rows[queries] = q[b, h, queries]
            out[b, h] = function(rows, k[b, h], v[b, h], queries, keys)
    return out


def refined_inverse(a, iterations=6):
    z = a.T / a.sum(dim=0).max()
    eye = torch.eye(len(a), dtype=a.dtype)
    for _ in range(iterations):
        z = z @ (13 * eye - a @ z @ (15 * eye - a @ z @ (7 * eye - a @ z))) / 4
    return z


def slow_nystrom(q, k, v, mask, cross, landmarks):
    def one(q, k, v, queries, keys):
        q, k, v = q / WIDTH**0.5, k[keys], v[keys]
        if len(queries) <= landmarks and len(keys) <= landmarks:
            return (q @ k.T).softmax(-1) @ v
        near_q, near_k = segment_means(q[queries], landmarks), segment_means(k, landmarks)
        middle = refined_inverse((near_q @ near_k.T).softmax(-1))
        return (q @ near_k.T).softmax(-1) @ middle @ (near_q @ k.T).softmax(-1) @ v

    return by_head(one, q, k, v, mask, cross)


def segment_means(x, landmarks):
    """One row per non-empty segment."""
    parts = [[x[r] for r in range(len(x)) if r * landmarks // len(x) == s] for s in range(landmarks)]
    return torch.stack([torch.stack(part).mean(0) for part in parts if part])


def slow_skyformer(q, k, v, mask, cross, landmarks, gamma=0.1):
    uniforms = torch.rand(landmarks).tolist()

    def gaussian(x, y):
        return torch.exp(-(x[:, None] - y).square().sum(-1) / 2)

    def one(q, k, v, queries, keys):
        q, k = q / WIDTH**0.25, k / WIDTH**0.25
        drawn = [q[queries[int(u * len(queries))]] for u in uniforms[: landmarks // 2]]
        drawn = torch.stack(drawn + [k[keys[int(u * len(keys))]] for u in uniforms[landmarks // 2 :]])
        gram = gaussian(drawn, drawn) + gamma * torch.eye(landmarks, dtype=q.dtype)
        root = torch.diag(gram.sum(1) ** -0.5)
        inverse = root @ refined_inverse(root @ gram @ root) @ root
        return gaussian(q, drawn) @ inverse @ gaussian(drawn, k[keys]) @ v[keys]

    return by_head(one, q, k, v, mask, cross)


def slow_informer(q, k, v, mask, cross, factor):
    selected, drawn = (min(n, max(1, factor * ceil(log(n)))) for n in (q.shape[2], k.shape[2]))
    uniforms = torch.rand(q.shape[2], drawn).tolist()

    def one(q, k, v, queries, keys):
        measure = {}
        for i in queries:
            scores = torch.stack([q[i] @ k[keys[int(u * len(keys))]] for u in uniforms[i]])
            measure[i] = float(scores.max() - scores.sum() / len(keys))
        out = v[keys].mean(0).repeat(len(q), 1)
        for i in sorted(queries, key=measure.get, reverse=True)[:selected]:
            out[i] = (q[i] @ k[keys].T / WIDTH**0.5).softmax(-1) @ v[keys]
        return out

    return by_head(one, q, k, v, mask, cross)


SLOW = {
    "nystrom": lambda *inputs: slow_nystrom(*inputs, landmarks=4),
    "skyformer": lambda *inputs: slow_skyformer(*inputs, landmarks=5),
    "informer": lambda *inputs: slow_informer(*inputs, factor=2),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize("name", CORES)
def test_a_core_is_its_formula(name, queries, keys, masked):
    q, k, v = qkv(queries, keys)
    mask = scattered(keys) if masked else None
    wanted = seeded(SLOW[name], q, k, v, mask, queries != keys)
    torch.testing.assert_close(seeded(create(name), q, k, v, mask=mask), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [3, 13, 16])
@pytest.mark.parametrize("name", CORES)
def test_a_core_is_its_formula_where_as_many_queries_are_other_tokens(name, length):
    core, (q, k, v), mask = create(name), qkv(length, length), scattered(length)
    wanted = seeded(SLOW[name], q, k, v, mask, True)
    torch.testing.assert_close(seeded(core, q, k, v, mask=mask, cross=True), wanted, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(seeded(core, q, k, v, mask=mask), wanted)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize("name", CORES)
def test_the_map_is_what_a_call_applies(name, queries, keys, masked):
    core, (q, k, v) = create(name), qkv(queries, keys)
    mask = scattered(keys) if masked else None
    (found,) = seeded(core.weights, q, k, mask=mask).values()
    torch.testing.assert_close(found @ v, seeded(core, q, k, v, mask=mask), rtol=1e-9, atol=1e-9)
    if masked:
        assert (found.masked_select(~mask[:, None, None, :]) == 0).all()


@pytest.mark.parametrize("keys", [13, 17])
@pytest.mark.parametrize("name", CORES)
def test_content_under_the_mask_changes_neither_result_nor_gradient(name, keys):
    core, (q, k, v), mask = create(name), qkv(13, keys), scattered(keys)
    dirty = [x.clone() for x in (q, k, v)]
    hidden = ~mask[:, None].expand(-1, HEADS, -1)
    dirty[1][hidden], dirty[2][hidden] = float("nan"), float("inf")
    if keys == 13:
        dirty[0][hidden] = float("nan")
    results = []
    for inputs in ((q, k, v), dirty):
        leaves = [x.requires_grad_() for x in inputs]
        out = seeded(core, *leaves, mask=mask)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(results[1], results[0])
    assert all(x.isfinite().all() for x in results[1])


@pytest.mark.parametrize("keys", [13, 17])
@pytest.mark.parametrize("name", CORES)
def test_a_sample_without_keys_gives_zeros_and_leaves_the_other_alone(name, keys):
    core = create(name)
    q, k, v = (x.requires_grad_() for x in qkv(13, keys))
    mask = torch.tensor([[False], [True]]).expand(-1, keys)
    out = seeded(core, q, k, v, mask=mask)
    assert (out[0] == 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))
    torch.testing.assert_close(out[1:], seeded(core, q[1:], k[1:], v[1:]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CORES)
def test_a_mask_that_hides_nothing_is_no_mask(name):
    core, (q, k, v) = create(name), qkv()
    everything = torch.ones(2, 13, dtype=torch.bool)
    torch.testing.assert_close(seeded(core, q, k, v, mask=everything), seeded(core, q, k, v), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CORES)
def test_a_sample_does_not_depend_on_the_others(name, masked):
    """Published Nyström and Skyformer start every inverse from the largest column sum of the batch."""
    core, (q, k, v) = create(name), qkv(batch=3)
    q[1:] *= 9
    mask = scattered(13, batch=3) if masked else None
    alone = seeded(core, q[:1], k[:1], v[:1], mask=None if mask is None else mask[:1])
    torch.testing.assert_close(seeded(core, q, k, v, mask=mask)[:1], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("existing", [1, 3, 4, 5, 10, 16])
@pytest.mark.parametrize("name", ["nystrom", "skyformer"])
def test_padding_at_the_end_is_as_good_as_absent(name, existing):
    core, (q, k, v) = create(name), qkv(21, 21)
    mask = (torch.arange(21) < existing).expand(2, -1)
    trimmed = seeded(core, *(x[:, :, :existing] for x in (q, k, v)))
    found = seeded(core, q, k, v, mask=mask)[:, :, :existing]
    torch.testing.assert_close(found, trimmed, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("existing", [1, 3, 10, 16])
def test_nystrom_keys_in_padding_are_absent_for_other_queries_too(existing):
    core, (q, k, v) = create("nystrom"), qkv(13, 21)
    found = core(q, k, v, mask=(torch.arange(21) < existing).expand(2, -1))
    torch.testing.assert_close(found, core(q, k[:, :, :existing], v[:, :, :existing]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [0.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CORES)
def test_zeros_and_huge_entries_stay_finite(name, dtype, size):
    core = create(name)
    inputs = [(size * x).to(dtype).requires_grad_() for x in qkv(40, 40)]
    inputs[2] = inputs[2].detach().sign().requires_grad_()
    out = seeded(core, *inputs, mask=scattered(40))
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.float().sum(), inputs))


@pytest.mark.parametrize("name", CORES)
def test_float32_is_close_to_float64_and_draws_the_same(name):
    core, (q, k, v) = create(name), qkv(40, 50)
    assert relative_error(seeded(core, q.float(), k.float(), v.float()), seeded(core, q, k, v)) < 1e-4


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (7, 10)])
@pytest.mark.parametrize("name", CORES)
def test_gradients_agree_with_finite_differences(name, queries, keys, masked):
    core = attention.create(name, num_heads=1, head_dim=3, **CORES[name])
    inputs = tuple(x[:, :1, :, :3].contiguous().requires_grad_() for x in qkv(queries, keys))
    mask = scattered(keys) if masked else None
    assert torch.autograd.gradcheck(lambda *x: seeded(core, *x, mask=mask), inputs, fast_mode=True)


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest result of any operation."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, list | tuple) else [result]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CORES)
def test_no_tensor_grows_with_the_square_of_the_length(name, masked):
    core = attention.create(name, num_heads=1, head_dim=4)
    q, k, v = (torch.randn(1, 1, 4096, 4) for _ in range(3))
    mask = torch.arange(4096)[None] % 3 > 0 if masked else None
    with LargestTensor() as seen:
        core(q, k, v, mask=mask)
    assert 4096 <= seen.numel <= 200 * 4096


@pytest.mark.parametrize("name", ["skyformer", "informer"])
def test_draws_differ_between_calls_in_evaluation_too_and_repeat_with_the_seed(name):
    core, (q, k, v) = create(name).eval(), qkv(40, 40)
    assert torch.equal(seeded(core, q, k, v), seeded(core, q, k, v))
    assert not torch.equal(core(q, k, v), core(q, k, v))


def test_facts_and_settings_are_shown():
    landmarks = (("num_landmarks", 16),)
    nystrom = Facts("linear", approximates="softmax", mixes_queries=True, distributions=False, coarse=landmarks)
    assert attention.facts("nystrom") == nystrom
    assert attention.facts("skyformer") == replace(nystrom, approximates="kernelized", stochastic=True)
    assert attention.facts("informer") == Facts(
        "n log n", approximates="softmax", stochastic=True, mixes_queries=True, trims=False, coarse=(("factor", 2),)
    )
    assert not any(attention.facts(name).needs_length for name in ("nystrom", "skyformer", "informer"))
    assert "num_landmarks=4, iterations=6, as_published=False" in repr(create("nystrom"))
    assert "num_landmarks=5, gamma=0.1, iterations=6, as_published=False" in repr(create("skyformer"))
    assert "factor=2, as_published=False" in repr(create("informer"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nystrom", {"num_landmarks": 0}, "'nystrom': num_landmarks is 0; give an integer ≥ 1"),
        ("nystrom", {"iterations": 2.0}, "'nystrom': iterations is 2.0; give an integer"),
        ("skyformer", {"num_landmarks": -3}, "'skyformer': num_landmarks is -3; give an integer"),
        ("skyformer", {"iterations": 0}, "'skyformer': iterations is 0; give an integer"),
        ("skyformer", {"gamma": 0.0}, "'skyformer': gamma is 0.0; give a number > 0"),
        ("skyformer", {"gamma": float("nan")}, "'skyformer': gamma is nan; give a number > 0"),
        ("informer", {"factor": 0}, "'informer': factor is 0; give an integer ≥ 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        create(name, **options)


# Nyström attention


def test_nystrom_landmarks_are_published_ones_where_the_length_divides_and_nothing_is_masked():
    q, k, v = qkv(20, 20)
    near_q, near_k = (x.reshape(2, HEADS, 4, 5, WIDTH).mean(3) / WIDTH**0.25 for x in (q, k))
    q, k = q / WIDTH**0.25, k / WIDTH**0.25
    middle = (near_q @ near_k.mT).softmax(-1)
    inverse = torch.stack([torch.stack([refined_inverse(a) for a in sample]) for sample in middle])
    wanted = (q @ near_k.mT).softmax(-1) @ inverse @ ((near_q @ k.mT).softmax(-1) @ v)
    torch.testing.assert_close(create("nystrom")(q * WIDTH**0.25, k * WIDTH**0.25, v), wanted)


def test_nystrom_leaves_padding_out_of_landmarks():
    """The published means count the zeros of the padding, which gives other landmarks and another result."""
    core, (q, k, v) = create("nystrom"), qkv(16, 16)
    mask = (torch.arange(16) < 11).expand(2, -1)
    with_zeros = core(*(x * mask[:, None, :, None] for x in (q, k, v)))
    assert relative_error(core(q, k, v, mask=mask)[:, :, :11], with_zeros[:, :, :11]) > 0.01


@pytest.mark.parametrize("existing", [4, 3])
def test_nystrom_with_no_more_tokens_than_landmarks_is_softmax(existing):
    core, (q, k, v) = create("nystrom"), qkv(20, 20)
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[0, 5 : 5 + existing] = mask[1, -existing:] = True
    q, k, v = (x * mask[:, None, :, None] for x in (q, k, v))
    softmax = attention.create("softmax", num_heads=HEADS, head_dim=WIDTH)
    torch.testing.assert_close(core(q, k, v, mask=mask), softmax(q, k, v, mask=mask), rtol=1e-9, atol=1e-9)


def test_nystrom_comes_close_to_softmax_for_tokens_that_change_slowly():
    steps = torch.linspace(0, 3, 200, dtype=torch.float64)[:, None] * torch.linspace(1, 2, WIDTH, dtype=torch.float64)
    q, k, v = (torch.sin(steps + shift).expand(1, HEADS, -1, -1) for shift in (0, 1, 2))
    wanted = attention.create("softmax", num_heads=HEADS, head_dim=WIDTH)(q, k, v)
    assert relative_error(create("nystrom", num_landmarks=16)(q, k, v), wanted) < 0.01


def test_nystrom_iterations_bring_the_inverse_closer():
    """Queries are their own landmarks here: with a true pseudo-inverse the map is softmax(Q Kᵀ)."""
    q, k, v = (3 * x for x in qkv(4, 20))
    wanted = attention.create("softmax", num_heads=HEADS, head_dim=WIDTH)(q, k, v)
    few, many = (relative_error(create("nystrom", iterations=n)(q, k, v), wanted) for n in (3, 20))
    assert many < 1e-6 < few


# Skyformer


def test_skyformer_draws_published_positions_where_padding_is_at_the_end():
    """Landmarks of positions ⌊u n⌋, those of the keys in the second half: 64 and 64 of 128."""
    q, k, v = qkv(30, 30)
    mask = torch.arange(30) < torch.tensor([[30], [11]])
    uniforms = seeded(torch.rand, 128)
    out = seeded(create("skyformer", num_landmarks=128), q, k, v, mask=mask)
    for b, count in enumerate((30, 11)):
        index = (uniforms * count).long()
        both = torch.cat([q[b], k[b]], dim=1) / WIDTH**0.25 * torch.cat([mask[b], mask[b]])[:, None]
        landmarks = both[:, torch.cat([index[:64], index[64:] + 30])]
        near = torch.exp(-(torch.cdist(both, landmarks, compute_mode="donot_use_mm_for_euclid_dist") ** 2) / 2)
        for h in range(HEADS):
            gram = torch.exp(-(torch.cdist(landmarks[h], landmarks[h]) ** 2) / 2) + 0.1 * torch.eye(128, dtype=q.dtype)
            root = gram.sum(1) ** -0.5
            inverse = root[:, None] * refined_inverse(root[:, None] * gram * root) * root
            wanted = near[h, :30] @ inverse @ (near[h, 30:] * mask[b][:, None]).T @ v[b, h]
            assert relative_error(out[b, h], wanted) < 1e-6


def test_skyformer_draws_tokens_wherever_they_are():
    """Moving the existing tokens to the front has no effect, as their order is kept."""
    core, (q, k, v), mask = create("skyformer"), qkv(20, 20), scattered(20)[:1]
    q, k, v = q[:1], k[:1], v[:1]
    found = seeded(core, q, k, v, mask=mask)[:, :, mask[0]]
    torch.testing.assert_close(found, seeded(core, *(x[:, :, mask[0]] for x in (q, k, v))), rtol=1e-9, atol=1e-9)


def test_skyformer_comes_close_to_the_gaussian_kernel_with_many_landmarks():
    q, k, v = qkv(30, 40)
    squares = (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1) / WIDTH**0.5
    core = create("skyformer", num_landmarks=300, gamma=1e-3, iterations=14)
    assert relative_error(seeded(core, q, k, v), torch.exp(-squares / 2) @ v) < 0.05


def test_skyformer_keeps_its_digits_far_from_the_origin():
    core, (q, k, v) = create("skyformer"), (x.float() for x in qkv(40, 50))
    q, k = q + 100, k + 100
    assert relative_error(seeded(core, q, k, v), seeded(core, q.double(), k.double(), v.double())) < 1e-4


def test_skyformer_with_one_landmark_takes_a_key():
    q, k, v = qkv(3, 1)
    near = torch.exp(-(q - k).square().sum(-1, keepdim=True) / WIDTH**0.5 / 2)
    torch.testing.assert_close(create("skyformer", num_landmarks=1, iterations=20)(q, k, v), near / 1.1 * v)


# Informer


def test_informer_draws_as_often_as_published():
    core = create("informer", factor=None)
    assert [core.counts(n, n)[0] for n in (1024, 2048, 4096)] == [133, 136, 144]
    assert core.counts(1024, 1024) == (133, 133)
    assert core.counts(10, 4096) == (10, 144)
    assert core.counts(1, 1) == (1, 1)
    assert create("informer").counts(1000, 30) == (14, 8)


def test_informer_selects_and_averages():
    """Of 1024 rows 891 are the mean of the values, and the others softmax attention."""
    q, k, v = (x[:, :1] for x in qkv(1024, 1024, batch=1))
    out = attention.create("informer", num_heads=1, head_dim=WIDTH)(q, k, v)
    mean = (out - v.mean(2, keepdim=True)).abs().amax(-1)[0, 0] < 1e-12
    assert int(mean.sum()) == 891
    softmax = attention.create("softmax", num_heads=1, head_dim=WIDTH)(q, k, v)
    torch.testing.assert_close(out[:, :, ~mean], softmax[:, :, ~mean])


def test_informer_in_blocks_of_queries_is_the_same_as_at_once(monkeypatch):
    core, (q, k, v), mask = create("informer"), qkv(50, 50), scattered(50)
    found = seeded(core, q, k, v, mask=mask)
    monkeypatch.setattr("polaformer.attention.mechanisms.informer.GATHERED", 0.01)
    torch.testing.assert_close(seeded(core, q, k, v, mask=mask), found)


def test_informer_never_selects_tokens_that_do_not_exist():
    core, (q, k, v) = create("informer", factor=1), qkv(50, 50)
    mask = (torch.arange(50) % 25 == 3).expand(2, -1)  # 2 of 50 exist, and 4 are selected
    out = core(q, k, v, mask=mask)
    mean = v[:, :, mask[0]].mean(2, keepdim=True)
    torch.testing.assert_close(out[:, :, ~mask[0]], mean.expand(-1, -1, 48, -1))
    assert not torch.isclose(out[:, :, mask[0]], mean).any(dim=-1).any()


def test_informer_with_all_rows_selected_is_softmax():
    core, (q, k, v), mask = create("informer", factor=None), qkv(50, 50), scattered(50)
    softmax = attention.create("softmax", num_heads=HEADS, head_dim=WIDTH)
    found, wanted = core(q, k, v, mask=mask), softmax(q, k, v, mask=mask)
    for b in range(2):
        torch.testing.assert_close(found[b][:, mask[b]], wanted[b][:, mask[b]])


def test_informer_as_published_ignores_the_mask():
    core, (q, k, v), mask = create("informer", as_published=True), qkv(), scattered(13)
    out = seeded(core, q, k, v, mask=mask)
    assert torch.equal(out, seeded(core, q, k, v))
    assert torch.equal(seeded(core.weights, q, k, mask=mask)["informer"], seeded(core.weights, q, k)["informer"])
    assert not torch.equal(out, seeded(create("informer"), q, k, v, mask=mask))
    v[~mask[:, None].expand(-1, HEADS, -1)] += 1
    assert not torch.equal(out, seeded(core, q, k, v, mask=mask))
