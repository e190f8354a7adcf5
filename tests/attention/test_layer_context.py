"""The layer with masks and with keys from another sequence."""

import pytest
import torch
import torch.nn.functional as F

from layers import GRID, pola, randomise, tokens
from polaformer import attention
from polaformer.attention import AttentionLayer


@pytest.mark.parametrize(
    "options", [{}, {"reduction": 2}, {"num_prefix_tokens": 1}, {"conv": "deformable"}, {"gate": None}], ids=str
)
@pytest.mark.parametrize("poison", [float("nan"), 1e6])
def test_content_under_the_mask_changes_no_other_token_and_no_gradient(options, poison):
    layer = pola(**options)
    x = tokens(20 + options.get("num_prefix_tokens", 0))
    mask = torch.rand(x.shape[:2]) > 0.4
    mask[:, 0] = True

    def run(x):
        layer.zero_grad()
        out = layer(x, grid=GRID, mask=mask)[mask]
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in layer.parameters())]

    clean, poisoned = run(x), run(torch.where(mask[..., None], x, poison))
    for a, b in zip(clean, poisoned, strict=True):
        assert b.isfinite().all()
        torch.testing.assert_close(a, b)


def test_padding_an_image_on_the_right_and_below_changes_nothing():
    layer, x = pola(), tokens(12).unflatten(1, (3, 4))
    padded = F.pad(x, (0, 0, 0, 2, 0, 3), value=5.0)
    mask = F.pad(torch.ones(2, 3, 4), (0, 2, 0, 3)).bool()
    alone = layer(x.flatten(1, 2), grid=(3, 4))
    in_batch = layer(padded.flatten(1, 2), grid=(6, 6), mask=mask.flatten(1)).unflatten(1, (6, 6))[:, :3, :4]
    torch.testing.assert_close(in_batch.flatten(1, 2), alone)


def test_padding_a_sequence_at_the_end_changes_nothing_in_its_convolution_either():
    """The projection has a bias: the values of masked tokens are not automatically zero."""
    layer, x = rival("angular"), tokens(13)
    assert layer.conv.kernel_size == (9, 1)
    assert layer.qkv.bias.abs().min() > 0
    padded = F.pad(x, (0, 0, 0, 7), value=5.0)
    mask = (torch.arange(20) < 13).expand(2, -1)
    torch.testing.assert_close(layer(padded, mask=mask)[:, :13], layer(x))


def test_context_gives_keys_and_values():
    layer, x, context = pola(conv=None), tokens(7), tokens(11)
    maps = layer.maps(x, context=context)
    assert maps["same"].shape == (2, 2, 7, 11)
    everything = torch.cat([x, context], dim=1)
    hidden = torch.arange(18).expand(2, -1) >= 7
    torch.testing.assert_close(layer(x, context=context), layer(everything, context=everything, mask=hidden)[:, :7])


def test_a_context_of_the_same_tokens_hides_keys_but_keeps_queries():
    layer, x = pola(), tokens()
    mask = torch.rand(2, 20) > 0.3
    as_tokens, as_keys = layer(x, grid=GRID, mask=mask), layer(x, grid=GRID, mask=mask, context=x)
    torch.testing.assert_close(as_tokens[mask], as_keys[mask])
    assert not torch.allclose(as_tokens[~mask], as_keys[~mask])


def test_the_convolution_needs_a_context_as_long_as_x():
    layer, x = pola(), tokens(20)
    silent = pola(conv=None)
    silent.load_state_dict({k: v for k, v in layer.state_dict().items() if not k.startswith("conv.")})
    shorter, equal = tokens(9), tokens(20)
    torch.testing.assert_close(layer(x, grid=GRID, context=shorter), silent(x, grid=GRID, context=shorter))
    assert not torch.allclose(layer(x, grid=GRID, context=equal), silent(x, grid=GRID, context=equal))
    torch.testing.assert_close(layer(x, grid=GRID, context=x.clone()), layer(x, grid=GRID))


def test_a_table_belongs_to_the_context_of_its_size():
    layer, plain = pola(conv=None, key_positions=GRID), pola(conv=None)
    state = layer.state_dict()
    rows = state.pop("key_positions.rows")
    plain.load_state_dict(state)
    x, context = tokens(7), tokens(20)
    with_table = layer(x, context=context)
    assert not torch.allclose(with_table, plain(x, context=context))
    maps = layer.maps(x, context=context)["same"]
    core = plain.core
    q, k = plain.qkv(x)[..., :12], plain.qkv(context)[..., 12:24] + rows
    heads = [t.unflatten(-1, (2, 6)).transpose(1, 2) for t in (q, k)]
    torch.testing.assert_close(maps, core.weights(*heads)["same"])


