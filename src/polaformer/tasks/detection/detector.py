"""A detector: features of a backbone, a feature pyramid, and the heads of RetinaNet, Mask R-CNN or Cascade Mask R-CNN.

# B batch, H height, W width, n objects or detections of an image
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from polaformer.ops.grid import Grid
from polaformer.tasks.dense.model import DenseModel
from polaformer.tasks.detection.detections import Detections, paste_masks, rescaled
from polaformer.tasks.detection.proposals import ProposalNetwork, Targets

__all__ = ["Detections", "Detector", "paste_masks", "rescaled"]


class Heads(Protocol):
    """What a detector does with the maps of its pyramid. proposals: the network whose regions it classifies, if any."""

    proposals: ProposalNetwork | None

    def losses(self, images: Tensor, maps: Sequence[Tensor], sizes: Sequence[Grid], targets: Targets) -> dict[str, Tensor]:
        """The losses by name, in float32; their sum is the loss."""
        ...

    def detections(self, images: Tensor, maps: Sequence[Tensor], sizes: Sequence[Grid]) -> list[Detections]:
        """The detections of each image."""
        ...

    def typical_outputs(self, maps: list[Tensor], num_regions: int, num_masks: int) -> list[Tensor]:
        """What every layer computes for the maps and this many regions, if it computes on regions; works on the meta device."""
        ...


class Detector(DenseModel):
    """Called as `detector(images, mask, sizes, targets=None)`. The convolutions and linear layers run in the precision of
    autocast; boxes, scores and losses are in float32, for float64 weights in float64.
    """

    def __init__(self, features: nn.Module, pyramid: nn.Module, heads: nn.Module) -> None:
        super().__init__(features)
        self.pyramid, self.heads = pyramid, heads

    def forward(
        self, images: Tensor, mask: Tensor | None, sizes: Sequence[Grid], targets: Targets | None = None
    ) -> dict[str, Tensor] | list[Detections]:
        """Images (B, 3, H, W), normalised and padded, and the mask (B, H, W) of their pixels, to losses or to detections.

        sizes: the (height, width) of each image. targets: for each image boxes (n, 4) in pixels, labels (n,) from 0 on and, for
        masks, masks (n, height, width); n may be 0. With targets the losses by name, whose sum is the loss; without them the
        detections, in pixels of the given images.
        """
        heads: Heads = self.heads  # type: ignore[assignment]
        sizes = [(int(height), int(width)) for height, width in sizes]
        maps = self.maps(images, mask, sizes)
        return heads.detections(images, maps, sizes) if targets is None else heads.losses(images, maps, sizes, targets)

    def maps(self, images: Tensor, mask: Tensor | None = None, sizes: Sequence[Grid] | None = None) -> list[Tensor]:
        """The levels of the pyramid, fine to coarse; sizes: of the images, None if they fill the batch."""
        found: list[Tensor] = self.pyramid(self.features(images, mask), sizes)
        return found
