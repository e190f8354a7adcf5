"""Semantic FPN (Kirillov et al., 2019): a feature pyramid whose levels are brought to the finest stride and summed.

# B batch, C channels, K classes, h height, w width in cells
"""

from collections.abc import Sequence

from torch import Tensor, nn

from polaformer.ops.grid import Grid
from polaformer.tasks.dense.features import STRIDES
from polaformer.tasks.dense.fpn import FeaturePyramid
from polaformer.tasks.dense.padding import inside, upsampled
from polaformer.tasks.segmentation.layers import ConvolutionNormReLU, PixelClassifier


class SemanticFPN(nn.Module):
    """The neck FPN and the head FPNHead of mmsegmentation.

    Level i, with 2^i times the finest stride, passes max(1, i) convolutions (3×3, batch norm, ReLU), each but those of level 0
    followed by bilinear upsampling by 2; then the levels are summed and classified.

    Departs: published with group norm, in mmsegmentation and here with batch norm. Where a map has an odd number of cells, the
        upsampled one is cropped to it, so that cells stay where they are; mmsegmentation shrinks it.
    """

    def __init__(
        self, channels: Sequence[int], num_classes: int, *, fpn_width: int = 256, width: int = 128, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.stride = STRIDES[0]
        self.pyramid = FeaturePyramid(channels, fpn_width, "none", STRIDES)
        self.scale_heads = nn.ModuleList(_branch(fpn_width, width, max(1, level)) for level in range(len(channels)))
        self.classifier = PixelClassifier(width, num_classes, dropout)

    def forward(self, features: Sequence[Tensor], sizes: Sequence[Grid] | None = None) -> Tensor:
        """Maps (B, C_i, h_i, w_i), fine to coarse, to logits (B, K, h_0, w_0).

        sizes: (height, width) of each image in pixels; its logits are then those of the image alone.
        """
        maps = self.pyramid(features, sizes)
        grids = [(one.shape[-2], one.shape[-1]) for one in maps]
        found = [self._to_finest(one, level, grids, sizes) for level, one in enumerate(maps)]
        out: Tensor = self.classifier(sum(found[1:], start=found[0]))
        return out

    def _to_finest(self, own: Tensor, level: int, grids: Sequence[Grid], sizes: Sequence[Grid] | None) -> Tensor:
        branch = self.scale_heads[level]
        assert isinstance(branch, nn.ModuleList)
        for step, convolution in enumerate(branch):
            stride = STRIDES[level - step]
            own = convolution(own, inside(sizes, own, stride))
            if level > 0:
                own = upsampled(own, 2, grids[level - step - 1], sizes, stride)
        return own


def _branch(in_channels: int, width: int, number: int) -> nn.ModuleList:
    return nn.ModuleList(ConvolutionNormReLU(width if i else in_channels, width, 3) for i in range(number))