def test_a_table_for_sequences_follows_the_length_of_the_context():
    layer = pola(conv=None, key_positions=20)
    x, context = tokens(6), tokens(31)
    assert layer(x, grid=(2, 3), context=context).shape == (2, 6, 12)
    before = layer.maps(x, context=context)["same"]
    layer.key_positions.rows.data[-1] += 5.0
    changed = (layer.maps(x, context=context)["same"] - before).abs().amax(dim=(0, 1, 2))
    assert changed[-1] > 1e-3


def test_a_class_token_alone_can_ask_all_tokens():
    layer, x = pola(num_prefix_tokens=1, key_positions=20), tokens(21)
    assert layer(x[:, :1], context=x).shape == (2, 1, 12)
    assert layer(x[:, :1]).shape == (2, 1, 12)
    assert pola()(tokens(0)).shape == (2, 0, 12)


def test_a_mask_belongs_to_the_context():
    layer, x, context = pola(conv=None), tokens(7), tokens(11)
    mask = torch.arange(11).expand(2, -1) < 6
    torch.testing.assert_close(layer(x, context=context, mask=mask), layer(x, context=context[:, :6]))


MIXING = [name for name in attention.names() if attention.facts(name).cross and attention.facts(name).mixes_queries]
FEW = {"nystrom": {"num_landmarks": 4}, "skyformer": {"num_landmarks": 6}}


def rival(name, **options):
    return randomise(attention.create_layer(name, 12, 2, **options)).double()


def seeded(function, *arguments, **options):
    torch.manual_seed(7)
    return function(*arguments, **options)


def test_what_mixes_queries_is_known():
    assert MIXING == ["informer", "nystrom", "skyformer"]


@pytest.mark.parametrize("name", MIXING)
def test_the_mask_of_a_context_as_long_as_x_is_not_that_of_x(name):
    layer, x, context = rival(name, **FEW.get(name, {})), tokens(), tokens()
    mask = (torch.arange(20) < 11).expand(2, -1)
    out = seeded(layer, x, context=context, mask=mask)
    for changed in (2, 15):  # the position of an unmasked key, and of a masked one
        other = x.clone()
        other[:, changed] += 1.0
        assert not torch.isclose(seeded(layer, other, context=context, mask=mask)[:, changed], out[:, changed]).any()
    maps = seeded(layer.maps, x, context=context, mask=mask)[name]
    v = layer.qkv(context)[..., 24:].masked_fill(~mask[..., None], 0.0).unflatten(-1, (2, 6)).transpose(1, 2)
    torch.testing.assert_close(layer.proj((maps @ v).transpose(1, 2).flatten(2)), out)
    if name != "informer":  # whose number of draws depends on all keys, masked ones too
        torch.testing.assert_close(out, seeded(layer, x, context=context[:, :11]))


@pytest.mark.parametrize("name", MIXING)
def test_tokens_hidden_as_keys_only_are_still_queries(name):
    layer, x = rival(name, **FEW.get(name, {})), tokens()
    mask = torch.rand(2, 20) > 0.3
    as_keys = seeded(layer, x, mask=mask, context=x)
    assert torch.equal(as_keys, seeded(layer, x, mask=mask, context=x.clone()))
    hidden = x + (~mask)[..., None]
    assert not torch.isclose(seeded(layer, hidden, mask=mask, context=hidden), as_keys)[~mask].any()
    as_tokens = seeded(layer, x, mask=mask)
    torch.testing.assert_close(seeded(layer, hidden, mask=mask)[mask], as_tokens[mask])


@pytest.mark.parametrize("name", [name for name in attention.names() if not attention.facts(name).cross])
def test_a_context_is_refused_by_what_relates_the_tokens_of_one_sequence(name):
    layer, x = rival(name), tokens()
    for context in (x, tokens(), tokens(7)):
        with pytest.raises(ValueError, match=f"'{name}': got cross=True, or its layer a context"):
            layer(x, context=context)
        with pytest.raises(ValueError, match=f"'{name}': got cross=True, or its layer a context"):
            layer.maps(x, context=context)


class MeanCore(torch.nn.Module):
    """A third-party core without the argument `cross`."""

    num_heads, head_dim, facts = 2, 6, attention.facts("softmax")

    def forward(self, q, k, v, *, mask=None, bias=None, grid=None):
        return v.mean(dim=2, keepdim=True).expand_as(q)

    def weights(self, q, k, *, mask=None, bias=None, grid=None):
        return {"mean": torch.full((*q.shape[:3], k.shape[2]), 1 / k.shape[2])}


class CoreWithoutFacts(MeanCore):
    facts = None


def test_a_core_without_facts_is_refused():
    with pytest.raises(TypeError, match=r"core CoreWithoutFacts does not declare its facts; give its class"):
        AttentionLayer(12, 2, CoreWithoutFacts())


def test_a_core_that_knows_no_cross_serves_without_a_context():
    layer, x = randomise(AttentionLayer(12, 2, MeanCore())).double(), tokens()
    assert layer(x).shape == x.shape
    assert layer.maps(x)["mean"].shape == (2, 2, 20, 20)
