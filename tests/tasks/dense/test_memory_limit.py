"""Which mechanisms can be trained at which image size."""

import re

import pytest
import torch

from models import SMALL
from polaformer import attention
from polaformer.errors import SettingsError
from polaformer.tasks.dense.features import Features
from polaformer.tasks.dense.memory_limit import GB, check_fits, device_memory
from polaformer.training.memory_estimate import estimate_memory
from polaformer.training.settings import Settings


def builder(name="pola_pvt_tiny", mechanism="pola", **changes):
    return lambda size: Features(name, attention=mechanism, img_size=size or 64, **(SMALL[name] | changes))


QUICK = ("pola", "linformer", "synthesizer")
MECHANISMS = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in attention.names()]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_is_estimated_or_refused_for_its_fixed_length(mechanism):
    if attention.facts(mechanism).needs_length:
        with pytest.raises(
            SettingsError, match=rf"{mechanism} has parameters per token.*1024 tokens.*at most 256.*would need \d+\.\d GB"
        ):
            check_fits(builder(mechanism=mechanism), (128, 128), 1, Settings())
    assert check_fits(builder(mechanism=mechanism), (64, 64), 1, Settings()).activations > 0


def test_maps_of_all_pairs_of_tokens_are_refused_with_an_estimate_and_the_limit():
    """Without key reduction, at a size of detection: 66 800² numbers per head, block and image."""
    message = r"2 images of 800×1336 pixels: training needs at least (\d+)\.\d GB.*cpu has 16\.0 GB"
    with pytest.raises(SettingsError, match=message) as error:
        check_fits(builder(mechanism="kernelized", reductions=1), (800, 1336), 2, Settings(), limit=int(16 * GB))
    assert int(re.match(message, str(error.value))[1]) > 2 * 66_800**2 * 4 / GB
    assert check_fits(builder(), (800, 1336), 2, Settings(), limit=int(16 * GB)).total < 2 * GB


def test_softmax_stores_no_maps_unless_a_bias_is_learned():
    found = check_fits(builder("softmax_pvt_tiny", "softmax", reductions=1), (512, 512), 1, Settings())
    assert found.activations < 128**4 * 4  # one map of 128² tokens
    windows = check_fits(builder("softmax_swin_tiny", "softmax", windows=16), (64, 64), 1, Settings())
    assert windows.activations > 2 * 256 * 256 * 4


def test_the_estimate_is_that_of_training_and_knows_its_settings():
    build = builder()
    found = check_fits(build, (64, 64), 2, Settings(precision="fp32"))
    with torch.device("meta"):
        model, images = build(None), torch.zeros(2, 3, 64, 64)
    assert found == estimate_memory(model, lambda one: one(images), Settings())
    assert check_fits(build, (64, 64), 2, Settings(precision="bf16")).activations == found.activations // 2
    assert check_fits(build, (64, 64), 2, Settings(grad_checkpointing=True)).activations < found.activations


def test_the_part_to_estimate_can_be_chosen():
    seen = []
    check_fits(builder(), (64, 64), 3, Settings(), forward=lambda model, images: seen.append(images.shape) or model(images))
    assert seen == [(3, 3, 64, 64)]


def test_the_limit_is_the_memory_of_the_device():
    assert device_memory() > GB
    with pytest.raises(SettingsError, match=f"has {device_memory() / GB:.1f} GB"):
        check_fits(builder(mechanism="kernelized", reductions=1), (1600, 1600), 16, Settings())
