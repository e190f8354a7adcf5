"""The model of the Long Range Arena: its sizes, its masks, and that padding can be cut off."""

import pytest
import torch
from torch import Tensor

from polaformer.attention import names, option_names
from polaformer.data.sources.lra.datasets import DATASETS
from polaformer.tasks.sequence.description import describe
from polaformer.tasks.sequence.model import SequenceModel
from polaformer.tasks.sequence.recipe import SequenceRecipe
from polaformer.tasks.sequence.rows import ARENA_ROWS, RIVALS

LENGTH = 512
LENGTHS = (300, 141)


def small(attention: str, **options) -> SequenceModel:
    torch.manual_seed(0)
    given = {"vocabulary": 40, "length": LENGTH, "num_classes": 3, "dim": 16, "mlp_dim": 8, "dropout": 0.0} | options
    return SequenceModel(attention=attention, **given).double().eval()


def documents(length: int = LENGTH) -> Tensor:
    """Two padded documents, (2, 1, length)."""
    ids = torch.randint(1, 40, (2, 1, LENGTH), generator=torch.Generator().manual_seed(1))
    for row, end in zip(ids, LENGTHS, strict=True):
        row[:, end:] = 0
    return ids[..., :length]


# ---- sizes (lra.md 1.1 and 6.3) ----

PARAMETERS = {
    "listops": (209_802, 218_762),
    "text": (370_562, 379_522),
    "retrieval": (395_138, 404_098),
    "pathfinder": (173_954, 182_914),
    "image": (158_602, 167_562),
}


@pytest.mark.parametrize("dataset", DATASETS)
def test_parameters_are_those_of_the_published_models(dataset):
    for attention, wanted in zip(("softmax", "pola"), PARAMETERS[dataset], strict=True):
        with torch.device("meta"):
            model = describe(SequenceRecipe(dataset=dataset, attention=attention)).build()
        assert sum(parameter.numel() for parameter in model.parameters()) == wanted


def test_a_convolution_on_the_grid_has_25_weights_per_channel():
    with torch.device("meta"):
        model = describe(SequenceRecipe(dataset="image", convolution="grid", trim=False)).build()
    assert sum(parameter.numel() for parameter in model.parameters()) == 158_602 + 10_240


def test_the_names_of_the_table_are_those_of_the_registry():
    assert sorted({one.attention for one in ARENA_ROWS.values()}) == names()
    assert len(RIVALS) == len(set(RIVALS)) == len(names()) - 1


@torch.no_grad()
def test_linears_start_as_pytorchs_do_and_tables_small():
    model = SequenceModel(vocabulary=512, length=4096, num_classes=2)
    assert model.embedding.weight.std() == pytest.approx(0.02, rel=0.05)
    assert model.positions.weight.std() == pytest.approx(0.02, rel=0.05)
    attention = model.layers[0].attention
    for weight in (attention.qkv.weight, attention.proj.weight, attention.gate.weight):
        assert weight.abs().max() <= 64**-0.5
        assert weight.std() == pytest.approx(64**-0.5 / 3**0.5, rel=0.05)
    assert attention.qkv.bias.abs().max() > 0


# ---- masks and trimming (lra.md 10) ----


@pytest.mark.parametrize("attention", names())
@torch.no_grad()
def test_trimming_changes_nothing_where_the_facts_say_so(attention):
    model = small(attention)
    trims = model.layers[0].attention.core.facts.trims
    torch.manual_seed(2)
    whole = model(documents())
    torch.manual_seed(2)
    trimmed = model(documents(max(LENGTHS)))
    assert torch.allclose(whole, trimmed, rtol=0, atol=1e-12) == trims


@pytest.mark.parametrize("attention", [name for name in names() if "as_published" in option_names(name)])
@torch.no_grad()
def test_what_is_published_with_another_mask_does_not_claim_to_trim(attention):
    model = small(attention, attention_options={"as_published": True}, length=LENGTH)
    torch.manual_seed(2)
    whole = model(documents())
    torch.manual_seed(2)
    trimmed = model(documents(384))
    same = torch.allclose(whole, trimmed, rtol=0, atol=1e-12)
    assert same or not model.layers[0].attention.core.facts.trims


