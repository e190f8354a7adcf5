"""The feature pyramid network (FPN): maps of all strides with the same width, from fine to coarse.

# B batch, C channels, H height, W width
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.arguments import check_choice

EXTRA = ("none", "pool", "convolutions")


class FeaturePyramid(nn.Module):
    """Lateral 1×1 convolutions, a top-down sum with nearest-neighbour upsampling, 3×3 output convolutions, extra levels.

    extra: "pool": one more level, every second cell of the last output (Mask R-CNN). "convolutions": two more levels, P6 and
        P7, by 3×3 convolutions with stride 2; P6 from the backbone's last map C5, whatever its width (RetinaNet). "none".
    Initialised as in mmdetection: Xavier uniform weights, zero biases. As there, no ReLU between P6 and P7.
    """

    def __init__(self, channels: Sequence[int], width: int = 256, extra: str = "none") -> None:
        super().__init__()
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

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        """Maps (B, C_i, H_i, W_i), fine to coarse, to maps (B, width, H_i, W_i) and those of the extra levels."""
        sums = [lateral(feature) for lateral, feature in zip(self.laterals, features, strict=True)]
        for fine in range(len(sums) - 2, -1, -1):
            sums[fine] = sums[fine] + F.interpolate(sums[fine + 1], size=sums[fine].shape[-2:], mode="nearest")
        found = [output(one) for output, one in zip(self.outputs, sums, strict=True)]
        if self.uses_pool:
            found.append(F.max_pool2d(found[-1], kernel_size=1, stride=2))
        if self.p6 is not None and self.p7 is not None:
            found.append(self.p6(features[-1]))
            found.append(self.p7(found[-1]))
        return found
