"""Mechanisms whose tokens attend within blocks, windows and buckets: local, longformer, bigbird, reformer."""

import math

import pytest
import torch
import torch.nn.functional as F

from oracle import relative_error
from polaformer.attention.mechanisms.bigbird import BigBirdCore
from polaformer.attention.mechanisms.local import LocalCore
from polaformer.attention.mechanisms.longformer import LongformerCore
from polaformer.attention.mechanisms.reformer import ReformerCore

HEADS, WIDTH = 2, 6
CORES = {
    "local": (LocalCore, {"block": 4}),
    "longformer": (LongformerCore, {"window": 6}),
    "bigbird": (BigBirdCore, {"block": 2, "num_random": 1}),
    "reformer": (ReformerCore, {"chunk": 4}),
}
LENGTHS = [1, 3, 4, 9, 16, 23]


def create(name, **options):
    make, defaults = CORES[name]
    return make(HEADS, WIDTH, **(defaults | options))


def qkv(tokens, batch=2, dtype=torch.float64, heads=HEADS, width=WIDTH):
    return [torch.randn(batch, heads, tokens, width, dtype=dtype) for _ in range(3)]


def random_mask(tokens, batch=2):
    """About two in three tokens exist; the first one always."""
    mask = torch.rand(batch, tokens) < 0.67
    mask[:, 0] = True
    return mask


def repeat(core, *arguments, call="forward", **options):
    """A call with a fixed random seed."""
    torch.manual_seed(3)
    return getattr(core, call)(*arguments, **options)


