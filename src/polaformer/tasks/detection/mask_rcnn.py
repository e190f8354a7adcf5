"""Mask R-CNN: region proposals, then boxes and masks of the regions.

# n detections of an image
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from polaformer.ops.grid import Grid
from polaformer.tasks.detection.detections import Detections
from polaformer.tasks.detection.proposals import ProposalNetwork, Targets, build_proposals
from polaformer.tasks.detection.stage import BoxPredictions, FeatureMaps, RoIStage, build_stage


class MaskRCNN(nn.Module):
    """The heads of Mask R-CNN on the five levels of a pyramid."""

    def __init__(self, proposals: ProposalNetwork, stage: RoIStage) -> None:
        super().__init__()
        self.proposals, self.stage = proposals, stage

    def losses(self, images: Tensor, maps: Sequence[Tensor], sizes: Sequence[Grid], targets: Targets) -> dict[str, Tensor]:
        """The losses, whose sum is the loss: "objectness", "proposal_box", "class", "box", "mask"."""
        boxes, found = self.proposals(images, maps, sizes, targets)
        named, stage = self.proposals.maps_of_regions(maps, sizes), self.stage
        samples = stage.sample(boxes, sizes, targets)
        found |= stage.losses(stage.predict(named, samples.boxes, sizes), samples, targets)
        return found | {"mask": stage.mask_loss(named, samples, sizes, targets)}

    def detections(self, images: Tensor, maps: Sequence[Tensor], sizes: Sequence[Grid]) -> list[Detections]:
        """The detections of each image, best first."""
        boxes, _ = self.proposals(images, maps, sizes)
        named = self.proposals.maps_of_regions(maps, sizes)
        return detections_with_masks([self.stage], named, self.stage.predict(named, boxes, sizes), boxes, sizes)

    def typical_outputs(self, maps: list[Tensor], num_regions: int, num_masks: int) -> list[Tensor]:
        """What every layer computes for the maps and this many regions."""
        return region_outputs(self.proposals, [self.stage], maps, num_regions, num_masks)


def region_outputs(
    proposals: ProposalNetwork, stages: Sequence[RoIStage], maps: list[Tensor], num_regions: int, num_masks: int
) -> list[Tensor]:
    """What every layer computes for the maps and, in every stage, for this many regions without content."""
    found = [one for outputs in proposals.rpn.head(maps) for one in outputs]
    return found + [one for stage in stages for one in stage.typical_outputs(maps[0], num_regions, num_masks)]


def detections_with_masks(
    stages: Sequence[RoIStage], maps: FeatureMaps, found: BoxPredictions, boxes: Sequence[Tensor], sizes: Sequence[Grid]
) -> list[Detections]:
    """The detections from the predictions for the boxes: the last stage decodes them, masks are averaged over the stages."""
    kept, scores, labels = stages[-1].roi.postprocess_detections(*found, list(boxes), list(sizes))
    per_stage = [stage.mask_probabilities(maps, kept, labels, sizes) for stage in stages]
    masks = [sum(own[1:], start=own[0]) / len(own) for own in zip(*per_stage, strict=True)]
    return [
        Detections(box.float(), score.float(), label - 1, mask.float())
        for box, score, label, mask in zip(kept, scores, labels, masks, strict=True)
    ]


def build_mask_rcnn(
    width: int, num_classes: int, *, num_proposals: int = 1000, anchor_scale: float = 8.0, box_loss: str = "l1", **stage: Any
) -> MaskRCNN:
    """As mmdetection's configuration, which those of PVT and Swin use; stage: further arguments of `build_stage`.

    Departs: an object's best anchor is trained for the object with which that anchor has the highest IoU; mmdetection assigns
        it to the former object, and does the same with an object's best proposal.
    """
    proposals = build_proposals(width, num_training=num_proposals, num_inference=num_proposals, scale=anchor_scale)
    return MaskRCNN(proposals, build_stage(width, num_classes, box_loss=box_loss, **stage))
