"""Laws that polarity-aware attention obeys for every input (row N6), under hypothesis.

Each example draws shapes, a seed and powers; the numbers themselves come from the seed, so that failures shrink to small
shapes. Laws on rows that sum to one, on the convex hull and on constant values hold with eps = 0 and some key mass.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oracle import with_gradients
from polaformer.ops.polarity import reference, variants
from polaformer.ops.polarity.operator import polarity_attention

pytestmark = pytest.mark.usefixtures("each_backend")


@st.composite
def problems(draw, max_tokens=9) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v (B, H, T, D) and power (H, D) in float64; some exact zeros, magnitudes over many decades."""
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    queries, keys, width = draw(st.integers(1, max_tokens)), draw(st.integers(1, max_tokens)), draw(st.integers(2, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = 10.0 ** draw(st.integers(-8, 8))
    sparsity = draw(st.sampled_from([0.0, 0.0, 0.3]))

    def noise(tokens: int) -> Tensor:
        x = torch.randn(batch, heads, tokens, width, generator=generator, dtype=torch.float64)
        return x * (torch.rand(x.shape, generator=generator) >= sparsity)

    power = 1 + 7 * torch.rand(heads, width, generator=generator, dtype=torch.float64) ** 2
    return noise(queries) * scale, noise(keys) / scale, noise(keys), power


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def halves(out: Tensor) -> tuple[Tensor, Tensor]:
    """The same-sign and the opposite-sign channels."""
    half = (out.shape[-1] + 1) // 2
    return out[..., :half], out[..., half:]


def mass(q: Tensor, k: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each query meets any key mass, (B, H, N, 1) for each stream."""
    return tuple(m.sum(dim=-1, keepdim=True) > 0 for m in reference.polarity_maps(q, k, power))  # type: ignore[return-value]


@given(problems())
def test_law_linear_form_equals_quadratic_form(problem):
    assert_close(polarity_attention(*problem), reference.polarity_attention(*problem))


@given(problems(), st.integers(-8, 8))
def test_law_queries_and_keys_are_divided_by_the_scale(problem, exponent):
    """Values, and the gradients of everything, that of the scale too."""
    q, k, v, power = problem
    scale = 10.0**exponent * (0.5 + torch.linspace(0, 1, power.numel(), dtype=power.dtype).reshape(power.shape))
    inputs, cotangent = [x.requires_grad_() for x in (q, k, v, power, scale)], torch.linspace(-1, 1, q.numel()).reshape(q.shape)

    def attend(function):
        return with_gradients(lambda *x: function(*x[:4], scale=x[4], eps=1e-3), inputs, cotangent)

    for x, found, wanted in zip((1.0, *inputs), attend(polarity_attention), attend(reference.polarity_attention), strict=True):
        assert_close(x * found, x * wanted)  # gradients of logarithms: those of tiny numbers are huge


@given(problems())
def test_law_rows_sum_to_one_in_fp32(problem):
    q, k, _, power = (x.float() for x in problem)
    for weights, meets in zip(variants.polarity_maps(q, k, power), mass(q, k, power), strict=True):
        assert (weights >= 0).all()
        assert_close(weights.sum(dim=-1, keepdim=True), meets.float(), tolerance=4e-6)


@given(problems())
def test_law_constant_values_are_reproduced(problem):
    q, k, v, power = problem
    out = polarity_attention(q, k, torch.full_like(v, 2.5), power)
    for part, meets in zip(halves(out), mass(q, k, power), strict=True):
        assert_close(part, 2.5 * meets.double().expand_as(part))


@given(problems())
def test_law_outputs_lie_in_the_convex_hull_of_the_values(problem):
    q, k, v, power = problem
    for part, values, meets in zip(halves(polarity_attention(*problem)), halves(v), mass(q, k, power), strict=True):
        low, high = values.amin(dim=-2, keepdim=True), values.amax(dim=-2, keepdim=True)
        inside = (part >= low - 1e-9) & (part <= high + 1e-9)
        assert (inside | ~meets).all()


@given(problems(), st.randoms(use_true_random=False))
def test_law_queries_do_not_see_each_other(problem, random):
    q, k, v, power = problem
    order = random.sample(range(q.shape[2]), q.shape[2])
    assert_close(polarity_attention(q[:, :, order], k, v, power), polarity_attention(q, k, v, power)[:, :, order])


@given(problems(), st.randoms(use_true_random=False))
def test_law_the_order_of_keys_does_not_matter(problem, random):
    q, k, v, power = problem
    order = random.sample(range(k.shape[2]), k.shape[2])
    assert_close(polarity_attention(q, k[:, :, order], v[:, :, order], power), polarity_attention(*problem))


@given(problems())
def test_law_flipping_both_signs_changes_nothing(problem):
    q, k, v, power = problem
    assert_close(polarity_attention(-q, -k, v, power), polarity_attention(*problem))


@given(problems())
def test_law_flipping_the_queries_swaps_the_streams(problem):
    q, k, _, power = problem
    same, opposite = variants.polarity_maps(q, k, power)
    flipped_same, flipped_opposite = variants.polarity_maps(-q, k, power)
    assert_close(flipped_same, opposite)
    assert_close(flipped_opposite, same)


@given(problems())
def test_law_repeating_every_key_changes_nothing(problem):
    q, k, v, power = problem
    assert_close(polarity_attention(q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1), power), polarity_attention(*problem))
    assert_close(
        polarity_attention(q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1), power, eps=1e-3),
        polarity_attention(*problem, eps=1e-3),
    )


@given(problems())
def test_law_samples_and_heads_do_not_see_each_other(problem):
    q, k, v, power = problem
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            alone = polarity_attention(q[b, h][None, None], k[b, h][None, None], v[b, h][None, None], power[h])
            assert_close(alone[0, 0], polarity_attention(*problem)[b, h])


@given(problems(), st.integers(1, 9))
def test_law_queries_in_chunks_give_the_same(problem, size):
    q, k, v, power = problem
    chunks = [polarity_attention(part, k, v, power) for part in q.split(size, dim=2)]
    assert_close(torch.cat(chunks, dim=2), polarity_attention(*problem))


@given(problems(), st.floats(-25, 25))
def test_law_a_query_can_be_scaled_when_all_powers_are_equal(problem, exponent):
    q, k, v, power = problem
    power = power[:, :1].expand_as(power)
    assert_close(polarity_attention(q * 10.0**exponent, k, v, power), polarity_attention(q, k, v, power), tolerance=1e-7)


@given(problems(), st.data())
def test_law_a_masked_key_is_an_absent_key(problem, data):
    q, k, v, power = problem
    kept = data.draw(st.lists(st.booleans(), min_size=k.shape[2], max_size=k.shape[2]))
    mask = torch.tensor(kept).expand(k.shape[0], -1)
    absent = polarity_attention(q, k[:, :, kept], v[:, :, kept], power, eps=1e-4)
    assert_close(polarity_attention(q, k, v, power, mask=mask, eps=1e-4), absent)


@given(problems())
def test_law_values_enter_linearly(problem):
    q, k, v, power = problem
    other = torch.linspace(-1, 1, v.numel(), dtype=v.dtype).reshape(v.shape)
    whole = polarity_attention(q, k, 2 * v - 3 * other, power)
    assert_close(whole, 2 * polarity_attention(q, k, v, power) - 3 * polarity_attention(q, k, other, power))


@given(problems())
def test_law_eps_only_shrinks_the_output(problem):
    q, k, _, power = problem
    plain = torch.stack(variants.polarity_maps(q, k, power))
    shrunk = torch.stack(variants.polarity_maps(q, k, power, eps=1e-2))
    assert (shrunk <= plain + 1e-12).all()
    assert (shrunk >= 0).all()


@given(problems())
def test_law_fp32_follows_fp64(problem):
    narrow = [x.float() for x in problem]
    found, wanted = polarity_attention(*narrow), polarity_attention(*[x.double() for x in narrow])
    assert_close(found.double(), wanted, tolerance=2e-4)