def softmax_over(q, k, v, allowed):
    """Softmax attention over the allowed pairs, (…, N, M); zeros for a query without any."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def among_existing(allowed, mask):
    return allowed if mask is None else allowed & mask[:, None, None, :]


def assert_equal(found, wanted, tolerance=1e-9):
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


# What all four share


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", CORES)
def test_the_explicit_map_is_what_forward_applies(name, tokens, masked):
    core, (q, k, v) = create(name), qkv(tokens)
    mask = random_mask(tokens) if masked else None
    found = repeat(core, q, k, call="weights", mask=mask)[name]
    assert found.shape == (2, HEADS, tokens, tokens)
    if masked:
        assert (found.mT[~mask[:, None].expand(-1, HEADS, -1)] == 0).all()
    assert_equal(repeat(core, q, k, v, mask=mask), found @ v)


@pytest.mark.parametrize("name", CORES)
def test_rows_of_the_map_sum_to_one_for_tokens_that_exist(name):
    (q, k, _), mask = qkv(23), random_mask(23)
    sums = repeat(create(name), q, k, call="weights", mask=mask)[name].sum(-1)
    assert_equal(sums[mask[:, None].expand(-1, HEADS, -1)], torch.ones(int(mask.sum()) * HEADS, dtype=torch.float64))


@pytest.mark.parametrize("name", CORES)
def test_content_under_the_mask_changes_neither_result_nor_gradients(name):
    mask = random_mask(23)
    hidden = ~mask[:, None].expand(-1, HEADS, -1)

    def run(fill_q, fill_k, fill_v):
        torch.manual_seed(5)
        q, k, v = qkv(23, dtype=torch.float32)
        for x, fill in ((q, fill_q), (k, fill_k), (v, fill_v)):
            if fill is not None:
                x[hidden] = fill
        q, v = q.requires_grad_(), v.requires_grad_()
        out = repeat(create(name), q, k, v, mask=mask)
        return out.detach(), *torch.autograd.grad(out[~hidden].sum(), (q, v))

    clean = run(None, None, None)
    # The query of a masked token affects no other token, unless the mechanism mixes queries.
    found = run(math.nan if create(name).facts.mixes_queries else None, math.nan, math.inf)
    for x, wanted in zip(found, clean, strict=True):
        torch.testing.assert_close(x, wanted)


@pytest.mark.parametrize("name", CORES)
def test_a_sample_without_any_token_gives_zeros_and_finite_gradients(name):
    q, k, v = (x.requires_grad_() for x in qkv(23, dtype=torch.float32))
    mask = torch.ones(2, 23, dtype=torch.bool)
    mask[0] = False
    out = repeat(create(name), q, k, v, mask=mask)
    assert (out[0] == 0).all()
    assert out.isfinite().all()
    gradients = torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True)
    assert all(g.isfinite().all() for g in gradients if g is not None)


@pytest.mark.parametrize("scale", [0.0, 1e4])
@pytest.mark.parametrize("tokens", [1, 9, 23])
@pytest.mark.parametrize("name", CORES)
def test_zero_and_huge_vectors_and_half_precision_give_no_nan(name, tokens, scale):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        q, k, v = ((x * s).to(dtype).requires_grad_() for x, s in zip(qkv(tokens), (scale, scale, 1.0), strict=True))
        mask = torch.zeros(2, tokens, dtype=torch.bool)
        mask[:, tokens // 2] = True
        for given in (None, mask):
            out = repeat(create(name), q, k, v, mask=given)
            assert out.dtype == dtype
            gradients = torch.autograd.grad(out.float().sum(), (q, k, v), allow_unused=True)
            assert all(x.isfinite().all() for x in (out, *gradients) if x is not None)


@pytest.mark.parametrize("name", CORES)
def test_a_sample_does_not_depend_on_the_others_of_its_batch(name):
    core, (q, k, v), mask = create(name), qkv(23, batch=3), random_mask(23, batch=3)
    together = repeat(core, q, k, v, mask=mask)
    alone = [repeat(core, q[i : i + 1], k[i : i + 1], v[i : i + 1], mask=mask[i : i + 1]) for i in range(3)]
    assert_equal(together, torch.cat(alone), 1e-12)


@pytest.mark.parametrize(("name", "added"), [("local", 9), ("longformer", 9), ("bigbird", 1), ("reformer", 2)])
def test_masked_tokens_at_the_end_change_nothing_for_the_others(name, added):
    """As the docstrings promise: any number of them, or as many as add no block (of 2) or chunk (of 4) to 21 tokens."""
    tokens = 21
    core, (q, k, v) = create(name), qkv(tokens + added)
    mask = (torch.arange(tokens + added) < tokens).expand(2, -1)
    short = [x[:, :, :tokens] for x in (q, k, v)]
    assert_equal(repeat(core, q, k, v, mask=mask)[:, :, :tokens], repeat(core, *short), 1e-12)


@pytest.mark.parametrize("name", CORES)
def test_gradients_are_those_of_the_formula(name):
    core, mask = create(name), random_mask(13)
    q, k, v = (x.requires_grad_() for x in qkv(13))
    assert torch.autograd.gradcheck(lambda *x: repeat(core, *x, mask=mask), (q, k, v), fast_mode=True)


@pytest.mark.parametrize("name", CORES)
def test_no_tensor_grows_with_the_square_of_the_length(name):
    """Twice the tokens, about twice the largest tensor that is computed, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            out = function(*arguments, **(options or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                # A view needs no memory.
                if isinstance(x, torch.Tensor):
                    self.size = max(self.size, x.untyped_storage().nbytes())
            return out

    def largest(tokens):
        q, k, v = (x.requires_grad_() for x in qkv(tokens, batch=1, dtype=torch.float32))
        with Largest() as seen:
            create(name)(q, k, v, mask=torch.ones(1, tokens, dtype=torch.bool)).sum().backward()
        return seen.size

    assert largest(2048) < 2.1 * largest(1024)
    assert largest(2048) < 2048 * 2048


@pytest.mark.parametrize("name", CORES)
def test_other_tokens_as_keys_are_refused(name):
    q, k, v = qkv(5)
    with pytest.raises(ValueError, match=f"attention '{name}': got 4 queries and 5 keys"):
        create(name)(q[:, :, :4], k, v)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("local", {"block": 0}, "attention 'local': block is 0; give an integer ≥ 1"),
        ("longformer", {"window": 7}, r"window is 7; give an even integer ≥ 2 \(e.g. 512\), or the numbers of tokens"),
        ("longformer", {"window": 0}, "window is 0; give an even integer ≥ 2"),
        ("longformer", {"window": (3, -1)}, r"window is \(3, -1\); .* a pair of integers ≥ 0"),
        ("longformer", {"window": (3,)}, r"window is \(3,\)"),
        ("bigbird", {"block": 2.0}, "block is 2.0; give an integer ≥ 1"),
        ("bigbird", {"window": 4}, "window is 4; give an odd number of blocks"),
        ("bigbird", {"num_random": -1}, "num_random is -1; give an integer ≥ 0"),
        ("bigbird", {"seed": None}, "seed is None; give an integer ≥ 0"),
        ("reformer", {"chunk": -4}, "chunk is -4; give an integer ≥ 1"),
        ("reformer", {"num_hashes": 0}, "num_hashes is 0; give an integer ≥ 1"),
        ("reformer", {"num_buckets": 5}, "num_buckets is 5; give an even number, or None"),
    ],
)
def test_settings_that_make_no_sense_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        create(name, **options)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("local", "LocalCore(block=4)"),
        ("longformer", "LongformerCore(window=(2, 3))"),
        ("bigbird", "BigBirdCore(block=2, num_random=1, window=3, seed=0)"),
        ("reformer", "ReformerCore(chunk=4, num_hashes=2, num_buckets=None)"),
    ],
)
def test_the_settings_can_be_read_and_nothing_is_stored(name, text):
    core = create(name)
    repeat(core, *qkv(23))
    assert repr(core) == text
    assert core.state_dict() == {}


