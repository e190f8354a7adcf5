"""Small detectors of each kind, images of different sizes and their targets."""

import torch

from models import SMALL
from polaformer.tasks.detection.description import DetectorDescription

DETECTORS = ("retinanet", "mask-rcnn", "cascade-mask-rcnn")
SIZES = [(64, 96), (96, 80)]
SWIN_CASCADE = {"detector": "cascade-mask-rcnn", "box_head": "4conv1fc"}


def describe(detector="mask-rcnn", backbone="pola_pvt_tiny", **changes):
    options = {"img_size": 64, "drop_path_rate": 0.0} | SMALL[backbone]
    small = {"width": 8, "backbone_options": options, "num_classes": 3}
    if detector != "retinanet":
        small |= {"box_width": 16, "mask_width": 8, "num_samples": 16, "num_proposals": 32, "anchor_scale": 1.0}
    return DetectorDescription(detector=detector, backbone=backbone, **(small | changes))


def batch(sizes=SIZES, dtype=torch.float32):
    """Images padded to the same size, and the mask of their pixels."""
    height, width = (max(side) for side in zip(*sizes, strict=True))
    images, mask = (
        torch.zeros(len(sizes), 3, height, width, dtype=dtype),
        torch.zeros(len(sizes), height, width, dtype=torch.bool),
    )
    for index, (h, w) in enumerate(sizes):
        images[index, :, :h, :w], mask[index, :h, :w] = torch.randn(3, h, w, dtype=dtype), True
    return images, mask, sizes


def targets(sizes=SIZES, numbers=(2, 1)):
    """The given numbers of objects in each image, with masks that fill half of the box."""
    found = []
    for (height, width), number in zip(sizes, numbers, strict=True):
        corner = torch.rand(number, 2) * 16
        boxes = torch.cat([corner, corner + 16 + torch.rand(number, 2) * 30], dim=1)
        masks = torch.zeros(number, height, width, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
            mask[top:bottom, left : (left + right) // 2] = 1
        found.append({"boxes": boxes, "labels": torch.randint(0, 3, (number,)), "masks": masks})
    return found
