"""One stage of box and mask heads: torchvision's RoIHeads, with everything but the heads themselves in float32.

# R regions of a batch, K classes; class 0 is the background
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import RoIHeads, maskrcnn_inference, project_masks_on_boxes
from torchvision.ops import clip_boxes_to_image, generalized_box_iou_loss, roi_align

from polaformer.ops.grid import Grid
from polaformer.ops.precision import computing_dtype
from polaformer.tasks.detection.heads import MASK_REGION, REGION, BoxPredictor, RoIPooler, build_box_head, build_mask_head
from polaformer.tasks.detection.proposals import Targets

FeatureMaps = Mapping[str, Tensor]
BOX_LOSSES = ("l1", "smooth-l1", "giou")
GIOU_WEIGHT = 10.0


class BoxPredictions(NamedTuple):
    """The class logits (R, K + 1) and box deltas (R, (K + 1) · 4) of the regions of a batch."""

    logits: Tensor
    deltas: Tensor


class SampledRoIs(NamedTuple):
    """The regions that a training step uses, for each image."""

    boxes: list[Tensor]  # (n, 4)
    labels: list[Tensor]  # (n,), 0 for background
    matched: list[Tensor]  # (n,) indices of their objects
    is_object: list[Tensor]  # (n,), True for the object's own box

    @property
    def label(self) -> Tensor:
        """(R,) of the batch."""
        return torch.cat(self.labels)


class RoIStage(nn.Module):
    """Draws samples, predicts, computes losses and refines boxes.

    box_loss: "smooth-l1" with `beta` (0: L1), or "giou" of the decoded boxes, times 10. soft_masks: targets of masks as
    torchvision makes them, not rounded to 0 and 1, and a mask predictor with an output for the background.
    """

    def __init__(self, roi: RoIHeads, *, box_loss: str = "smooth-l1", beta: float = 0.0, soft_masks: bool = False) -> None:
        super().__init__()
        self.roi, self.box_loss, self.beta, self.soft_masks = roi, box_loss, beta, soft_masks

    def sample(self, proposals: Sequence[Tensor], sizes: Sequence[Grid], targets: Targets) -> SampledRoIs:
        """Regions from the proposals and the objects' own boxes; the whole image where there is neither."""
        truth = [target["boxes"].to(own) for target, own in zip(targets, proposals, strict=True)]
        proposals = [
            own if len(own) + len(boxes) else own.new_tensor([[0, 0, size[1], size[0]]])
            for own, boxes, size in zip(proposals, truth, sizes, strict=True)
        ]
        boxes = self.roi.add_gt_proposals(proposals, truth)
        labels = [target["labels"] + 1 for target in targets]
        matched, labels = self.roi.assign_targets_to_proposals(boxes, truth, labels)
        kept = self.roi.subsample(labels)
        is_object = [index >= len(own) for own, index in zip(proposals, kept, strict=True)]

        def chosen(values: Sequence[Tensor]) -> list[Tensor]:
            return [own[index] for own, index in zip(values, kept, strict=True)]

        return SampledRoIs(chosen(boxes), chosen(labels), chosen(matched), is_object)

    def predict(self, maps: FeatureMaps, boxes: Sequence[Tensor], sizes: Sequence[Grid]) -> BoxPredictions:
        """The predictions for the boxes of each image; the heads run in the precision of autocast."""
        features = self.roi.box_head(self.roi.box_roi_pool(maps, list(boxes), list(sizes)))
        return BoxPredictions(*(one.to(boxes[0].dtype) for one in self.roi.box_predictor(features)))

    def losses(self, found: BoxPredictions, samples: SampledRoIs, targets: Targets) -> dict[str, Tensor]:
        """The losses "class" and "box" of the predictions for the samples."""
        positive, share = samples.label > 0, 1 / max(1, len(samples.label))
        truth = torch.cat(
            [
                target["boxes"].to(own)[index] if len(target["boxes"]) else torch.zeros_like(own)
                for target, own, index in zip(targets, samples.boxes, samples.matched, strict=True)
            ]
        )[positive]
        boxes, deltas = torch.cat(samples.boxes)[positive], _of_class(found.deltas, samples.label)[positive]
        if self.box_loss == "giou":
            decoded = self.roi.box_coder.decode_single(deltas, boxes)
            box = GIOU_WEIGHT * generalized_box_iou_loss(decoded, truth, reduction="sum")
        else:
            wanted = self.roi.box_coder.encode_single(truth, boxes)
            box = F.smooth_l1_loss(deltas, wanted, beta=self.beta, reduction="sum")
        return {"class": F.cross_entropy(found.logits, samples.label, reduction="sum") * share, "box": box * share}

    def mask_loss(self, maps: FeatureMaps, samples: SampledRoIs, sizes: Sequence[Grid], targets: Targets) -> Tensor:
        """The mean binary cross-entropy of the masks of the samples that belong to objects."""
        kept = [label > 0 for label in samples.labels]
        boxes, labels, matched = ([own[index] for own, index in zip(one, kept, strict=True)] for one in samples[:3])
        logits = self._mask_logits(maps, boxes, sizes)
        wanted = [
            self._mask_target(target["masks"], own, index, logits.shape[-1])
            for target, own, index in zip(targets, boxes, matched, strict=True)
        ]
        label = torch.cat(labels) - (0 if self.soft_masks else 1)
        own_class = logits[torch.arange(len(label), device=label.device), label]
        total = F.binary_cross_entropy_with_logits(own_class, torch.cat(wanted), reduction="sum")
        return total / max(1, own_class.numel())

    def refine(
        self, found: BoxPredictions, boxes: Sequence[Tensor], sizes: Sequence[Grid], labels: Tensor | None = None
    ) -> list[Tensor]:
        """The boxes moved by the deltas of their class, within the image: of the label, or of the best class for background."""
        best = found.logits[:, 1:].argmax(dim=1) + 1
        deltas = _of_class(found.deltas, best if labels is None else torch.where(labels > 0, labels, best)).detach()
        moved = self.roi.box_coder.decode_single(deltas, torch.cat(list(boxes)))
        parts = moved.split([len(own) for own in boxes])
        return [clip_boxes_to_image(own, size) for own, size in zip(parts, sizes, strict=True)]

    def mask_probabilities(
        self, maps: FeatureMaps, boxes: Sequence[Tensor], labels: Sequence[Tensor], sizes: Sequence[Grid]
    ) -> list[Tensor]:
        """For each image (n, 1, 28, 28): the mask of each box for its label, 1 to K."""
        logits = self._mask_logits(maps, boxes, sizes)
        return list(maskrcnn_inference(logits, [own - (0 if self.soft_masks else 1) for own in labels]))

    def typical_outputs(self, like: Tensor, num_regions: int, num_masks: int) -> list[Tensor]:
        """What every layer computes for regions without content, with the channels, dtype and device of a map `like`."""
        shapes = ((number, like.shape[1], side, side) for number, side in ((num_regions, REGION), (num_masks, MASK_REGION)))
        boxes, masks = (like.new_zeros(shape, requires_grad=torch.is_grad_enabled()) for shape in shapes)
        return [*self.roi.box_predictor(self.roi.box_head(boxes)), self.roi.mask_predictor(self.roi.mask_head(masks))]

    def _mask_logits(self, maps: FeatureMaps, boxes: Sequence[Tensor], sizes: Sequence[Grid]) -> Tensor:
        features = self.roi.mask_head(self.roi.mask_roi_pool(maps, list(boxes), list(sizes)))
        logits = self.roi.mask_predictor(features)
        return logits.to(computing_dtype(logits))

    def _mask_target(self, masks: Tensor, boxes: Tensor, matched: Tensor, side: int) -> Tensor:
        """(n, side, side): the parts of the objects' masks inside the boxes."""
        if self.soft_masks and len(masks):
            return project_masks_on_boxes(masks, boxes, matched, side)
        regions = torch.cat([matched[:, None].to(boxes), boxes], dim=1)
        parts = roi_align(masks[:, None].to(boxes), regions, side, aligned=True)[:, 0]
        return (parts >= 0.5).to(boxes.dtype)


