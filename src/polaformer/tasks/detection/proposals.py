"""Region proposals: torchvision's region proposal network, with everything but its convolutions in float32.

# B batch, A anchors of an image
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead, concat_box_prediction_layers

from polaformer.ops.grid import Grid
from polaformer.ops.precision import computing_dtype
from polaformer.tasks.dense.padding import extended
from polaformer.tasks.detection.anchors import Anchors, ObjectMatcher, ignored_anchors, image_list, in_padding

Targets = Sequence[dict[str, Tensor]]
STRIDES = (4, 8, 16, 32, 64)
MIN_SCORE = 1e-30  # anchors in the padding have 0


class ProposalNetwork(nn.Module):
    """The proposals of a torchvision network, and the losses that train it.

    beta: of the smooth L1 loss of boxes; 0: L1. use: which anchors training uses (`anchors.ignored_anchors`).
    """

    def __init__(self, rpn: RegionProposalNetwork, *, beta: float = 0.0, use: str = "valid") -> None:
        super().__init__()
        self.rpn, self.beta, self.use = rpn, beta, use

    def forward(
        self, images: Tensor, maps: Sequence[Tensor], sizes: Sequence[Grid], targets: Targets | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """For each image its proposals (n, 4), best first; and, given targets, the losses "objectness" and "proposal_box"."""
        rpn, wide = self.rpn, computing_dtype(maps[0])
        per_level = [[one.to(wide) for one in outputs] for outputs in rpn.head(list(maps))]
        anchors = rpn.anchor_generator(image_list(images, sizes), [one.to(wide) for one in maps])
        num_anchors = [one.shape[1] * one.shape[2] * one.shape[3] for one in per_level[0]]
        objectness, deltas = concat_box_prediction_layers(*per_level)  # (B·A, 1), (B·A, 4)
        boxes = rpn.box_coder.decode(deltas.detach(), anchors).view(len(sizes), -1, 4)
        shown = objectness.detach().view(len(sizes), -1).masked_fill(in_padding(anchors, sizes, self.use), -torch.inf)
        proposals, _ = rpn.filter_proposals(boxes, shown, list(sizes), num_anchors)
        return proposals, {} if targets is None else self._losses(objectness.flatten(), deltas, anchors, sizes, targets)

    def maps_of_regions(self, maps: Sequence[Tensor], sizes: Sequence[Grid]) -> dict[str, Tensor]:
        """The levels, with the names that torchvision gives them, "0", "1", …, as regions are cut out of them.

        Cells in the padding repeat the border of the image, so that regions at the border get the same features as in the image
        alone; use="all" leaves them as they are.
        """
        own = None if self.use == "all" else sizes
        levels = zip(maps, STRIDES, strict=False)
        return {str(level): extended(one, own, stride) for level, (one, stride) in enumerate(levels)}

    def _losses(
        self, objectness: Tensor, deltas: Tensor, anchors: list[Tensor], sizes: Sequence[Grid], targets: Targets
    ) -> dict[str, Tensor]:
        labels, matched = self._assign(anchors, sizes, targets)
        positive, negative = (torch.cat(one).bool() for one in self.rpn.fg_bg_sampler(labels))
        sampled = torch.cat([positive.nonzero()[:, 0], negative.nonzero()[:, 0]])
        wanted = self.rpn.box_coder.encode_single(torch.cat(matched)[positive], torch.cat(anchors)[positive])
        truth = torch.cat(labels)[sampled]
        share = 1 / max(1, len(sampled))
        return {
            "objectness": F.binary_cross_entropy_with_logits(objectness[sampled], truth, reduction="sum") * share,
            "proposal_box": F.smooth_l1_loss(deltas[positive], wanted, beta=self.beta, reduction="sum") * share,
        }

    def _assign(self, anchors: list[Tensor], sizes: Sequence[Grid], targets: Targets) -> tuple[list[Tensor], list[Tensor]]:
        """For each image the labels (A,) of its anchors, 1, 0 or -1 (ignored), and the boxes (A, 4) of their objects."""
        labels, matched = [], []
        for own, size, target in zip(anchors, sizes, targets, strict=True):
            label, boxes, used = own.new_full((len(own),), -1.0), torch.zeros_like(own), ~ignored_anchors(own, size, self.use)
            if used.any():
                truth = [{"boxes": target["boxes"].to(own.dtype)}]
                found, found_boxes = self.rpn.assign_targets_to_anchors([own[used]], truth)
                label[used], boxes[used] = found[0].to(own.dtype), found_boxes[0].to(own.dtype)
            labels.append(label)
            matched.append(boxes)
        return labels, matched


def build_proposals(
    width: int,
    *,
    beta: float = 0.0,
    use: str = "valid",
    num_training: int = 1000,
    num_inference: int = 1000,
    scale: float = 8.0,
) -> ProposalNetwork:
    """The network of the published configurations of PVT and Swin, on five levels of a pyramid.

    num_training, num_inference: proposals that are kept per image. scale: side of the anchors, in strides.
    """
    anchors = Anchors(STRIDES, (scale,))
    before, after = {"training": 2000, "testing": 1000}, {"training": num_training, "testing": num_inference}
    head = RPNHead(width, anchors.num_anchors_per_location()[0])
    rpn = RegionProposalNetwork(anchors, head, 0.7, 0.3, 256, 0.5, before, after, nms_thresh=0.7, score_thresh=MIN_SCORE)
    rpn.proposal_matcher = ObjectMatcher(0.7, 0.3, least=0.3)
    return ProposalNetwork(rpn, beta=beta, use=use)
