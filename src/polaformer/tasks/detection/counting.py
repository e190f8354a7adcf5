"""The outputs of a detector's layers for a typical number of regions, for counts and estimates on the meta device.

Proposals depend on values, which the meta device does not have: the heads get regions without content instead.
"""

import torch
from torch import Tensor

from polaformer.tasks.detection.cascade import CascadeMaskRCNN
from polaformer.tasks.detection.detector import Detector
from polaformer.tasks.detection.heads import MASK_REGION, REGION
from polaformer.tasks.detection.mask_rcnn import MaskRCNN
from polaformer.tasks.detection.stage import Stage

NUM_REGIONS, NUM_MASKS = 1000, 100  # of an image in inference, as mmdetection counts
SHARE_OF_OBJECTS = 0.25  # of the regions of training: these have masks


def typical_outputs(
    model: Detector, images: Tensor, *, num_regions: int = NUM_REGIONS, num_masks: int = NUM_MASKS, training: bool = False
) -> list[Tensor]:
    """What every layer of the detector computes for the images and this many regions; in training a quarter has masks."""
    maps = model.maps(images)
    heads = model.heads
    if not isinstance(heads, MaskRCNN | CascadeMaskRCNN):
        return list(heads.head(maps).values())  # type: ignore[operator]
    found = [one for outputs in heads.proposals.rpn.head(maps) for one in outputs]
    stages = [heads.stage] if isinstance(heads, MaskRCNN) else heads._stages()
    num_masks = int(SHARE_OF_OBJECTS * num_regions) if training else num_masks
    for stage in stages:
        found += _of_stage(stage, maps[0], num_regions, num_masks)
    return found


def _of_stage(stage: Stage, like: Tensor, num_regions: int, num_masks: int) -> list[Tensor]:
    regions = like.new_zeros(num_regions, like.shape[1], REGION, REGION, requires_grad=torch.is_grad_enabled())
    mask_regions = like.new_zeros(num_masks, like.shape[1], MASK_REGION, MASK_REGION, requires_grad=torch.is_grad_enabled())
    roi = stage.roi
    return [*roi.box_predictor(roi.box_head(regions)), roi.mask_predictor(roi.mask_head(mask_regions))]
