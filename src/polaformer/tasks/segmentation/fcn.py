"""The head of a fully convolutional network (Long et al., 2015), which supervises a stage of the backbone beside the main head.

# B batch, C channels, K classes, h height, w width in cells
"""

from collections.abc import Sequence

from torch import Tensor, nn

from polaformer.ops.grid import Grid
from polaformer.tasks.dense.padding import inside
from polaformer.tasks.segmentation.layers import ConvolutionNormReLU, PixelClassifier


class FCN(nn.Module):
    """3×3 convolutions with batch norm and ReLU on one map, then a classifier: FCNHead of mmsegmentation without concatenation.

    index: of the map among the features; published for Swin: the third of four, with stride 16, 256 channels, one convolution.
    """

    def __init__(
        self,
        channels: Sequence[int],
        num_classes: int,
        *,
        width: int = 256,
        dropout: float = 0.1,
        num_convolutions: int = 1,
        index: int = 2,
        strides: Sequence[int] = (4, 8, 16, 32),
    ) -> None:
        super().__init__()
        self.index, self.stride = index, strides[index]
        widths = [channels[index], *[width] * num_convolutions]
        self.convs = nn.ModuleList(ConvolutionNormReLU(widths[i], width, 3) for i in range(num_convolutions))
        self.classifier = PixelClassifier(width, num_classes, dropout)

    def forward(self, features: Sequence[Tensor], sizes: Sequence[Grid] | None = None) -> Tensor:
        """Maps (B, C_i, h_i, w_i), fine to coarse, to logits (B, K, h, w) with the stride of the chosen one.

        sizes: (height, width) of each image in pixels; its logits are then those of the image alone.
        """
        own = features[self.index]
        is_inside = inside(sizes, own, self.stride)
        for convolution in self.convs:
            own = convolution(own, is_inside)
        out: Tensor = self.classifier(own)
        return out