@pytest.mark.parametrize(("attention", "options"), [*((name, {}) for name in names()), ("pola", {"grid": (16, 32)})])
@torch.no_grad()
def test_content_under_the_mask_changes_nothing_between_tokens_either(attention, options):
    """Black pixels lie between others: neither the embedding of id 0 nor the positions of such tokens have an effect."""
    model, ids = small(attention, **options), documents()
    ids[..., ::3] = 0
    ids[0, 0, 60:200] = 0
    torch.manual_seed(2)
    before = model(ids)
    model.embedding.weight[0] = 100.0
    model.positions.weight[::3] -= 50.0
    torch.manual_seed(2)
    assert torch.allclose(model(ids), before, rtol=0, atol=1e-12)
    ids[0, 0, 1] = 0
    assert not torch.allclose(model(ids), before, rtol=0, atol=1e-12)


def test_trimming_changes_no_gradient():
    model = small("pola")
    found = []
    for length in (LENGTH, max(LENGTHS)):
        model.zero_grad()
        model(documents(length)).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for whole, trimmed in zip(*found, strict=True):
        assert torch.allclose(whole, trimmed, rtol=0, atol=1e-12)


def test_a_sequence_alone_and_in_a_batch_is_the_same():
    model, ids = small("pola"), documents()
    with torch.no_grad():
        assert torch.allclose(model(ids)[1:], model(ids[1:, :, : LENGTHS[1]]), rtol=0, atol=1e-12)


@torch.no_grad()
def test_pooling_divides_by_the_padded_or_the_valid_length():
    ids = documents()
    padded, valid = small("pola").encode(ids[:, 0]), small("pola", pooling="valid").encode(ids[:, 0])
    for row, end in enumerate(LENGTHS):
        assert torch.allclose(padded[row] * LENGTH, valid[row] * end)


@torch.no_grad()
def test_a_document_without_tokens_gives_numbers_and_no_features():
    for pooling in ("padded", "valid"):
        model = small("pola", pooling=pooling)
        assert not model.encode(torch.zeros(1, 7, dtype=torch.int64)).any()
        assert model(torch.zeros(1, 1, 7, dtype=torch.int64)).isfinite().all()


@torch.no_grad()
def test_two_documents_are_compared_by_four_features():
    model, ids = small("pola", num_documents=2), documents().expand(2, 2, LENGTH).clone()
    ids[:, 1] = ids[:, 0].flip(0)
    first, second = model.encode(ids[:, 0]), model.encode(ids[:, 1])
    features = torch.cat([first, second, first * second, first - second], dim=-1)
    assert torch.allclose(model(ids), model.head(features))


def test_gradient_checkpointing_changes_no_gradient():
    found = []
    for enabled in (False, True):
        model = small("pola").train()
        model.set_grad_checkpointing(enabled)
        model(documents()).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*found, strict=True):
        assert torch.equal(plain, recomputed)


@torch.no_grad()
def test_layers_of_a_seeded_mechanism_have_different_seeds():
    model = small("bigbird")
    assert [layer.attention.core.seed for layer in model.layers] == [0, 1]


def test_options_reach_the_layers():
    model = small("softmax", attention_options={"gate": "linear", "conv": "depthwise"})
    layer = model.layers[0].attention
    assert layer.gate is not None
    assert layer.conv.weight.shape == (8, 1, 1, 5)
    without = small("pola", attention_options={"conv": None, "alpha": 7})
    assert without.layers[0].attention.conv is None
    assert without.layers[0].attention.core.alpha == 7


POINTS = {
    "conv=None": ({"conv": None}, 2 * -192),
    "a filter per channel": ({"conv": "channelwise"}, 2 * 192),
    "kernel of 7": ({"kernel_size": 7}, 2 * 64),
    "no scale": ({"learn_scale": False}, 2 * -64),
    "one exponent per channel": ({"shared_power": True}, 2 * -32),
    "gate and bias of zeros": ({"gate_init": "zeros", "gate_bias_init": "zeros"}, 0),
    "key positions": ({"key_positions": 4096}, 524_288),
    "matrix gate": ({"gate": "matrix", "key_positions": 4096}, 2 * (2 * 262_144 - 4160)),
}


@pytest.mark.parametrize("point", POINTS)
def test_every_open_point_is_an_option(point):
    """lra.md 6.3."""
    options, more = POINTS[point]
    with torch.device("meta"):
        model = SequenceModel(vocabulary=512, length=4096, num_classes=2, attention_options={"alpha": 3, **options})
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS["text"][1] + more
    assert model.trims == ("key_positions" not in options)
    small("pola", attention_options=options | ({"key_positions": LENGTH} if "key_positions" in options else {}))(documents())
