"""The feature pyramid network (FPN): maps of all strides with the same width, from fine to coarse.

# B batch, C channels, H height, W width
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.arguments import check_choice
from polaformer.ops.grid import Grid
from polaformer.tasks.dense.padding import cleared, inside

EXTRA = ("none", "pool", "convolutions")


class FeaturePyramid(nn.Module):
    """Lateral 1×1 convolutions, a top-down sum with nearest-neighbour upsampling, 3×3 output convolutions, extra levels.

    extra: "pool": one more level, every second cell of the last output (Mask R-CNN). "convolutions": two more levels, P6 and
        P7, by 3×3 convolutions with stride 2; P6 from the backbone's last map C5, whatever its width (RetinaNet). "none".
    strides: of the maps, fine to coarse. Initialised as in mmdetection: Xavier uniform weights, zero biases. As there, no ReLU
    between P6 and P7.
    """

    def __init__(
        self, channels: Sequence[int], width: int = 256, extra: str = "none", strides: Sequence[int] = (4, 8, 16, 32)
    ) -> None:
        super().__init__()
        self.strides = tuple(strides)
        check_choice("FeaturePyramid", "extra", extra, EXTRA)
        self.laterals = nn.ModuleList(nn.Conv2d(one, width, 1) for one in channels)
        self.outputs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in channels)
        self.uses_pool, self.p6, self.p7 = extra == "pool", None, None
        if extra == "convolutions":
            self.p6 = nn.Conv2d(channels[-1], width, 3, stride=2, padding=1)
            self.p7 = nn.Conv2d(width, width, 3, stride=2, padding=1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d) and module.bias is not None:
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, features: Sequence[Tensor], sizes: Sequence[Grid] | None = None) -> list[Tensor]:
        """Maps (B, C_i, H_i, W_i), fine to coarse, to maps (B, width, H_i, W_i) and those of the extra levels.

        sizes: (height, width) of each image in pixels; maps are then zero outside, and the same as those of the image alone.
        """
        cells = [inside(sizes, one, stride) for one, stride in zip(features, self.strides, strict=False)]
        sums = [lateral(feature) for lateral, feature in zip(self.laterals, features, strict=True)]
        for fine in range(len(sums) - 2, -1, -1):
            sums[fine] = sums[fine] + F.interpolate(sums[fine + 1], size=sums[fine].shape[-2:], mode="nearest")
        kept = [cleared(one, own) for one, own in zip(sums, cells, strict=True)]
        found = [cleared(output(one), own) for output, one, own in zip(self.outputs, kept, cells, strict=True)]
        if self.uses_pool:
            found.append(F.max_pool2d(found[-1], kernel_size=1, stride=2))
        if self.p6 is not None and self.p7 is not None:
            last = self.strides[len(features) - 1]
            for level, convolution, given in ((1, self.p6, features[-1]), (2, self.p7, None)):
                one = convolution(found[-1] if given is None else given)
                found.append(cleared(one, inside(sizes, one, last * 2**level)))
        return found
