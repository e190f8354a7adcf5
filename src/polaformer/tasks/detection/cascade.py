"""Cascade Mask R-CNN: three stages of box and mask heads, each on the boxes that the one before refined.

# R regions of a batch
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polaformer.ops.grid import Grid
from polaformer.tasks.detection.detections import Detections
from polaformer.tasks.detection.mask_rcnn import detections_with_masks, region_outputs
from polaformer.tasks.detection.proposals import ProposalNetwork, Targets, build_proposals
from polaformer.tasks.detection.stage import BoxPredictions, RoIStage, build_stage

IOUS = (0.5, 0.6, 0.7)
LOSS_WEIGHTS = (1.0, 0.5, 0.25)
CODER_WEIGHTS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))


class CascadeMaskRCNN(nn.Module):
    """The heads of Cascade Mask R-CNN on the five levels of a pyramid."""

    def __init__(
        self, proposals: ProposalNetwork, stages: Sequence[RoIStage], loss_weights: Sequence[float] = LOSS_WEIGHTS
    ) -> None:
        super().__init__()
        self.proposals, self.stages, self.loss_weights = proposals, nn.ModuleList(stages), tuple(loss_weights)

    def losses(self, images: Tensor, maps: Sequence[Tensor], sizes: Sequence[Grid], targets: Targets) -> dict[str, Tensor]:
        """The weighted losses, whose sum is the loss: of the proposals, and "class_1", "box_1", "mask_1" to 3 of the stages.

        Every stage samples the boxes that the stage before refined; objects' own boxes are not refined, but added.
        """
        boxes, losses = self.proposals(images, maps, sizes, targets)
        named = self.proposals.maps_of_regions(maps, sizes)
        for number, (stage, weight) in enumerate(zip(self._stages(), self.loss_weights, strict=True), start=1):
            samples = stage.sample(boxes, sizes, targets)
            found = stage.predict(named, samples.boxes, sizes)
            of_stage = stage.losses(found, samples, targets) | {"mask": stage.mask_loss(named, samples, sizes, targets)}
            losses |= {f"{name}_{number}": weight * loss for name, loss in of_stage.items()}
            refined = stage.refine(found, samples.boxes, sizes, samples.label)
            boxes = [own[~is_object] for own, is_object in zip(refined, samples.is_object, strict=True)]
        return losses

    def detections(self, images: Tensor, maps: Sequence[Tensor], sizes: Sequence[Grid]) -> list[Detections]:
        """The detections of each image, best first: class logits and masks averaged over the stages, boxes of the last."""
        boxes, _ = self.proposals(images, maps, sizes)
        named, stages, logits = self.proposals.maps_of_regions(maps, sizes), self._stages(), []
        for stage in stages:
            found = stage.predict(named, boxes, sizes)
            logits.append(found.logits)
            if stage is not stages[-1]:
                boxes = stage.refine(found, boxes, sizes)
        mean = torch.stack(logits).mean(dim=0)
        return detections_with_masks(stages, named, BoxPredictions(mean, found.deltas), boxes, sizes)

    def typical_outputs(self, maps: list[Tensor], num_regions: int, num_masks: int) -> list[Tensor]:
        """What every layer computes for the maps and, in every stage, for this many regions."""
        return region_outputs(self.proposals, self._stages(), maps, num_regions, num_masks)

    def _stages(self) -> list[RoIStage]:
        return list(self.stages)  # type: ignore[arg-type]


def build_cascade(
    width: int,
    num_classes: int,
    *,
    num_proposals: int | None = None,
    anchor_scale: float = 8.0,
    box_head: str = "2fc",
    box_loss: str | None = None,
    class_agnostic: bool | None = None,
    **stage: Any,
) -> CascadeMaskRCNN:
    """As mmdetection's configuration; with box_head="4conv1fc" as Swin's.

    box_loss, class_agnostic: None: as published: GIoU per class for 4conv1fc, else smooth L1 of one box for all classes.
    num_proposals: per image; None: 2000 in training and 1000 in inference, as published. stage: arguments of `build_stage`.

    Departs: the coder weights of the third stage are the paper's (30, 30, 15, 15), not 1 / (.033, .033, .067, .067). Anchors
        are matched as in `build_mask_rcnn`.
    """
    proposals = build_proposals(
        width,
        beta=1 / 9,
        use="inside",
        num_training=num_proposals or 2000,
        num_inference=num_proposals or 1000,
        scale=anchor_scale,
    )
    is_swins = box_head == "4conv1fc"
    stage |= {"box_head": box_head, "box_loss": box_loss or ("giou" if is_swins else "smooth-l1")}
    stage |= {"class_agnostic": not is_swins if class_agnostic is None else class_agnostic}
    stages = [
        build_stage(width, num_classes, iou=iou, coder_weights=weights, **stage)
        for iou, weights in zip(IOUS, CODER_WEIGHTS, strict=True)
    ]
    return CascadeMaskRCNN(proposals, stages)
