"""The outputs of a detector's layers for a typical number of regions, for counts and estimates on the meta device.

Proposals depend on values, which the meta device does not have: the heads get regions without content instead.
"""

from typing import cast

from torch import Tensor

from polaformer.tasks.detection.detector import Detector, Heads

NUM_REGIONS, NUM_MASKS = 1000, 100  # of an image in inference, as mmdetection counts
SHARE_OF_OBJECTS = 0.25  # of the regions of training: these have masks


def typical_outputs(
    model: Detector, images: Tensor, *, num_regions: int = NUM_REGIONS, num_masks: int = NUM_MASKS, training: bool = False
) -> list[Tensor]:
    """What every layer of the detector computes for the images and this many regions; in training a quarter has masks."""
    num_masks = int(SHARE_OF_OBJECTS * num_regions) if training else num_masks
    return cast(Heads, model.heads).typical_outputs(model.maps(images), num_regions, num_masks)
