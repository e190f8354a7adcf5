"""torchvision's own detectors as a `Detector`, which then gives the same losses and detections as torchvision does.

Images must be resized, normalised and padded as its transform does. Labels are from 0 on, as everywhere here: label i of a
Mask R-CNN is torchvision's i + 1; RetinaNet has no background, and both count alike.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN as TorchvisionMaskRCNN
from torchvision.models.detection import RetinaNet as TorchvisionRetinaNet

from polaformer.ops.grid import Grid
from polaformer.tasks.detection.detector import Detector
from polaformer.tasks.detection.mask_rcnn import MaskRCNN
from polaformer.tasks.detection.proposals import ProposalNetwork
from polaformer.tasks.detection.retinanet import RetinaNet
from polaformer.tasks.detection.stage import RoIStage

SMOOTH = 1 / 9  # beta of torchvision's smooth L1 loss


class Levels(nn.Module):
    """The pyramid that torchvision's backbone already includes."""

    def forward(self, maps: list[Tensor], sizes: Sequence[Grid] | None = None) -> list[Tensor]:
        """The levels, as they are."""
        return maps


class WithoutMask(nn.Module):
    """torchvision's backbone, which includes the pyramid and knows no mask."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """The levels of the pyramid."""
        found: Mapping[str, Tensor] = self.backbone(images)
        return list(found.values())


def from_torchvision(model: nn.Module) -> Detector:
    """The detector around the parts of torchvision's RetinaNet or Mask R-CNN; they are shared, not copied."""
    if isinstance(model, TorchvisionRetinaNet):
        heads: nn.Module = RetinaNet(
            model.head,
            model.anchor_generator,
            model.proposal_matcher,
            per_image=True,
            use="all",
            min_size=0.0,
            candidates=model.topk_candidates,
            score_threshold=model.score_thresh,
            nms_threshold=model.nms_thresh,
            max_detections=model.detections_per_img,
        )
    elif isinstance(model, TorchvisionMaskRCNN):
        heads = MaskRCNN(
            ProposalNetwork(model.rpn, beta=SMOOTH, use="all"), RoIStage(model.roi_heads, beta=SMOOTH, soft_masks=True)
        )
    else:
        raise TypeError(f"from_torchvision: model is a {type(model).__name__}; give torchvision's RetinaNet or MaskRCNN")
    return Detector(WithoutMask(model.backbone), Levels(), heads)
