"""The heads of R-CNN detectors as in mmdetection: regions of the pyramid, box heads, box and mask predictors.

# R regions, C channels, K classes; class 0 is the background, as in torchvision's RoIHeads
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import roi_align
from torchvision.ops.poolers import LevelMapper

from polaformer.arguments import check_choice
from polaformer.ops.grid import Grid
from polaformer.ops.precision import computing_dtype

STRIDES = (4, 8, 16, 32)
BOX_HEADS = ("2fc", "4conv1fc")
REGION, MASK_REGION = 7, 14  # cells along a side


class RoIPooler(nn.Module):
    """The features of boxes, (R, C, side, side), each from the level that its size belongs to (Eq. 1 of the FPN paper).

    RoIAlign with pixel centres aligned and as many samples as a cell has feature cells. torchvision's MultiScaleRoIAlign has no
    aligned form, and takes the strides of the levels from the first images that it sees.
    """

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side
        self.level_of = LevelMapper(2, 5)

    def forward(self, maps: Mapping[str, Tensor], boxes: Sequence[Tensor], sizes: Sequence[Grid]) -> Tensor:
        """maps: the levels by name, those of STRIDES first. boxes: (n, 4) for each image."""
        levels = self.level_of(list(boxes))
        images = torch.cat([torch.full_like(own[:, :1], index) for index, own in enumerate(boxes)])
        regions = torch.cat([images, torch.cat(list(boxes))], dim=1)  # (R, 5)
        chosen = [(levels == level).nonzero()[:, 0] for level in range(len(STRIDES))]
        found = []
        for own, stride, index in zip(maps.values(), STRIDES, chosen, strict=False):
            wide = own.to(computing_dtype(own))
            part = roi_align(wide, regions[index].to(wide.dtype), self.side, 1 / stride, sampling_ratio=-1, aligned=True)
            found.append(part.to(own.dtype))
        return torch.cat(found)[torch.cat(chosen).argsort()]


class BoxPredictor(nn.Module):
    """Class logits (R, K + 1), the background first, and box deltas (R, (K + 1) · 4), in torchvision's layout.

    class_agnostic: one box for all classes. The background has no parameters for boxes: its deltas are zero, or the same ones.
    """

    def __init__(self, in_channels: int, num_classes: int, *, class_agnostic: bool = False) -> None:
        super().__init__()
        self.num_classes, self.class_agnostic = num_classes, class_agnostic
        self.cls_score = nn.Linear(in_channels, num_classes + 1)
        self.bbox_pred = nn.Linear(in_channels, 4 if class_agnostic else 4 * num_classes)
        for layer, std in ((self.cls_score, 0.01), (self.bbox_pred, 0.001)):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features (R, C)."""
        deltas = self.bbox_pred(x)
        return self.cls_score(x), deltas.repeat(1, self.num_classes + 1) if self.class_agnostic else F.pad(deltas, (4, 0))


def build_box_head(kind: str, width: int, hidden: int) -> nn.Module:
    """ "2fc": two linear layers. "4conv1fc": four 3×3 convolutions with batch norm, then one linear layer, as for Swin.

    Departs: published with SyncBatchNorm, to which the job converts it on several GPUs; on CPUs plain BatchNorm remains.
    """
    check_choice("detector", "box_head", kind, BOX_HEADS)
    if kind == "2fc":
        head: nn.Module = TwoMLPHead(width * REGION**2, hidden)
    else:
        head = FastRCNNConvFCHead((width, REGION, REGION), [width] * 4, [hidden], norm_layer=nn.BatchNorm2d)
    for layer in head.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return head


def build_mask_head(width: int, hidden: int, num_classes: int) -> tuple[nn.Module, nn.Module]:
    """The four convolutions of a mask head, and its predictor: logits (R, K, 28, 28)."""
    predictor = MaskRCNNPredictor(hidden, hidden, num_classes)
    for layer in (predictor.conv5_mask, predictor.mask_fcn_logits):
        nn.init.zeros_(layer.bias)
    return MaskRCNNHeads(width, (hidden,) * 4, 1), predictor
