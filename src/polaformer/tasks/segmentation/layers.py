"""The layers that all segmentation heads are made of, as in mmsegmentation.

# B batch, C channels, K classes, h height, w width in cells
"""

from torch import Tensor, nn

from polaformer.tasks.dense.padding import cleared


class ConvolutionNormReLU(nn.Module):
    """A convolution without bias that keeps the size, batch norm, ReLU. Initialised with He's normal distribution (fan out)."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=False)
        self.bn = nn.BatchNorm2d(out_channels)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor, is_inside: Tensor | None = None) -> Tensor:
        """Maps (B, C, h, w); what they hold outside of `is_inside` (B, 1, h, w) is not seen."""
        out: Tensor = self.bn(self.conv(cleared(x, is_inside))).relu_()
        return out


class PixelClassifier(nn.Module):
    """Dropout of whole channels, then class logits (B, K, h, w) by a 1×1 convolution, initialised with N(0, 0.01²)."""

    def __init__(self, channels: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout2d(dropout)
        self.conv_seg = nn.Conv2d(channels, num_classes, 1)
        nn.init.normal_(self.conv_seg.weight, std=0.01)
        assert self.conv_seg.bias is not None
        nn.init.zeros_(self.conv_seg.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, C, h, w)."""
        out: Tensor = self.conv_seg(self.dropout(x))
        return out
