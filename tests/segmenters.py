"""Small segmenters of each kind."""

import torch

from models import SMALL
from polaformer.tasks.segmentation.description import SegmenterDescription

SEGMENTERS = ("semantic-fpn", "upernet")
SIZES = [(70, 130), (133, 60), (64, 96)]  # in pixels, of images that share a padded batch


def describe(segmenter="semantic-fpn", backbone="pola_pvt_tiny", **changes):
    options = {"img_size": 64, "drop_path_rate": 0.0} | SMALL[backbone]
    small = {"head_width": 8, "auxiliary_width": 6, "backbone_options": options, "num_classes": 5}
    small |= {"fpn_width": 12} if segmenter == "semantic-fpn" else {}
    return SegmenterDescription(segmenter=segmenter, backbone=backbone, **(small | changes))


def build(segmenter="semantic-fpn", backbone="pola_pvt_tiny", **changes):
    """A segmenter in float64 and evaluation mode whose parameters and statistics are all different from 0 and 1."""
    model = describe(segmenter, backbone, **changes).build().double().eval()
    with torch.no_grad():
        for one in model.parameters():
            one += 0.1 * torch.randn_like(one)
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_(std=0.1)
                module.running_var.uniform_(0.5, 1.5)
    return model
