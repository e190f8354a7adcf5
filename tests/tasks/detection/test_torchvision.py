"""torchvision's own detectors give the same losses and detections through our code as through their own call."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torchvision.models.detection import (
    MaskRCNN,
    RetinaNet,
    maskrcnn_resnet50_fpn,
    retinanet_resnet50_fpn,
)
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import paste_masks_in_image

from polaformer.tasks.detection.detector import rescaled
from polaformer.tasks.detection.from_torchvision import from_torchvision

SIZES = [(96, 128), (128, 100), (90, 70)]
NAMES = {
    "classification": "class",
    "bbox_regression": "box",
    "loss_classifier": "class",
    "loss_box_reg": "box",
    "loss_mask": "mask",
    "loss_objectness": "objectness",
    "loss_rpn_box_reg": "proposal_box",
}
SMALL_IMAGES = {"min_size": 96, "max_size": 160}


class TinyBackbone(nn.Module):
    """Levels of strides 4 to 64, of one convolution each, under the names of torchvision's pyramids."""

    def __init__(self, width):
        super().__init__()
        self.out_channels = width
        self.levels = nn.ModuleList(nn.Conv2d(3, width, 4 << level, stride=4 << level) for level in range(5))

    def forward(self, images):
        padded = nn.functional.pad(images, (0, 64, 0, 64))
        names = ["0", "1", "2", "3", "pool"]
        return OrderedDict(zip(names, [level(padded).relu() for level in self.levels], strict=True))


def tiny_retinanet():
    anchors = AnchorGenerator(tuple((8 << level, 12 << level) for level in range(5)), ((0.5, 1.0, 2.0),) * 5)
    return RetinaNet(TinyBackbone(8), 7, anchor_generator=anchors, **SMALL_IMAGES)


def tiny_mask_rcnn():
    parts = {
        "box_head": TwoMLPHead(8 * 49, 16),
        "box_predictor": FastRCNNPredictor(16, 7),
        "mask_head": MaskRCNNHeads(8, (8,), 1),
        "mask_predictor": MaskRCNNPredictor(8, 8, 7),
    }
    return MaskRCNN(TinyBackbone(8), **parts, **SMALL_IMAGES, rpn_pre_nms_top_n_train=50, box_batch_size_per_image=24)


def targets():
    found = []
    for size, number in zip(SIZES, (3, 0, 2), strict=True):
        corner = torch.rand(number, 2) * 40
        boxes = torch.cat([corner, corner + 8 + torch.rand(number, 2) * 40], dim=1)
        masks = (torch.rand(number, *size) > 0.5).to(torch.uint8)
        found.append({"boxes": boxes, "labels": torch.randint(1, 7, (number,)), "masks": masks})
    return found


def with_confident_scores(model):
    """Random weights give scores near 0.01; without detections there would be nothing to compare."""
    for name, parameter in model.named_parameters():
        if name.endswith("cls_logits.bias"):
            nn.init.zeros_(parameter)
        if name.endswith("cls_score.weight"):
            nn.init.normal_(parameter, std=5.0)
    return model


def compare(model):
    model, given = with_confident_scores(model), targets()
    images, background = [torch.rand(3, *size) for size in SIZES], int(isinstance(model, MaskRCNN))
    detector = from_torchvision(model)

    model.train()
    torch.manual_seed(1)
    expected = model(images, [dict(one) for one in given])
    torch.manual_seed(1)  # the transform draws a size, then the samplers draw
    prepared, wanted = model.transform(images, [dict(one) for one in given])
    found = detector(
        prepared.tensors, None, prepared.image_sizes, [one | {"labels": one["labels"] - background} for one in wanted]
    )
    assert found.keys() == {NAMES[name] for name in expected}
    for name, loss in expected.items():
        assert loss.item() > 0
        assert found[NAMES[name]].item() == pytest.approx(loss.item(), rel=1e-6), name

    model.eval()
    with torch.no_grad():
        for own, one, size, image in zip(
            model(images), detector(prepared.tensors, None, prepared.image_sizes), prepared.image_sizes, images, strict=True
        ):
            original = tuple(image.shape[1:])
            resized = rescaled(one, size, original)
            assert len(one.scores) > 10
            assert torch.equal(resized.boxes, own["boxes"])
            assert torch.equal(resized.scores, own["scores"])
            assert torch.equal(resized.labels + background, own["labels"])
            if one.masks is not None:
                assert torch.equal(paste_masks_in_image(one.masks, resized.boxes, original), own["masks"])


@pytest.mark.parametrize("build", [tiny_retinanet, tiny_mask_rcnn])
def test_a_small_torchvision_detector_gives_the_same_losses_and_detections(build):
    compare(build())


@pytest.mark.long
@pytest.mark.parametrize("build", [retinanet_resnet50_fpn, maskrcnn_resnet50_fpn])
def test_torchvisions_resnet50_detectors_give_the_same_losses_and_detections(build):
    compare(build(weights=None, weights_backbone=None, **SMALL_IMAGES))


def test_other_models_are_refused():
    with pytest.raises(TypeError, match="model is a Linear; give torchvision's RetinaNet or MaskRCNN"):
        from_torchvision(nn.Linear(1, 1))