def _of_class(deltas: Tensor, labels: Tensor) -> Tensor:
    """(R, 4) of the label of each region."""
    return deltas.unflatten(1, (-1, 4))[torch.arange(len(labels), device=labels.device), labels]


def build_stage(
    width: int,
    num_classes: int,
    *,
    box_head: str = "2fc",
    box_loss: str = "l1",
    class_agnostic: bool = False,
    box_width: int = 1024,
    mask_width: int = 256,
    iou: float = 0.5,
    coder_weights: Sequence[float] = (10.0, 10.0, 5.0, 5.0),
    num_samples: int = 512,
    score_threshold: float = 0.05,
    nms_threshold: float = 0.5,
    max_detections: int = 100,
) -> RoIStage:
    """A stage as in the published configurations of PVT and Swin.

    iou: IoU with an object from which on a region is positive. num_samples: regions per image, a quarter of them of objects
    if there are as many. box_loss: "l1", "smooth-l1" (with beta 1) or "giou".
    """
    head, predictor = build_mask_head(width, mask_width, num_classes)
    roi = RoIHeads(
        RoIPooler(REGION),
        build_box_head(box_head, width, box_width),
        BoxPredictor(box_width, num_classes, class_agnostic=class_agnostic),
        iou,
        iou,
        num_samples,
        0.25,
        tuple(coder_weights),
        score_threshold,
        nms_threshold,
        max_detections,
        RoIPooler(MASK_REGION),
        head,
        predictor,
    )
    return RoIStage(roi, box_loss="giou" if box_loss == "giou" else "smooth-l1", beta=float(box_loss == "smooth-l1"))