# Local


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("block", [1, 4, 7, 64])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_local_is_softmax_within_contiguous_blocks(tokens, block, masked):
    q, k, v = qkv(tokens)
    mask = random_mask(tokens) if masked else None
    blocks = torch.arange(tokens) // block
    wanted = softmax_over(q, k, v, among_existing(blocks[:, None] == blocks, mask))
    assert_equal(create("local", block=block)(q, k, v, mask=mask), wanted)


def strided_by_loops(q, k, v, mask, block):
    """The Long Range Arena's formula, token by token; returns the outputs and the map, without the appended tokens."""
    batch, heads, tokens, width = q.shape
    length = tokens + block - tokens % block
    groups = length // block
    q, k, v = (F.pad(x, (0, 0, 0, length - tokens)) for x in (q, k, v))
    mask = F.pad(mask, (0, length - tokens), value=True)
    weights = q.new_zeros(batch, heads, length, length)
    for b in range(batch):
        for t in range(length):
            entry, group = divmod(t, groups)
            others = torch.arange(group, length, groups)
            allowed = mask[b, group * block : (group + 1) * block]
            for h in range(heads):
                scores = k[b, h, others] @ q[b, h, t] * width**-0.5
                scores = scores.masked_fill(~allowed, -math.inf) if allowed[entry] else torch.zeros_like(scores)
                weights[b, h, t, others] = scores.softmax(0)
    return (weights @ v)[:, :, :tokens], weights[:, :, :tokens, :tokens]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 4, 11, 12])
def test_local_as_published_is_strided_with_the_mask_of_other_tokens(tokens, masked):
    """Eleven and twelve tokens in blocks of four: one and four are appended."""
    q, k, v = qkv(tokens)
    mask = random_mask(tokens)
    wanted, wanted_map = strided_by_loops(q, k, v, mask if masked else torch.ones_like(mask), 4)
    core = create("local", as_published=True)
    assert_equal(core(q, k, v, mask=mask if masked else None), wanted)
    assert_equal(core.weights(q, k, mask=mask if masked else None)["local"], wanted_map)
    assert repr(core) == "LocalCore(block=4, as_published=True)"


def test_local_as_published_takes_half_precision_and_refuses_other_keys():
    q, k, v = qkv(9, dtype=torch.float16)
    core, mask = create("local", as_published=True), random_mask(9)
    out = core(q, k, v, mask=mask)
    assert out.dtype == torch.float16
    assert relative_error(out, core(q.double(), k.double(), v.double(), mask=mask)) < 1e-3
    for call in (lambda: core(q[:, :, :4], k, v), lambda: core.weights(q[:, :, :4], k)):
        with pytest.raises(ValueError, match="got 4 queries and 9 keys"):
            call()


