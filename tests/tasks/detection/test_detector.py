"""The three detectors: losses, detections, images without objects, precision, the verbs that training uses."""

import pytest
import torch
from torch import nn

from detectors import DETECTORS, SIZES, SWIN_CASCADE, batch, describe, targets
from models import SMALL
from polaformer.attention.layer.token_table import TokenTable
from polaformer.attention.layer.window_attention import RelativePositions
from polaformer.data.padded_images import pad_images
from polaformer.errors import SettingsError
from polaformer.tasks.dense.features import Features
from polaformer.tasks.dense.fpn import FeaturePyramid
from polaformer.tasks.detection.proposals import ProposalNetwork
from polaformer.training.freezing import freeze, frozen_names
from polaformer.training.optim import parameter_groups
from polaformer.training.settings import Settings

KINDS = [pytest.param({"detector": detector}, id=detector) for detector in DETECTORS]
KINDS.append(pytest.param(SWIN_CASCADE | {"backbone": "softmax_swin_tiny"}, id="cascade-of-swin"))
LOSSES = {
    "retinanet": {"class", "box"},
    "mask-rcnn": {"objectness", "proposal_box", "class", "box", "mask"},
    "cascade-mask-rcnn": {"objectness", "proposal_box"}
    | {f"{loss}_{i}" for loss in ("class", "box", "mask") for i in (1, 2, 3)},
}


def confident(detector):
    """With scores above the threshold."""
    for name, parameter in detector.named_parameters():
        if name.endswith("cls_logits.bias"):
            nn.init.ones_(parameter)
        if name.endswith(("cls_score.weight", "bbox_pred.weight")):
            nn.init.normal_(parameter, std=0.5)
    return detector.eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numbers", [(2, 1), (0, 2), (0, 0)], ids=str)
def test_images_with_and_without_objects_train_every_parameter(kind, numbers):
    detector = describe(**kind).build().train()
    losses = detector(*batch(), targets(numbers=numbers))
    assert losses.keys() == LOSSES[kind["detector"]]
    sum(losses.values()).backward()
    assert all(loss.isfinite() and loss.dtype == torch.float32 for loss in losses.values())
    broken = [
        name
        for name, one in detector.named_parameters()
        if one.requires_grad and (one.grad is None or not one.grad.isfinite().all())
    ]
    assert broken == []
    if numbers == (2, 1):
        assert all(loss > 0 for loss in losses.values())
        unused = [name for name, one in detector.named_parameters() if one.ndim > 1 and not one.grad.any()]
        assert all("relative_positions" in name or "pos_embed" in name for name in unused), unused


