"""The memory that training a segmenter needs, before it is trained."""

import pytest
import torch

from polaformer.errors import SettingsError
from polaformer.tasks.dense.memory_limit import GB, check_fits
from polaformer.tasks.segmentation.segmenter import training_losses
from polaformer.training.memory_estimate import estimate_memory
from polaformer.training.settings import Settings
from segmenters import SEGMENTERS, describe


def builder(*kind, **options):
    def build(native):
        description = describe(*kind, auxiliary=True)
        given = description.backbone_options | options | ({} if native is None else {"img_size": native})
        return describe(*kind, auxiliary=True, backbone_options=given).build()

    return build


@pytest.mark.parametrize("segmenter", SEGMENTERS)
@pytest.mark.parametrize("backbone", ["pola_pvt_tiny", "softmax_swin_tiny"])
@pytest.mark.parametrize("size", [(64, 64), (70, 130)], ids=str)
def test_the_estimate_is_what_autograd_saves_in_training(segmenter, backbone, size):
    """Up to 2 % more: on the meta device pola's operator does not have the kernel that saves less."""
    build = builder(segmenter, backbone)
    found = check_fits(build, size, 2, Settings(), forward=training_losses)
    labels = torch.zeros(2, *size, dtype=torch.uint8)
    saved = estimate_memory(build(None), lambda model: model.losses(torch.randn(2, 3, *size), None, labels), Settings())
    assert found.weights == saved.weights
    assert saved.activations <= found.activations <= 1.02 * saved.activations


def test_logits_of_all_pixels_and_classes_count():
    """The log-probabilities of both heads are saved, in float32."""
    build = builder("semantic-fpn")
    backbone = check_fits(build, (512, 512), 2, Settings(), forward=lambda model, images: model.features(images))
    whole = check_fits(build, (512, 512), 2, Settings(), forward=training_losses)
    assert whole.activations - backbone.activations > 2 * 2 * 5 * 512 * 512 * 4  # two heads, two images, five classes


@pytest.mark.parametrize("segmenter", SEGMENTERS)
def test_too_large_crops_are_refused(segmenter):
    with pytest.raises(SettingsError, match=r"8 images of 512×512 pixels: training needs at least .*cpu has 0\.1 GB"):
        check_fits(builder(segmenter), (512, 512), 8, Settings(), forward=training_losses, limit=int(0.1 * GB))


def test_mechanisms_with_parameters_per_token_are_refused_for_larger_crops():
    with pytest.raises(SettingsError, match="linformer has parameters per token"):
        check_fits(builder("upernet", attention="linformer"), (128, 128), 2, Settings(), forward=training_losses)
