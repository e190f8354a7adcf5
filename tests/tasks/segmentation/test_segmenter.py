"""Segmenters: logits of images of any size, alone and padded; losses; the verbs that training uses."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from polaformer.data.padded_images import pad_images
from polaformer.errors import SettingsError
from polaformer.tasks.dense.backbone_weights import load_backbone
from polaformer.tasks.dense.padding import sizes_of
from polaformer.tasks.segmentation.segmenter import IGNORED, cross_entropy, logits_of_pixels, training_losses
from polaformer.training.freezing import frozen_names
from polaformer.training.optim import parameter_groups
from polaformer.training.settings import Settings
from segmenters import SEGMENTERS, SIZES, build, describe

BACKBONES = ("pola_pvt_tiny", "pola_swin_tiny", "softmax_pvt_v2_b0")


def labels(*shape):
    """Random classes, a tenth of them ignored."""
    return torch.where(torch.rand(shape) < 0.1, IGNORED, torch.randint(0, 5, shape)).to(torch.uint8)


@pytest.mark.parametrize("segmenter", SEGMENTERS)
@pytest.mark.parametrize("backbone", BACKBONES)
@torch.no_grad()
def test_an_image_gets_the_same_logits_alone_as_in_a_padded_batch(segmenter, backbone):
    """Also those of the auxiliary head, and so the same losses. What the padding holds is not seen either."""
    model = build(segmenter, backbone, auxiliary=True)
    images = [torch.randn(3, *size, dtype=torch.float64) for size in SIZES]
    batch = pad_images(images)
    padding = torch.randn_like(batch.images).masked_fill(batch.mask[:, None], 0.0)
    together = model(batch.images + padding, batch.mask)
    features = model.features(batch.images, batch.mask)
    beside = model.auxiliary(features, batch.sizes)
    assert together.shape == (3, 5, batch.images.shape[2] // 4, batch.images.shape[3] // 4)
    for index, image in enumerate(images):
        for found, alone in (
            (together, model(image[None])),
            (beside, model.auxiliary(model.features(image[None]))),
        ):
            height, width = alone.shape[-2:]
            assert torch.allclose(found[index, :, :height, :width], alone[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("segmenter", SEGMENTERS)
def test_padding_changes_no_loss_and_no_gradient(segmenter):
    model, image = build(segmenter, auxiliary=True), torch.randn(3, 70, 45, dtype=torch.float64)
    own = labels(1, 70, 45)
    batch = pad_images([image])
    padded = F.pad(own, (0, batch.mask.shape[2] - 45, 0, batch.mask.shape[1] - 70), value=IGNORED)
    expected, found = model(image[None], None, own), model(batch.images, batch.mask, padded)
    assert found.keys() == expected.keys() == {"loss_decode", "loss_auxiliary"}
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad(sum(losses.values()), parameters) for losses in (expected, found)]
    for name, loss in found.items():
        assert torch.allclose(loss, expected[name], rtol=1e-10)
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("segmenter", SEGMENTERS)
@pytest.mark.parametrize("size", [(1, 1), (5, 3), (33, 70), (64, 64), (97, 31)], ids=str)
@torch.no_grad()
def test_images_of_any_size_get_logits_for_every_pixel(segmenter, size):
    model, images = build(segmenter), torch.randn(2, 3, *size, dtype=torch.float64)
    logits = model(images)
    assert logits.shape == (2, 5, -(-size[0] // 4), -(-size[1] // 4))
    pixels = model.pixel_logits(images)
    assert pixels.shape == (2, 5, *size)
    whole = F.interpolate(logits, scale_factor=4.0, mode="bilinear", align_corners=False)
    assert torch.equal(pixels, whole[..., : size[0], : size[1]])


def test_multiples_of_the_stride_are_upsampled_as_a_whole():
    logits = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    expected = F.interpolate(logits, size=(24, 20), mode="bilinear", align_corners=False)
    assert torch.allclose(logits_of_pixels(logits, (24, 20), 4), expected)


# ---- losses ----


def test_the_loss_is_the_mean_over_the_pixels_that_are_not_ignored():
    logits, wanted = torch.randn(2, 5, 9, 7, dtype=torch.float64, requires_grad=True), labels(2, 9, 7)
    found = cross_entropy(logits, wanted)
    total, number = 0.0, 0
    for index, row, column in (wanted != IGNORED).nonzero().tolist():
        scores = logits[index, :, row, column]
        total = total + scores.exp().sum().log() - scores[wanted[index, row, column].item()]
        number += 1
    assert 0 < number < wanted.numel()
    assert torch.allclose(found, total / number)
    gradients = [torch.autograd.grad(one, logits)[0] for one in (found, total / number)]
    assert torch.allclose(*gradients)
    assert torch.autograd.gradcheck(lambda given: cross_entropy(given, wanted), logits)


@pytest.mark.parametrize("segmenter", SEGMENTERS)
def test_a_batch_whose_pixels_are_all_ignored_has_no_loss_and_zero_gradients(segmenter):
    model = describe(segmenter, auxiliary=True).build().train()
    losses = model(torch.randn(2, 3, 64, 64), None, torch.full((2, 64, 64), IGNORED, dtype=torch.uint8))
    assert [loss.item() for loss in losses.values()] == [0.0, 0.0]
    sum(losses.values()).backward()
    assert all(one.grad is not None and not one.grad.any() for one in model.parameters())


@pytest.mark.parametrize("segmenter", SEGMENTERS)
def test_losses_train_every_parameter_and_are_in_float32_under_bfloat16(segmenter):
    model, images, wanted = (
        describe(segmenter, auxiliary=True, dropout=0.0).build().train(),
        torch.randn(2, 3, 70, 64),
        labels(2, 70, 64),
    )
    expected = model(images, None, wanted)
    sum(expected.values()).backward()
    unused = [name for name, one in model.named_parameters() if one.grad is None or not one.grad.isfinite().all()]
    assert unused == []
    zero = [name for name, one in model.named_parameters() if one.ndim > 1 and not one.grad.any()]
    assert all("pos_embed" in name or "relative_positions" in name for name in zero), zero
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(images, None, wanted)
    for name, loss in found.items():
        assert loss.dtype == torch.float32
        assert loss.bfloat16().float() != loss
        assert loss.item() == pytest.approx(expected[name].item(), rel=0.05), name


def test_the_auxiliary_loss_is_weighted():
    model, images, wanted = build(auxiliary=True), torch.randn(1, 3, 64, 64, dtype=torch.float64), labels(1, 64, 64)
    logits = model.auxiliary(model.features(images))
    assert logits.shape == (1, 5, 4, 4)
    expected = 0.4 * cross_entropy(F.interpolate(logits, size=(64, 64), mode="bilinear", align_corners=False), wanted)
    assert torch.allclose(model(images, None, wanted)["loss_auxiliary"], expected)


def test_estimates_of_memory_compute_the_losses():
    with torch.device("meta"):
        found = training_losses(describe("upernet").build(), torch.empty(2, 3, 64, 64))
    assert found.keys() == {"loss_decode", "loss_auxiliary"}


# ---- verbs ----


@pytest.mark.parametrize("segmenter", SEGMENTERS)
def test_frozen_stages_count_the_backbones_stages(segmenter):
    model = describe(segmenter).build()
    names = frozen_names(model, 1)
    assert names == {name for name, _ in model.named_parameters() if name.startswith("features.backbone.stages.0.")}
    with pytest.raises(SettingsError, match="has 4 to freeze"):
        frozen_names(model, 5)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_layer_decay_and_weight_decay_spare_heads_and_tables(backbone):
    model = describe("upernet", backbone).build()
    groups = parameter_groups(model, Settings(layer_decay=0.5, weight_decay=0.1))
    options = {id(one): group for group in groups for one in group["params"]}
    exempt = model.no_weight_decay()
    for name, one in model.named_parameters():
        group = options[id(one)]
        assert group["weight_decay"] == (0.0 if name in exempt or one.ndim < 2 else 0.1), name
        assert name.startswith("features.") or group["lr_scale"] == 1.0, name
    assert options[id(dict(model.named_parameters())["features.backbone.stages.0.blocks.0.attn.proj.weight"])]["lr_scale"] < 0.5


def test_the_backbone_of_a_weights_file_of_a_segmenter_is_loaded(tmp_path):
    source, model = build("upernet"), describe("semantic-fpn").build()
    save_file(source.float().state_dict(), tmp_path / "weights.safetensors")
    loaded = load_backbone(model.backbone, tmp_path / "weights.safetensors")
    assert set(loaded.left_out) == {"head", "auxiliary"}
    expected = source.backbone.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.backbone.state_dict().items())


def test_gradient_checkpointing_keeps_the_losses():
    model, images, wanted = describe().build().eval(), torch.randn(2, 3, 64, 64), labels(2, 64, 64)
    expected = model(images, None, wanted)["loss_decode"]
    model.set_grad_checkpointing()
    assert all(stage.recompute for stage in model.backbone.stages)
    found = model(images, None, wanted)["loss_decode"]
    assert torch.equal(found, expected)
    found.backward()


def test_sizes_are_read_from_the_mask():
    batch = pad_images([torch.zeros(3, *size) for size in SIZES])
    assert sizes_of(batch.mask) == SIZES
    assert sizes_of(torch.ones(2, 4, 5, dtype=torch.bool)) is None
    assert sizes_of(None) is None
