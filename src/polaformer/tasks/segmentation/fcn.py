"""The head of a fully convolutional network (Long et al., 2015), which supervises a stage of the backbone beside the main head.

# B batch, C channels, K classes, h height, w width in cells
"""

from collections.abc import Sequence

from torch import Tensor, nn

from polaformer.ops.grid import Grid
from polaformer.tasks.dense.features import STRIDES
from polaformer.tasks.dense.padding import inside
from polaformer.tasks.segmentation.layers import ConvolutionNormReLU, PixelClassifier

STAGE = 2  # the third of four, with stride 16


class FCN(nn.Module):
    """A 3×3 convolution with batch norm and ReLU on the maps of the third stage, then a classifier.

    FCNHead of mmsegmentation with one convolution and without concatenation, as published for UPerNet with Swin.
    """

    def __init__(self, channels: Sequence[int], num_classes: int, *, width: int = 256, dropout: float = 0.1) -> None:
        super().__init__()
        self.stride = STRIDES[STAGE]
        self.convolution = ConvolutionNormReLU(channels[STAGE], width, 3)
        self.classifier = PixelClassifier(width, num_classes, dropout)

    def forward(self, features: Sequence[Tensor], sizes: Sequence[Grid] | None = None) -> Tensor:
        """Maps (B, C_i, h_i, w_i), fine to coarse, to logits (B, K, h_2, w_2).

        sizes: (height, width) of each image in pixels; its logits are then those of the image alone.
        """
        own = features[STAGE]
        out: Tensor = self.classifier(self.convolution(own, inside(sizes, own, self.stride)))
        return out
