"""The authors' steps on our parameters: the same numbers, the same parameters, more copies."""

from dataclasses import replace

import pytest
import torch

from models import images, small
from polaformer import PolaAttention
from polaformer.attention.layer.published_layer import PublishedLayer, as_published
from polaformer.attention.layer.window_attention import WindowAttention
from polaformer.attention.mechanisms.softmax import SoftmaxCore

SETTINGS = {
    "pola_swin_tiny": {},
    "pola_pvt_tiny": {"reductions": (4, 2, 1, 1)},
    "pola_pvt_v2_b0": {},
    "pola_deit_tiny": {"reductions": 2},  # with a class token
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_published_form_computes_what_the_model_computes(name: str) -> None:
    model = small(name, **SETTINGS[name]).double()
    published = as_published(model)
    x = images(dtype=torch.float64)
    expected, found = model(x), published(x)
    assert (found - expected).norm() < 1e-9 * expected.norm()
    for one in (expected, found):
        one.square().sum().backward()
    pairs = zip(model.named_parameters(), published.parameters(), strict=True)
    for (where, mine), theirs in pairs:
        assert (mine.grad is None) == (theirs.grad is None), where
        if mine.grad is not None:
            assert (theirs.grad - mine.grad).norm() <= 1e-9 * mine.grad.norm(), where


@pytest.mark.parametrize("name", SETTINGS)
def test_the_published_form_has_the_same_parameters_and_is_a_copy(name: str) -> None:
    model = small(name, **SETTINGS[name])
    published = as_published(model)
    ours, theirs = model.state_dict(), published.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) and ours[key] is not theirs[key] for key in ours)
    assert any(isinstance(module, PublishedLayer) for module in published.modules())
    assert not any(isinstance(module, PolaAttention) for module in published.modules())
    assert not any(isinstance(module, PublishedLayer) for module in model.modules())


def test_other_image_sizes_resize_the_tables_alike() -> None:
    model = small("pola_pvt_tiny").double()
    x = images(height=96, width=64, dtype=torch.float64)
    expected = model(x)
    assert (as_published(model)(x) - expected).norm() < 1e-9 * expected.norm()


@pytest.mark.parametrize("options", [{"polarity": "same"}, {"gate": "matrix"}, {"conv": "deformable"}])
def test_a_layer_that_was_never_published_is_refused(options: dict[str, str]) -> None:
    model = small("pola_deit_tiny", attention_options=options)
    with pytest.raises(ValueError, match="which the authors' code does not have"):
        as_published(model)


def test_windows_of_another_core_were_never_published() -> None:
    class OtherCore(SoftmaxCore):
        facts = replace(SoftmaxCore.facts, in_windows=False)

    layer = WindowAttention(16, 2, 4, core=OtherCore(2, 8))
    with pytest.raises(ValueError, match="windows of OtherCore are not published; use softmax"):
        as_published(torch.nn.Sequential(layer))


def test_a_mask_is_refused() -> None:
    model = as_published(small("pola_deit_tiny"))
    with pytest.raises(ValueError, match="takes no mask"):
        model(images(), torch.ones(2, 64, 64, dtype=torch.bool))