# Longformer


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("window", "sides"), [(2, (0, 1)), (6, (2, 3)), (512, (255, 256)), ((3, 0), (3, 0)), ((0, 0), (0, 0))])
@pytest.mark.parametrize("tokens", [*LENGTHS, 150])
def test_longformer_is_softmax_within_a_band(tokens, window, sides, masked):
    q, k, v = qkv(tokens, batch=1)
    mask = random_mask(tokens, batch=1) if masked else None
    offset = torch.arange(tokens) - torch.arange(tokens)[:, None]
    band = (offset >= -sides[0]) & (offset <= sides[1])
    assert_equal(create("longformer", window=window)(q, k, v, mask=mask), softmax_over(q, k, v, among_existing(band, mask)))


def test_a_masked_query_of_longformer_sees_what_exists_in_its_window():
    q, k, v = qkv(9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[:, 4] = False
    found = create("longformer", window=(1, 1))(q, k, v, mask=mask)[:, :, 4]
    near = torch.tensor([3, 5])
    wanted = F.scaled_dot_product_attention(q[:, :, 4:5], k[:, :, near], v[:, :, near])[:, :, 0]
    assert_equal(found, wanted)


# BigBird


def bigbird_by_loops(q, k, v, mask, core, pattern):
    """Which blocks each block sees, from the definition; then softmax attention over their tokens."""
    tokens, block = q.shape[2], core.block
    num_blocks = math.ceil(tokens / block)
    allowed = torch.zeros(HEADS, num_blocks, num_blocks, dtype=torch.bool)
    for h in range(HEADS):
        for own in range(num_blocks):
            near = range(max(0, own - core.window // 2), min(num_blocks, own + core.window // 2 + 1))
            drawn = pattern[h, own - 1].tolist() if 0 < own < num_blocks - 1 else range(num_blocks)
            allowed[h, own, [0, num_blocks - 1, *near, *(i for i in drawn if i >= 0)]] = True
    allowed = allowed.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :tokens, :tokens]
    return softmax_over(q, k, v, among_existing(allowed, mask))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_random": 3}, {"num_random": 0}, {"window": 5, "num_random": 2}, {"window": 1}])
@pytest.mark.parametrize("tokens", [11, 12, 17, 18, 31])
def test_bigbird_is_softmax_over_global_near_and_random_blocks(tokens, options, masked):
    core, (q, k, v) = create("bigbird", **options), qkv(tokens)
    mask = random_mask(tokens) if masked else None
    pattern = core.random_blocks(math.ceil(tokens / 2))
    assert_equal(core(q, k, v, mask=mask), bigbird_by_loops(q, k, v, mask, core, pattern))


@pytest.mark.parametrize("options", [{}, {"num_random": 3}, {"window": 5, "num_random": 2}, {"window": 1, "num_random": 2}])
@pytest.mark.parametrize("num_blocks", [6, 8, 9, 16, 40])
def test_random_blocks_are_other_ones_and_none_twice(num_blocks, options):
    core = create("bigbird", **options)
    pattern = core.random_blocks(num_blocks)
    assert pattern.shape == (HEADS, num_blocks - 2, core.num_random)
    assert pattern.dtype == torch.long
    for row in pattern:
        for own, drawn in enumerate(row.tolist(), start=1):
            seen = {0, num_blocks - 1, *range(own - core.window // 2, own + core.window // 2 + 1)}
            others = set(range(num_blocks)) - seen
            drawn = [i for i in drawn if i >= 0]
            assert set(drawn) <= others
            assert len(set(drawn)) == len(drawn) == min(core.num_random, len(others))


def test_random_blocks_come_from_the_whole_sequence_and_differ_by_head_and_seed():
    """Also at 16 and 64 blocks of 64 tokens, where transformers draws from the first 16 blocks only; all are equally likely."""
    core = BigBirdCore(8, WIDTH)
    pattern = core.random_blocks(64)
    assert pattern[:, 20:40].max() > 55
    assert pattern[:, 20:40].min() < 8
    assert not torch.equal(pattern[0], pattern[1])
    assert not torch.equal(pattern, BigBirdCore(8, WIDTH, seed=1).random_blocks(64))
    assert torch.equal(pattern, BigBirdCore(8, WIDTH).random_blocks(64))
    counts = BigBirdCore(4000, WIDTH).random_blocks(12)[:, 4].flatten().bincount(minlength=12)  # block 5 draws 3 of 7 others
    assert counts[[0, 4, 5, 6, 11]].sum() == 0
    assert (counts[[1, 2, 3, 7, 8, 9, 10]] / 4000 - 3 / 7).abs().max() < 0.04


def test_the_random_blocks_of_a_seed_never_change():
    """A trained model depends on them."""
    assert BigBirdCore(2, WIDTH).random_blocks(9).tolist() == [
        [[5, 6, 7], [4, 5, 7], [5, 1, 7], [2, 6, 7], [1, 3, 7], [1, 3, 4], [3, 4, 2]],
        [[5, 6, 7], [4, 6, 5], [5, 6, 7], [1, 6, 2], [2, 3, 1], [2, 3, 4], [3, 1, 5]],
    ]


def test_random_blocks_are_drawn_once_and_disturb_no_other_random_numbers():
    from polaformer.attention.mechanisms import bigbird

    q, k, v = qkv(24)
    core = create("bigbird", seed=77)
    before, misses = torch.get_rng_state(), bigbird._draw.cache_info().misses
    with torch.inference_mode():
        first = core(q, k, v)
    assert_equal(core(q.requires_grad_(), k, v), first)
    core(q, k, v).sum().backward()
    assert bigbird._draw.cache_info().misses == misses + 1
    assert torch.equal(torch.get_rng_state(), before)
    core.num_random = 2
    assert core.random_blocks(12).shape == (HEADS, 10, 2)
    assert core.state_dict() == {}


@pytest.mark.parametrize(("options", "most"), [({}, 5), ({"num_random": 3}, 7), ({"window": 5, "num_random": 2}, 7)])
def test_bigbird_is_softmax_attention_while_every_block_would_be_seen(options, most):
    """But no longer: with one block more, the second block misses one."""
    core, mask = create("bigbird", **options), random_mask(2 * most + 2)
    for blocks in range(1, most + 2):
        q, k, v = qkv(2 * blocks)
        exists = mask[:, : 2 * blocks]
        wanted = softmax_over(q, k, v, exists[:, None, None, :])
        assert (relative_error(core(q, k, v, mask=exists), wanted) < 1e-12) == (blocks <= most)


# Reformer


def fix_rotations(core, tokens):
    """Make the core hash with fixed rotations, and return them."""
    rotations = torch.randn(HEADS, WIDTH, core.num_hashes, sum(core.bucket_factors(tokens)) // 2, dtype=torch.float64)
    core.rotations = lambda size, like: rotations.to(like.dtype)
    return rotations


def buckets_by_loops(q, rotations, factors):
    """(R, N) for one sample and head: q (N, D), rotations (D, R, …)."""
    found = torch.zeros(rotations.shape[1], len(q), dtype=torch.long)
    for r in range(rotations.shape[1]):
        stride, start = 1, 0
        for factor in factors:
            turned = q @ rotations[:, r, start : start + factor // 2]
            found[r] += stride * torch.cat([turned, -turned], dim=1).argmax(1)
            stride, start = stride * factor, start + factor // 2
    return found


def reformer_by_loops(q, v, mask, core, rotations):
    """Rounds, chunks and queries one after the other. Each round is normalised by itself, and the rounds are combined by the
    logarithms of their norms, as in the paper."""
    batch, heads, tokens, width = q.shape
    chunk, length = core.chunk, -(-tokens // core.chunk) * core.chunk
    factors = core.bucket_factors(length)
    out = torch.zeros_like(q)
    for b in range(batch):
        exists = torch.zeros(length, dtype=torch.bool)
        exists[:tokens] = True if mask is None else mask[b]
        for h in range(heads):
            x = F.pad(q[b, h], (0, 0, 0, length - tokens)) * exists[:, None]
            values = F.pad(v[b, h], (0, 0, 0, length - tokens)) * exists[:, None]
            keys = x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() / math.sqrt(width)
            buckets = buckets_by_loops(x, rotations[h], factors)
            buckets[:, ~exists] = math.prod(factors)
            chunks = [part for row in buckets for part in sorted(range(length), key=row.tolist().__getitem__)]
            chunks = [chunks[start : start + chunk] for start in range(0, len(chunks), chunk)]
            outs, norms = {t: [] for t in range(length)}, {t: [] for t in range(length)}
            for c, own in enumerate(chunks):
                seen = [i for i in [*chunks[c - 1], *own] if exists[i]]
                for t in own:
                    scores = torch.stack([x.new_tensor(-1e5) if i == t else x[t] @ keys[i] for i in seen]) if seen else None
                    if seen:
                        outs[t].append(scores.softmax(0) @ values[seen])
                        norms[t].append(scores.logsumexp(0))
            for t in range(tokens):
                if outs[t]:
                    out[b, h, t] = torch.stack(norms[t]).softmax(0) @ torch.stack(outs[t])
    return out


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_hashes": 1}, {"num_hashes": 3, "num_buckets": 6}, {"chunk": 2}])
@pytest.mark.parametrize("tokens", [5, 8, 16, 23])
def test_reformer_is_lsh_attention_with_shared_queries_and_keys(tokens, options, masked):
    core, (q, k, v) = create("reformer", **options), qkv(tokens)
    mask = random_mask(tokens) if masked else None
    rotations = fix_rotations(core, -(-tokens // core.chunk) * core.chunk)
    wanted = reformer_by_loops(q, v, mask, core, rotations)
    assert_equal(core(q, k, v, mask=mask), wanted)


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_reformer_of_one_chunk_is_softmax_over_the_other_tokens(tokens):
    """A single token attends to itself."""
    core, (q, k, v) = create("reformer", chunk=7), qkv(tokens)
    keys = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    others = ~torch.eye(tokens, dtype=torch.bool) if tokens > 1 else torch.ones(1, 1, dtype=torch.bool)
    before = torch.get_rng_state()
    assert_equal(core(q, k, v), softmax_over(q, keys, v, others))
    assert torch.equal(torch.get_rng_state(), before)
    mask = torch.arange(tokens).expand(2, -1) == 0
    assert_equal(core(q, k, v, mask=mask)[:, :, 0], v[:, :, 0])


@pytest.mark.parametrize("size", [5.0, 500.0, 5e4])
def test_a_token_of_reformer_prefers_any_other_to_itself(size):
    """Even one with a very negative score, here −size: its own, −1e5, is lower still."""
    core, (q, k, v) = create("reformer", chunk=2), qkv(2)
    q = q[:, :, :1] / q[:, :, :1].norm(dim=-1, keepdim=True) * torch.tensor([[size], [-size]])
    assert_equal(core(q, k, v), v.flip(2))


def test_reformer_does_not_read_k():
    q, k, v = qkv(23)
    core = create("reformer")
    assert_equal(repeat(core, q, torch.full_like(k, math.nan), v), repeat(core, q, k, v))


def test_reformer_draws_new_rotations_in_every_call_and_the_same_ones_in_every_precision():
    q, k, v = qkv(64)
    core = create("reformer")
    assert not torch.allclose(core(q, k, v), core(q, k, v))
    assert_equal(repeat(core, q, k, v), repeat(core, q, k, v))
    single = repeat(core, *(x.float() for x in (q, k, v)))
    assert relative_error(single, repeat(core, q, k, v)) < 1e-5


def test_the_number_of_buckets_is_not_kept_from_another_length():
    core, fresh, inputs = create("reformer"), create("reformer"), qkv(64)
    core(*qkv(16))
    assert_equal(repeat(core, *inputs), repeat(fresh, *inputs))


@pytest.mark.parametrize(
    ("chunk", "tokens", "wanted"),
    [
        (64, 65, [2]),
        (64, 1024, [32]),
        (64, 1100, [32]),
        (64, 2048, [64]),
        (64, 4096, [128]),
        (64, 8192, [16, 16]),
        (64, 2**20, [2**5, 2**5, 2**5]),
        (4, 5, [2]),
        (4, 64, [4, 8]),
    ],
)
def test_the_number_of_buckets(chunk, tokens, wanted):
    """At 1024, 2048 and 4096 tokens as in the Skyformer runs. No hash has more than 2·chunk buckets."""
    core = create("reformer", chunk=chunk)
    core.bucket_factors(chunk + 1)
    assert core.bucket_factors(tokens) == wanted
    assert create("reformer", num_buckets=10).bucket_factors(tokens) == [10]
