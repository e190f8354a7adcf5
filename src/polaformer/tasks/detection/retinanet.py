"""RetinaNet: classes and boxes of all anchors at once, trained with the focal loss.

# B batch, A anchors of an image, K classes
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection._utils import BoxCoder, Matcher
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import batched_nms, box_iou, clip_boxes_to_image, remove_small_boxes, sigmoid_focal_loss

from polaformer.ops.grid import Grid
from polaformer.ops.precision import computing_dtype
from polaformer.tasks.dense.padding import cleared, inside
from polaformer.tasks.detection.anchors import Anchors, ObjectMatcher, ignored_anchors, image_list, in_padding
from polaformer.tasks.detection.detections import Detections
from polaformer.tasks.detection.proposals import Targets

STRIDES = (8, 16, 32, 64, 128)
SCALES_PER_OCTAVE = 3
BACKGROUND, IGNORED = Matcher.BELOW_LOW_THRESHOLD, Matcher.BETWEEN_THRESHOLDS


class RetinaNet(nn.Module):
    """The heads of RetinaNet on levels P3 to P7: K logits per anchor, none for the background.

    per_image: the losses of each image are divided by its own number of anchors with an object, then averaged, as in
        torchvision; otherwise by the number in the batch, as in mmdetection. use: which anchors training uses
        (`anchors.ignored_anchors`). min_size: of detections, in pixels; 0: torchvision's, which keep boxes outside the image.
    """

    proposals = None

    def __init__(
        self,
        head: RetinaNetHead,
        anchors: AnchorGenerator,
        matcher: Matcher,
        *,
        per_image: bool = False,
        use: str = "valid",
        min_size: float = 1e-2,
        candidates: int = 1000,
        score_threshold: float = 0.05,
        nms_threshold: float = 0.5,
        max_detections: int = 100,
    ) -> None:
        super().__init__()
        self.head, self.anchors, self.matcher = head, anchors, matcher
        self.coder = BoxCoder((1.0, 1.0, 1.0, 1.0))
        self.per_image, self.use, self.min_size, self.candidates = per_image, use, min_size, candidates
        self.score_threshold, self.nms_threshold, self.max_detections = score_threshold, nms_threshold, max_detections

    def losses(self, images: Tensor, maps: Sequence[Tensor], sizes: Sequence[Grid], targets: Targets) -> dict[str, Tensor]:
        """The losses, whose sum is the loss: "class" (focal) and "box" (L1)."""
        logits, deltas, anchors = self._outputs(images, maps, sizes)
        matched = [self._match(*one) for one in zip(anchors, sizes, targets, strict=True)]
        numbers = [max(1, int((own >= 0).sum())) for own in matched]
        found = []
        for index, (own, target, number) in enumerate(zip(matched, targets, numbers, strict=True)):
            positive, divisor = own >= 0, number * len(numbers) if self.per_image else sum(numbers)
            truth = torch.zeros_like(logits[index])
            truth[positive, target["labels"][own[positive]]] = 1.0
            valid = own != IGNORED
            focal = sigmoid_focal_loss(logits[index][valid], truth[valid], alpha=0.25, gamma=2.0, reduction="sum")
            boxes = target["boxes"].to(deltas.dtype)[own[positive]]
            wanted = self.coder.encode_single(boxes, anchors[index][positive])
            distance = F.l1_loss(deltas[index][positive], wanted, reduction="sum")
            found.append(torch.stack([focal, distance]) / divisor)
        classes, boxes = torch.stack(found).sum(dim=0)
        return {"class": classes, "box": boxes}

    def detections(self, images: Tensor, maps: Sequence[Tensor], sizes: Sequence[Grid]) -> list[Detections]:
        """The detections of each image, best first."""
        logits, deltas, anchors = self._outputs(images, maps, sizes)
        logits = logits.masked_fill(in_padding(anchors, sizes, self.use)[..., None], -torch.inf)
        per_cell = logits.shape[1] // sum(one.shape[-2] * one.shape[-1] for one in maps)
        levels = [per_cell * one.shape[-2] * one.shape[-1] for one in maps]
        return [
            self._detections(logits[i].split(levels), deltas[i].split(levels), anchors[i].split(levels), size)
            for i, size in enumerate(sizes)
        ]

    def typical_outputs(self, maps: list[Tensor], num_regions: int, num_masks: int) -> list[Tensor]:
        """What every layer computes for the maps; there are no regions."""
        return list(self.head(maps).values())

    def _outputs(self, images: Tensor, maps: Sequence[Tensor], sizes: Sequence[Grid]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Logits (B, A, K), box deltas (B, A, 4) and, for each image, anchors (A, 4), level by level."""
        wide = computing_dtype(maps[0])
        anchors = self.anchors(image_list(images, sizes), [one.to(wide) for one in maps])
        own = None if self.use == "all" else sizes
        cells = [inside(own, one, stride) for one, stride in zip(maps, STRIDES, strict=False)]
        classes, boxes = self.head.classification_head, self.head.regression_head
        logits = self._tower(classes.conv, classes.cls_logits, maps, cells).to(wide)
        return logits, self._tower(boxes.conv, boxes.bbox_reg, maps, cells).to(wide), anchors

    def _tower(
        self, convolutions: nn.Module, last: nn.Module, maps: Sequence[Tensor], cells: Sequence[Tensor | None]
    ) -> Tensor:
        """What a head predicts for all anchors, (B, A, K) or (B, A, 4), without looking at the padding."""
        found, per_cell = [], self.head.classification_head.num_anchors
        for one, own in zip(maps, cells, strict=True):
            for convolution in convolutions.children():
                one = cleared(convolution(one), own)
            found.append(last(one).unflatten(1, (per_cell, -1)).permute(0, 3, 4, 1, 2).flatten(1, 3))  # (B, A, K)
        return torch.cat(found, dim=1)

    def _match(self, anchors: Tensor, size: Grid, target: dict[str, Tensor]) -> Tensor:
        """(A,): the index of each anchor's object, or BACKGROUND, or IGNORED."""
        found = torch.full((len(anchors),), BACKGROUND, device=anchors.device)
        if len(target["boxes"]):
            found = self.matcher(box_iou(target["boxes"].to(anchors.dtype), anchors))
        return found.masked_fill(ignored_anchors(anchors, size, self.use), IGNORED)

    def _detections(
        self, logits: Sequence[Tensor], deltas: Sequence[Tensor], anchors: Sequence[Tensor], size: Grid
    ) -> Detections:
        """The detections of one image, from its levels."""
        found: list[list[Tensor]] = [[], [], []]
        for own_logits, own_deltas, own_anchors in zip(logits, deltas, anchors, strict=True):
            score = own_logits.sigmoid().flatten()
            kept = (score > self.score_threshold).nonzero()[:, 0]
            score, best = score[kept].topk(min(self.candidates, len(kept)))
            anchor, label = kept[best] // own_logits.shape[1], kept[best] % own_logits.shape[1]
            box = clip_boxes_to_image(self.coder.decode_single(own_deltas[anchor], own_anchors[anchor]), size)
            large = remove_small_boxes(box, self.min_size)
            for values, one in zip(found, (box, score, label), strict=True):
                values.append(one[large])
        box, score, label = (torch.cat(values) for values in found)
        kept = batched_nms(box, score, label, self.nms_threshold)[: self.max_detections]
        return Detections(box[kept].float(), score[kept].float(), label[kept], None)


def build_retinanet(
    width: int,
    num_classes: int,
    *,
    anchor_scale: float = 4.0,
    score_threshold: float = 0.05,
    nms_threshold: float = 0.5,
    max_detections: int = 100,
) -> RetinaNet:
    """As the published configuration of PVT: per octave three scales of anchors, from anchor_scale strides on.

    Departs: the candidates of a level are its 1000 best scores, not all classes of its 1000 best anchors as in the mmdetection
        of that time; today's does the same. An object's best anchor is trained for the object with which
        that anchor has the highest IoU; mmdetection assigns it to the former object.
    """
    scales = [anchor_scale * 2 ** (step / SCALES_PER_OCTAVE) for step in range(SCALES_PER_OCTAVE)]
    anchors = Anchors(STRIDES, scales)
    head = RetinaNetHead(width, anchors.num_anchors_per_location()[0], num_classes)
    return RetinaNet(
        head,
        anchors,
        ObjectMatcher(0.5, 0.4),
        score_threshold=score_threshold,
        nms_threshold=nms_threshold,
        max_detections=max_detections,
    )