@pytest.mark.parametrize("kind", KINDS)
def test_detections_are_within_their_image_and_best_first(kind):
    detector = confident(describe(**kind, max_detections=20).build())
    with torch.no_grad():
        found = detector(*batch())
    for one, (height, width) in zip(found, SIZES, strict=True):
        assert 0 < len(one.boxes) <= 20
        assert one.boxes.dtype == one.scores.dtype == torch.float32
        assert ((one.boxes >= 0) & (one.boxes <= torch.tensor([width, height, width, height]))).all()
        assert (one.boxes[:, 2:] > one.boxes[:, :2]).all()
        assert (one.scores.diff() <= 0).all()
        assert set(one.labels.tolist()) <= {0, 1, 2}
        if kind["detector"] == "retinanet":
            assert one.masks is None
        else:
            assert one.masks.shape == (len(one.boxes), 1, 28, 28)
            assert ((one.masks >= 0) & (one.masks <= 1)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_without_any_proposal_training_and_inference_work(kind, monkeypatch):
    """Also with no object at all: the whole image is then the only region."""
    forward = ProposalNetwork.forward

    def no_proposals(self, images, maps, sizes, targets=None):
        boxes, losses = forward(self, images, maps, sizes, targets)
        return [own[:0] for own in boxes], losses

    monkeypatch.setattr(ProposalNetwork, "forward", no_proposals)
    detector = describe(**kind).build()
    for numbers in ((0, 0), (1, 0)):
        losses = detector.train()(*batch(), targets(numbers=numbers))
        assert all(loss.isfinite() for loss in losses.values())
        assert all(loss > 0 for name, loss in losses.items() if "class" in name)
        sum(losses.values()).backward()
    assert all(one.isfinite().all() for one in detector.buffers())  # of batch norm
    assert all(one.grad is not None and one.grad.isfinite().all() for one in detector.parameters() if one.requires_grad)
    if kind["detector"] != "retinanet":
        assert [len(one.boxes) for one in confident(detector)(*batch())] == [0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_boxes_beyond_256_pixels_keep_their_precision_under_bfloat16(kind):
    """In bfloat16 they would be multiples of 2 pixels, and their scores of 2^-8."""
    torch.manual_seed(1)
    detector = confident(describe(**kind).build())
    given = batch([(32, 544)])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = detector(*given)
    assert found.boxes.dtype == found.scores.dtype == torch.float32
    large = found.boxes[(found.boxes > 256) & (found.boxes < 544)]
    assert len(large) > 5
    assert (large.bfloat16().float() != large).float().mean() > 0.8
    assert (found.scores.bfloat16().float() != found.scores).float().mean() > 0.5
    if found.masks is not None:
        assert (found.masks.bfloat16().float() != found.masks).float().mean() > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_in_float32_under_bfloat16(kind):
    detector, given, wanted = describe(**kind).build(), batch(), targets()
    torch.manual_seed(2)
    expected = detector(*given, wanted)
    torch.manual_seed(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = detector(*given, wanted)
    for name, loss in found.items():
        assert loss.dtype == torch.float32
        assert loss.bfloat16().float() != loss, name
        assert loss.item() == pytest.approx(expected[name].item(), rel=0.3, abs=0.05), name


@pytest.mark.parametrize("kind", KINDS)
def test_float64_weights_train_and_detect(kind):
    detector, (images, mask, sizes) = describe(**kind).build().double(), batch(dtype=torch.float64)
    losses = detector(images, mask, sizes, targets())
    assert all(loss.dtype == torch.float64 and loss.isfinite() for loss in losses.values())
    with torch.no_grad():
        assert all(one.boxes.dtype == torch.float32 for one in confident(detector)(images, mask, sizes))


def test_anchors_in_the_padding_do_not_count_in_the_focal_loss():
    detector, seen = describe("retinanet").build(), []
    nn.init.zeros_(detector.heads.head.classification_head.cls_logits.bias)  # every anchor then counts about alike
    (images, mask, sizes), wanted = batch([(64, 64)]), targets([(64, 64)], [1])
    detector.heads.anchors.register_forward_hook(lambda module, inputs, output: seen.append(len(output[0])))
    alone = detector(images, mask, sizes, wanted)["class"]
    padded = detector(nn.functional.pad(images, (0, 128)), nn.functional.pad(mask, (0, 128)), sizes, wanted)["class"]
    assert seen[1] > 2 * seen[0]
    assert padded.item() == pytest.approx(alone.item(), rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_stages_count_the_backbones_stages(kind):
    detector = describe(**kind).build()
    most = len(detector.backbone.stages)
    names = frozen_names(detector, 1)
    assert names == {name for name, _ in detector.named_parameters() if name.startswith("features.backbone.stages.0.")}
    with pytest.raises(SettingsError, match=f"has {most} to freeze"):
        frozen_names(detector, most + 1)
    frozen = freeze(detector, 2)
    assert frozen == list(detector.backbone.stages[:2])
    assert all(
        one.requires_grad for name, one in detector.named_parameters() if not name.startswith("features.backbone.stages")
    )


def test_layer_decay_scales_the_backbone_and_leaves_the_heads():
    detector = describe("retinanet", "pola_swin_tiny").build()
    groups = parameter_groups(detector, Settings(layer_decay=0.5, weight_decay=0.1))
    scale = {id(one): group["lr_scale"] for group in groups for one in group["params"]}
    scales = {name: scale[id(one)] for name, one in detector.named_parameters()}
    assert {value for name, value in scales.items() if not name.startswith("features.")} == {1.0}
    blocks = [scales[f"features.backbone.stages.{i}.blocks.0.attn.qkv.weight"] for i in range(4)]
    assert blocks == sorted(blocks)
    assert blocks[0] < blocks[3] == 0.5
    assert scales["features.backbone.stages.0.patch_embed.proj.weight"] < blocks[0]


@pytest.mark.parametrize(
    "backbone", ["pola_pvt_tiny", "softmax_pvt_tiny", "pola_swin_tiny", "softmax_swin_tiny", "pola_pvt_v2_b0"]
)
def test_tables_of_positions_are_not_decayed(backbone):
    detector = describe("retinanet", backbone).build()
    tables = [module for module in detector.modules() if isinstance(module, TokenTable | RelativePositions)]
    exempt = detector.no_weight_decay()
    assert len(exempt) == len(tables)
    assert bool(tables) or backbone.startswith("softmax_pvt_v2")
    groups = parameter_groups(detector, Settings(weight_decay=0.1))
    decay = {id(one): group["weight_decay"] for group in groups for one in group["params"]}
    for name, one in detector.named_parameters():
        assert decay[id(one)] == (0.0 if name in exempt or one.ndim < 2 else 0.1), name


def test_gradient_checkpointing_keeps_the_losses():
    detector, given, wanted = describe("retinanet").build(), batch(), targets()
    expected = sum(detector(*given, wanted).values())
    detector.set_grad_checkpointing()
    assert all(stage.recompute for stage in detector.backbone.stages)
    found = sum(detector(*given, wanted).values())
    assert torch.equal(found, expected)
    found.backward()


# ---- padding ----


@pytest.mark.parametrize("detector", DETECTORS)
@torch.no_grad()
def test_an_image_gets_the_same_detections_alone_as_in_a_padded_batch(detector):
    """Padding is seen by no convolution, predicts nothing, and does not reach regions at the border."""
    torch.manual_seed(3)
    # Everything is a detection, so that nothing from the padding goes unnoticed.
    changes = {"score_threshold": 0.0, "nms_threshold": 1.0, "max_detections": 5000, "num_classes": 1}
    changes |= {} if detector == "retinanet" else {"num_proposals": 500}
    model = describe(detector, **changes).build().double().eval()
    for parameter in model.parameters():
        parameter += 0.02 * torch.randn_like(parameter)  # biases too: they are what padding would add
    sizes = [(70, 130), (128, 64), (90, 96)]  # alone, the second has no padding at all
    images = [torch.randn(3, *size, dtype=torch.float64) for size in sizes]
    together = model(*pad_images(images))
    for image, found in zip(images, together, strict=True):
        [alone] = model(*pad_images([image]))
        assert len(alone) == len(found) > 0
        for one, other in zip(alone, found, strict=True):
            assert (one is None and other is None) or torch.allclose(one.double(), other.double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("extra", ["pool", "convolutions"])
@torch.no_grad()
def test_a_pyramid_is_the_same_alone_as_in_a_padded_batch(extra):
    torch.manual_seed(0)
    backbone = {"img_size": 64} | SMALL["pola_pvt_tiny"]
    features = Features("pola_pvt_tiny", first_stage=int(extra == "convolutions"), **backbone).double().eval()
    pyramid = FeaturePyramid(features.channels, 8, extra, features.strides).double()
    for parameter in pyramid.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    images = [torch.randn(3, *size, dtype=torch.float64) for size in ((70, 130), (133, 60))]
    batch = pad_images(images)
    together = pyramid(features(batch.images, batch.mask), batch.sizes)
    for index, image in enumerate(images):
        alone = pad_images([image])
        for one, level in zip(pyramid(features(alone.images, alone.mask), alone.sizes), together, strict=True):
            height, width = one.shape[-2:]
            assert torch.allclose(one[0], level[index, :, :height, :width], rtol=0, atol=1e-9)
            assert not level[index, :, height:].any()
            assert not level[index, :, :, width:].any()
