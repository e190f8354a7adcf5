"""Our backbones in segmentation_models_pytorch, through timm (make test-smp)."""

import os
from importlib.util import find_spec

import pytest
import torch

import polaformer.backbones  # registers the models in timm
from models import SMALL, images, randomise, small

# make test-smp sets SMP, so that there a missing library is an error.
if find_spec("segmentation_models_pytorch") is None and "SMP" not in os.environ:
    pytest.skip("segmentation_models_pytorch is not installed; make test-smp installs it", allow_module_level=True)

import segmentation_models_pytorch as smp

pytestmark = pytest.mark.smp
PYRAMIDS = [name for name in SMALL if "deit" not in name]


def options(name):
    return {"img_size": 64, "drop_path_rate": 0.0} | SMALL[name]


@pytest.mark.parametrize("name", PYRAMIDS)
@pytest.mark.parametrize("architecture", ["UPerNet", "FPN", "Unet", "Segformer"])
def test_a_backbone_trains_in_smp(architecture, name):
    model = getattr(smp, architecture)(f"tu-{name}", encoder_weights=None, classes=5, **options(name)).train()
    logits = model(images(2, 64, 96))
    assert logits.shape == (2, 5, 64, 96)
    logits.square().mean().backward()
    assert [parameter for parameter, one in model.named_parameters() if one.grad is None or not one.grad.isfinite().all()] == []


@pytest.mark.parametrize("name", PYRAMIDS)
@torch.no_grad()
def test_smps_encoder_gives_our_features_with_our_weights(name, tmp_path):
    """Bit for bit, at another size than the native one."""
    ours, file = small(name), tmp_path / "weights.safetensors"
    polaformer.save_checkpoint(ours, file)
    overlay = {"file": str(file)}
    model = smp.FPN(f"tu-{name}", encoder_weights=True, classes=5, pretrained_cfg_overlay=overlay, **options(name)).eval()
    given = images(1, 96, 64)
    expected = ours.forward_intermediates(given, intermediates_only=True)
    found = model.encoder(given)
    assert len(found) == 6  # the image, an empty map with stride 2, four stages
    assert all(torch.equal(*pair) for pair in zip(found[2:], expected, strict=True))


def test_the_published_size_builds_by_name_alone():
    model = smp.UPerNet("tu-pola_pvt_tiny", encoder_weights=None, classes=150).eval()
    with torch.no_grad():
        assert randomise(model)(images(1, 64, 64)).shape == (1, 150, 64, 64)


def test_deit_has_no_pyramid():
    with pytest.raises(ValueError, match="Unsupported model downsampling pattern"):
        smp.FPN("tu-pola_deit_tiny", encoder_weights=None, classes=5)
