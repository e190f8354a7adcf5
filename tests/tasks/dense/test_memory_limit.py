"""Which mechanisms can be trained at which image size."""

import re

import pytest
import torch

from models import SMALL
from polaformer import attention
from polaformer.errors import SettingsError
from polaformer.tasks.dense.features import Features
from polaformer.tasks.dense.memory_limit import GB, check_fits, check_inference, check_length, device_memory
from polaformer.training.memory_estimate import estimate_inference, estimate_memory
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


@pytest.mark.parametrize(
    ("name", "mechanism", "advised"),
    [
        ("pola_pvt_tiny", "pola", False),
        ("softmax_swin_tiny", "softmax", False),
        ("pola_pvt_tiny", "pola,pola,kernelized,pola", True),
    ],
)
def test_attention_with_linear_memory_is_advised_to_those_that_do_not_have_it(name, mechanism, advised):
    with pytest.raises(SettingsError) as error:
        check_fits(builder(name, mechanism), (64, 64), 2, Settings(), limit=1)
    assert ("attention with linear memory" in str(error.value)) == advised


@pytest.mark.parametrize("name", ["pola_pvt_tiny", "softmax_swin_tiny"])
def test_the_estimate_of_inference_is_what_is_alive_at_the_same_time(name):
    """About: pola's kernel has other temporary results than the operations that stand for it on the meta device."""
    build, size = builder(name, name.partition("_")[0]), (96, 160)
    found = check_inference(build, size, 2, advice="")
    images = torch.randn(2, 3, *size)
    real = estimate_inference(build(None), lambda model: model(images)) + images.nbytes
    assert 0.8 * real < found < 1.2 * real
    maps = sum(one.nbytes for one in build(None)(images))
    assert maps + images.nbytes < found
    assert check_inference(build, size, 2, advice="", precision="bf16") < found
    assert found < check_fits(build, size, 2, Settings()).total


@pytest.mark.parametrize("size", [(64, 64), (20_000, 33_000), (10**9, 10**9)], ids=str)
def test_inference_on_too_large_images_is_refused_at_once(size):
    limit = 1000 if size == (64, 64) else int(16 * GB)
    message = rf"evaluation on 3 images of {size[0]}×{size[1]} pixels needs at least \d+\.\d GB, but cpu has .* GB; shrink it"
    with pytest.raises(SettingsError, match=message):
        check_inference(builder(), size, 3, advice="shrink it", limit=limit)


def test_inference_on_more_tokens_than_there_are_parameters_is_refused():
    check_length(builder(mechanism="linformer"), (64, 64), advice="shrink it")
    with pytest.raises(SettingsError, match=r"evaluation on 1 image of 64×96 pixels: linformer has .* tokens.*; shrink it, or"):
        check_length(builder(mechanism="linformer"), (64, 96), advice="shrink it")
    check_length(builder(), (640, 960), advice="")
