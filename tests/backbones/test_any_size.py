"""Images of any size, and batches of images of different sizes: padding has no effect."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.parameter import Parameter

from models import SMALL, images, small
from polaformer.attention import WindowAttention
from polaformer.attention.layer.token_table import TokenTable

FAMILIES = ["pola_deit_tiny", "pola_pvt_tiny", "pola_pvt_v2_b0", "pola_swin_tiny"]


@pytest.mark.parametrize("name", SMALL)
def test_at_the_native_size_nothing_is_resized_padded_or_masked(name, monkeypatch):
    model, x = small(name), images()
    expected = model(x)

    def refuse(*arguments, **options):
        raise AssertionError("something was resized")

    monkeypatch.setattr(F, "interpolate", refuse)
    windows = [module for module in model.modules() if isinstance(module, WindowAttention)]
    seen = []
    for module in windows:
        cut = module._windows
        monkeypatch.setattr(module, "_windows", lambda *a, cut=cut: seen.append(cut(*a)[1]) or cut(*a))
    assert torch.equal(model(x), expected)
    if windows:
        # 16, 8, 4 and 2 tokens a side in windows of 3 (2 in the last stage): all but the last are padded, and so masked.
        assert [exists is None for exists in seen] == [module.window == 2 for module in windows]


@pytest.mark.parametrize("name", FAMILIES)
def test_set_input_size_equals_resizing_at_run_time(name, monkeypatch):
    model, x = small(name).double(), images(1, 88, 104, dtype=torch.float64)
    expected = model(x)
    native = model(images(1, dtype=torch.float64)).shape
    model.set_input_size((88, 104))
    assert model.img_size == (88, 104)
    assert torch.allclose(model(x), expected, rtol=1e-12, atol=1e-12)
    assert model(images(1, dtype=torch.float64)).shape == native
    tables = [module for module in model.modules() if isinstance(module, TokenTable)]
    assert all(isinstance(table.rows, Parameter) and table.rows.requires_grad for table in tables)
    # Nothing is left to resize at that size.
    monkeypatch.setattr(F, "interpolate", lambda *_, **__: pytest.fail("something was resized"))
    assert torch.allclose(model(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in SMALL),
        ("pola_swin_tiny", {"attention": "LLLL"}),
        ("pola_pvt_tiny", {"reductions": 2}),
        ("pola_pvt_v2_b0", {"reductions": (4, 2, 2, 1)}),
        ("pola_deit_tiny", {"reductions": 2}),
        ("pola_deit_tiny", {"class_token": False}),
        ("pola_deit_tiny", {"attention_options": {"gate": "matrix", "conv": "deformable"}}),
    ],
    ids=str,
)
def test_padding_law_an_image_alone_and_in_a_padded_batch_gives_the_same_features(name, options):
    """Also with NaN in the padding, for features, logits and the gradient of the image; in softmax windows too."""
    model = small(name, **options).double()
    sizes, largest = [(41, 70), (64, 37), (23, 80)], (64, 80)
    batch, mask = torch.full((3, 3, *largest), torch.nan, dtype=torch.float64), torch.zeros(3, *largest, dtype=torch.bool)
    alone = [images(1, *size, dtype=torch.float64).requires_grad_() for size in sizes]
    for index, image in enumerate(alone):
        height, width = image.shape[2:]
        batch[index, :, :height, :width], mask[index, :height, :width] = image[0].detach(), True
    batch.requires_grad_()
    logits, features = model(batch, mask), model.forward_intermediates(batch, mask=mask, intermediates_only=True)
    logits.square().sum().backward()
    for index, image in enumerate(alone):
        own_logits = model(image)
        assert torch.allclose(logits[index], own_logits[0], rtol=1e-9, atol=1e-9)
        for feature, own in zip(features, model.forward_intermediates(image, intermediates_only=True), strict=True):
            height, width = own.shape[2:]
            assert torch.allclose(feature[index, :, :height, :width], own[0], rtol=1e-9, atol=1e-9)
            rest = feature[index].detach().clone()
            rest[:, :height, :width] = 0
            assert not rest.any()
        own_logits.square().sum().backward()
        height, width = image.shape[2:]
        assert torch.allclose(batch.grad[index, :, :height, :width], image.grad[0], rtol=1e-7, atol=1e-7)
        outside = batch.grad[index].masked_fill(mask[index], 0.0)
        assert not outside.any()


@pytest.mark.parametrize("name", SMALL)
def test_content_outside_the_mask_influences_nothing(name):
    model, x, mask = small(name), images(2, 50, 70), torch.zeros(2, 50, 70, dtype=torch.bool)
    mask[0, :50, :33], mask[1, :21, :70] = True, True
    expected = model(x, mask)
    other = torch.where(mask[:, None], x, torch.nan)
    assert torch.equal(model(other, mask), expected)
    assert expected.isfinite().all()


def test_a_padded_image_that_fits_into_one_window_is_not_shifted_either():
    """Beside a larger one in the batch, of which the windows are shifted."""
    model = small("softmax_swin_tiny", windows=4).double()
    x, mask = images(2, 64, 64, dtype=torch.float64), torch.ones(2, 64, 64, dtype=torch.bool)
    mask[1, 16:], mask[1, :, 16:] = False, False
    assert torch.allclose(model(x, mask)[1], model(x[1:, :, :16, :16])[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SMALL)
def test_a_mask_of_everything_changes_nothing(name):
    model, x = small(name).double(), images(2, 50, 70, dtype=torch.float64)
    everything = torch.ones(2, 50, 70, dtype=torch.bool)
    assert torch.allclose(model(x, everything), model(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SMALL)
def test_a_batch_of_none_gives_none(name):
    assert small(name)(images(0)).shape == (0, 5)
    assert small(name)(images(0), torch.ones(0, 64, 64, dtype=torch.bool)).shape == (0, 5)


@pytest.mark.parametrize("name", ["pola_swin_tiny", "pola_deit_tiny"])
def test_masked_pooling_does_not_leave_half_precision(name):
    model = small(name, global_pool="avg")
    mask = torch.ones(1, 1200, 1200, dtype=torch.bool)
    features = torch.full((1, 20, 38, 38), 60.0) if "swin" in name else torch.full((1, 1 + 150 * 150, 16), 60.0)
    pooled = model.forward_head(features.half(), pre_logits=True, mask=mask)
    assert torch.allclose(pooled.float(), torch.full_like(pooled, 60.0).float())


def test_pvts_positions_are_resized_bilinearly_and_key_tables_bicubically():
    model = small("pola_pvt_tiny")
    stage = model.stages[0]
    for table, mode in ((stage.pos_embed, "bilinear"), (stage.blocks[0].attn.key_positions, "bicubic")):
        image = table.rows.T.unflatten(1, (16, 16))[None]
        expected = F.interpolate(image, size=(20, 13), mode=mode)[0].flatten(1).T
        assert torch.equal(table((20, 13)), expected)
