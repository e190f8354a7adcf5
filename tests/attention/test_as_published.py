"""What `as_published=True` brings back, against the published formulas in loops; the layer must not undo it."""

import pytest
import torch

from layers import randomise, tokens
from polaformer import attention

HEADS, WIDTH = 3, 6
ITERATIONS = 2  # few enough that the starting point matters


def create(name, **options):
    return attention.create(name, num_heads=HEADS, head_dim=WIDTH, as_published=True, **options)


def qkv(queries=12, keys=12, batch=2):
    return [torch.randn(batch, HEADS, n, WIDTH, dtype=torch.float64) for n in (queries, keys, keys)]


def scattered(length, batch=2):
    """A mask with a different number of tokens per sample, and holes."""
    position = torch.arange(length)
    return torch.stack([(position * 7 + sample) % 3 >= 1 + sample for sample in range(batch)]) | (position == length - 1)


def seeded(function, *arguments, **options):
    torch.manual_seed(7)
    return function(*arguments, **options)


def published_inverses(matrices):
    """The inverses of all matrices (B, H, m, m), started from the largest column sum of any of them."""
    largest = max(float(a.sum(dim=0).max()) for a in matrices.flatten(0, 1))
    inverses = matrices.clone()
    for b in range(len(matrices)):
        for h in range(HEADS):
            a = matrices[b, h]
            z, eye = a.T / largest, torch.eye(len(a), dtype=a.dtype)
            for _ in range(ITERATIONS):
                z = z @ (13 * eye - a @ z @ (15 * eye - a @ z @ (7 * eye - a @ z))) / 4
            inverses[b, h] = z
    return inverses


