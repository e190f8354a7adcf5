"""Features of pyramid backbones for dense tasks."""

import pytest
import torch

from models import SMALL, randomise
from polaformer.errors import SettingsError
from polaformer.tasks.dense.features import Features, strides_of

PYRAMIDS = [name for name in SMALL if "deit" not in name]


def small_features(name, **options):
    torch.manual_seed(0)
    return randomise(Features(name, img_size=64, drop_path_rate=0.0, **SMALL[name], **options)).eval()


@pytest.mark.parametrize("name", PYRAMIDS)
def test_an_image_alone_and_in_a_padded_batch_gives_the_same_features(name):
    features = small_features(name).double()
    sizes = [(41, 70), (64, 96), (23, 80)]
    batch, mask = torch.full((3, 3, 64, 96), torch.nan, dtype=torch.float64), torch.zeros(3, 64, 96, dtype=torch.bool)
    alone = [torch.randn(1, 3, *size, dtype=torch.float64) for size in sizes]
    for index, image in enumerate(alone):
        height, width = image.shape[2:]
        batch[index, :, :height, :width], mask[index, :height, :width] = image[0], True
    together = features(batch, mask)
    assert [tuple(one.shape) for one in together] == [
        (3, dim, 64 // s, 96 // s) for dim, s in zip((8, 12, 16, 20), (4, 8, 16, 32), strict=True)
    ]
    for index, image in enumerate(alone):
        for found, own in zip(together, features(image), strict=True):
            height, width = own.shape[2:]
            assert torch.allclose(found[index, :, :height, :width], own[0], rtol=1e-9, atol=1e-9)
            outside = found[index].clone()
            outside[:, :height, :width] = 0.0
            assert not outside.any()


@pytest.mark.parametrize(("name", "has_norms"), [("pola_pvt_tiny", False), ("pola_pvt_v2_b0", False), ("pola_swin_tiny", True)])
def test_feature_norms_are_those_of_the_published_code_for_dense_tasks(name, has_norms):
    names = [parameter for parameter, _ in small_features(name).named_parameters()]
    assert any("feature_norms" in one for one in names) == has_norms
    assert any("feature_norms" in one for one in [p for p, _ in small_features(name, feature_norms=True).named_parameters()])


@pytest.mark.parametrize("name", PYRAMIDS)
@pytest.mark.parametrize("first_stage", [0, 1])
def test_every_parameter_gets_a_gradient(name, first_stage):
    features = small_features(name, first_stage=first_stage).train()
    assert (features.channels, features.strides) == ([8, 12, 16, 20][first_stage:], [4, 8, 16, 32][first_stage:])
    sum(one.square().sum() for one in features(torch.randn(1, 3, 64, 64))).backward()
    assert [name for name, parameter in features.named_parameters() if parameter.grad is None] == []


def test_a_mask_without_padding_costs_nothing(monkeypatch):
    features, seen = small_features("pola_swin_tiny"), []
    monkeypatch.setattr(features.backbone, "forward_intermediates", lambda *a, mask, **k: seen.append(mask) or [])
    features(torch.zeros(1, 3, 32, 32), torch.ones(1, 32, 32, dtype=torch.bool))
    assert seen == [None]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pola_deit_tiny", {}, "single stride; choose a pyramid"),
        ("pola_pvt_tinny", {}, "did you mean 'pola_pvt_tiny'"),
        ("pola_pvt_tiny", {"depth": 2}, "unexpected keyword argument 'depth'"),
        ("pola_pvt_tiny", {"attention": "polar"}, "unknown mechanism 'polar'"),
        ("pola_pvt_tiny", {"dims": (8, 8, 8, -8)}, "positive integers"),
    ],
)
def test_other_backbones_are_refused(name, options, message):
    with pytest.raises(SettingsError, match=message):
        strides_of(name, options)
