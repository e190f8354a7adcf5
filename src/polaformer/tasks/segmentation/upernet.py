"""UPerNet (Xiao et al., 2018): a feature pyramid whose top is a pyramid pooling module (PSPNet, Zhao et al., 2017).

# B batch, C channels, K classes, h height, w width in cells, s bins along a side
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.ops.grid import Grid
from polaformer.tasks.dense.features import STRIDES
from polaformer.tasks.dense.padding import cells_of, inside, upsampled
from polaformer.tasks.segmentation.layers import ConvolutionNormReLU, PixelClassifier

BINS = (1, 2, 3, 6)


class UPerNet(nn.Module):
    """UPerHead of mmsegmentation, all of whose convolutions have batch norm and ReLU.

    The coarsest map, concatenated with its means over 1², 2², 3² and 6² bins (each with a 1×1 convolution, upsampled), passes a
    3×3 convolution; the others pass 1×1 convolutions. From coarse to fine each is added, upsampled, to the next. All but the
    coarsest then pass a 3×3 convolution. All are upsampled to the finest, concatenated, fused by a 3×3 convolution and
    classified.

    In training the mean of the whole image (one bin) needs a batch of two images at least: batch norm has no statistics of one.

    Departs: where a map has an odd number of cells, an upsampled one is cropped to it, so that cells stay where they are;
        mmsegmentation shrinks it.
    """

    def __init__(self, channels: Sequence[int], num_classes: int, *, width: int = 512, dropout: float = 0.1) -> None:
        super().__init__()
        self.stride = STRIDES[0]
        self.psp_modules = nn.ModuleList(ConvolutionNormReLU(channels[-1], width, 1) for _ in BINS)
        self.bottleneck = ConvolutionNormReLU(channels[-1] + len(BINS) * width, width, 3)
        self.lateral_convs = nn.ModuleList(ConvolutionNormReLU(one, width, 1) for one in channels[:-1])
        self.fpn_convs = nn.ModuleList(ConvolutionNormReLU(width, width, 3) for _ in channels[:-1])
        self.fpn_bottleneck = ConvolutionNormReLU(len(channels) * width, width, 3)
        self.classifier = PixelClassifier(width, num_classes, dropout)

    def forward(self, features: Sequence[Tensor], sizes: Sequence[Grid] | None = None) -> Tensor:
        """Maps (B, C_i, h_i, w_i), fine to coarse, to logits (B, K, h_0, w_0).

        sizes: (height, width) of each image in pixels; its logits are then those of the image alone.
        """
        grids = [(one.shape[-2], one.shape[-1]) for one in features]
        cells = [inside(sizes, one, stride) for one, stride in zip(features, STRIDES, strict=True)]
        maps = [lateral(one) for lateral, one in zip(self.lateral_convs, features, strict=False)]
        maps.append(self._pooled_top(features[-1], sizes))
        for fine in range(len(maps) - 2, -1, -1):
            factor = STRIDES[fine + 1] // STRIDES[fine]
            maps[fine] = maps[fine] + upsampled(maps[fine + 1], factor, grids[fine], sizes, STRIDES[fine + 1])
        for level, convolution in enumerate(self.fpn_convs):
            maps[level] = convolution(maps[level], cells[level])
        found = [maps[0]] + [
            upsampled(one, stride // self.stride, grids[0], sizes, stride)
            for one, stride in zip(maps[1:], STRIDES[1:], strict=True)
        ]
        out: Tensor = self.classifier(self.fpn_bottleneck(torch.cat(found, dim=1), cells[0]))
        return out

    def _pooled_top(self, top: Tensor, sizes: Sequence[Grid] | None) -> Tensor:
        """The coarsest map after pyramid pooling, (B, width, h, w)."""
        stride = STRIDES[-1]
        found = [top]
        for bins, convolution in zip(BINS, self.psp_modules, strict=True):
            found.append(spread(convolution(bin_means(top, bins, sizes, stride)), top, sizes, stride))
        out: Tensor = self.bottleneck(torch.cat(found, dim=1), inside(sizes, top, stride))
        return out


def bin_means(maps: Tensor, bins: int, sizes: Sequence[Grid] | None, stride: int) -> Tensor:
    """The means (B, C, s, s) of s × s bins of the maps (B, C, h, w), or of the part of them that belongs to each image.

    Bin i of s covers cells ⌊i·h/s⌋ to ⌈(i+1)·h/s⌉ - 1, so that bins overlap where s does not divide h.
    """
    if inside(sizes, maps, stride) is None:
        return F.adaptive_avg_pool2d(maps, bins)
    assert sizes is not None
    own = [one[:, :rows, :columns] for one, (rows, columns) in zip(maps, cells_of(sizes, maps, stride), strict=True)]
    return torch.stack([F.adaptive_avg_pool2d(one, bins) for one in own])


def spread(means: Tensor, like: Tensor, sizes: Sequence[Grid] | None, stride: int) -> Tensor:
    """The means (B, C, s, s) of bins, bilinearly resized to the maps `like` (B, C', h, w), or to the part of each image."""
    height, width = like.shape[-2:]
    if inside(sizes, like, stride) is None:
        return F.interpolate(means, size=(height, width), mode="bilinear", align_corners=False)
    assert sizes is not None
    found = []
    for own, (rows, columns) in zip(means, cells_of(sizes, like, stride), strict=True):
        resized = F.interpolate(own[None], size=(rows, columns), mode="bilinear", align_corners=False)[0]
        found.append(F.pad(resized, (0, width - columns, 0, height - rows)))
    return torch.stack(found)