def published_nystrom(q, k, v, mask, landmarks):
    """The harness step by step: rows scaled and zeroed, reshaped to segments; the third factor masked by adding −1e9."""
    q, k = q / WIDTH**0.25 * mask[:, None, :, None], k / WIDTH**0.25 * mask[:, None, :, None]
    near_q, near_k = (x.reshape(len(x), HEADS, landmarks, x.shape[2] // landmarks, WIDTH).mean(dim=-2) for x in (q, k))
    first = (q @ near_k.mT).softmax(dim=-1)
    inverse = published_inverses((near_q @ near_k.mT).softmax(dim=-1))
    third = (near_q @ k.mT - 1e9 * (1 - mask[:, None, None, :].double())).softmax(dim=-1)
    return first @ inverse @ (third @ v)


def published_skyformer(q, k, v, mask, landmarks, gamma=0.1):
    """Landmarks at positions ⌊u n⌋ of the queries and then of the keys, even if those tokens are masked."""
    hidden, length = mask[:, None, :, None], q.shape[2]
    both = torch.cat([q * hidden, k * hidden], dim=2) / WIDTH**0.25
    index = (torch.rand(landmarks) * mask.sum(dim=-1, keepdim=True)).long()  # (B, m)
    index[:, landmarks // 2 :] += length
    drawn = torch.stack([both[b][:, index[b]] for b in range(len(q))])

    def gaussian(x, y):
        return torch.exp(-(x[..., :, None, :] - y[..., None, :, :]).square().sum(dim=-1) / 2)

    near = gaussian(both, drawn)
    gram = gaussian(drawn, drawn) + gamma * torch.eye(landmarks, dtype=q.dtype)
    root = gram.sum(dim=-1) ** -0.5
    inverse = published_inverses(root[..., :, None] * gram * root[..., None, :])
    inverse = root[..., :, None] * inverse * root[..., None, :]
    return near[:, :, :length] @ inverse @ (near[:, :, length:] * hidden).mT @ v


def published_linear(q, k, v, mask):
    """Token by token; the mask is ignored."""
    out = torch.zeros_like(q)
    for b in range(len(q)):
        for h in range(HEADS):
            rows, columns = (torch.nn.functional.elu(x[b, h]) + 1 for x in (q, k))
            for t in range(len(rows)):
                scores = columns @ rows[t]
                out[b, h, t] = scores @ v[b, h] / (scores.sum() + 1e-6)
    return out


CORES = {
    "nystrom": ({"num_landmarks": 4, "iterations": ITERATIONS}, lambda *inputs: published_nystrom(*inputs, landmarks=4)),
    "skyformer": ({"num_landmarks": 5, "iterations": ITERATIONS}, lambda *inputs: published_skyformer(*inputs, landmarks=5)),
    "linear": ({}, published_linear),
}


@pytest.mark.parametrize("length", [8, 12, 20])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CORES)
def test_the_published_formula(name, masked, length):
    options, formula = CORES[name]
    core, (q, k, v) = create(name, **options), qkv(length, length)
    mask = scattered(length) if masked else None
    everything = torch.ones(2, length, dtype=torch.bool) if mask is None else mask
    wanted = seeded(formula, q, k, v, everything)
    torch.testing.assert_close(seeded(core, q, k, v, mask=mask), wanted, rtol=1e-9, atol=1e-9)
    (found,) = seeded(core.weights, q, k, mask=mask).values()
    torch.testing.assert_close(found @ v, wanted, rtol=1e-9, atol=1e-9)
    ours = attention.create(name, num_heads=HEADS, head_dim=WIDTH, **options)
    assert not torch.allclose(seeded(ours, q, k, v, mask=mask), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["nystrom", "skyformer"])
def test_published_inverses_depend_on_the_whole_batch(name):
    core, (q, k, v) = create(name, **CORES[name][0]), qkv()
    alone, among_others = seeded(core, q[:1], k[:1], v[:1]), seeded(core, q, k, v)[:1]
    assert not torch.allclose(alone, among_others, rtol=1e-9, atol=1e-9)


def test_published_nystrom_refuses_what_its_landmarks_do_not_divide():
    core = create("nystrom", num_landmarks=4)
    for lengths, what in (((13, 13), "13 queries"), ((8, 13), "13 keys")):
        with pytest.raises(
            ValueError, match=f"got {what} for 4 landmarks, but as published .* give a multiple of 4, or as_pub"
        ):
            core(*qkv(*lengths))
    assert core(*qkv(8, 3)).isfinite().all()
    q, k, v = qkv(4, 4)
    softmax = attention.create("softmax", num_heads=HEADS, head_dim=WIDTH)
    mask = scattered(4)
    torch.testing.assert_close(core(q, k, v, mask=mask, cross=True), softmax(q, k, v, mask=mask))


@pytest.mark.parametrize("name", ["informer", "linear"])
def test_a_mask_that_published_code_ignores_is_ignored_in_the_layer_too(name):
    """Masked tokens count: zeros in their place would change the result."""
    options = {"factor": 1} if name == "informer" else {}
    layer = randomise(attention.create_layer(name, 12, 2, as_published=True, **options)).double()
    x, mask = tokens(), torch.rand(2, 20) > 0.3
    out = seeded(layer, x, mask=mask)
    assert torch.equal(out, seeded(layer, x))
    assert not torch.allclose(out, seeded(layer, x * mask[..., None]))


def test_local_as_published_reads_what_is_under_the_mask_in_its_layer_too():
    x, mask = tokens(), torch.rand(2, 20) > 0.3
    other = x + (~mask)[..., None]
    published, ours = (
        randomise(attention.create_layer("local", 12, 2, block=4, as_published=flag)).double() for flag in (True, False)
    )
    assert not torch.allclose(published(other, mask=mask)[mask], published(x, mask=mask)[mask])
    torch.testing.assert_close(ours(other, mask=mask)[mask], ours(x, mask=mask)[mask])


def test_what_reads_masked_tokens_is_known():
    published = [name for name in attention.names() if "as_published" in attention.option_names(name)]
    sized = {"max_length": 8}
    cores = {name: create(name, **(sized if attention.facts(name).needs_length else {})) for name in published}
    assert published == ["informer", "linear", "linformer", "local", "nystrom", "performer", "skyformer"]
    assert [name for name, core in cores.items() if core.facts.reads_masked] == ["informer", "linear", "local"]
