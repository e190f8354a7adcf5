"""PVTv2 with any attention: overlapping patches, a depthwise convolution in the MLP, a norm after each stage.

The paper reports PolaFormer on PVTv2, but its code is not released. This is a reconstruction that matches the parameter and
FLOP columns: pola in all stages without key reduction, and the layer of the released pola_pvt.

# B batch, C channels, H height, W width, N = H·W tokens
"""

from collections.abc import Sequence
from math import sqrt
from typing import Any

from torch import Tensor, nn

from polaformer.backbones.block import initialise_linear, run_blocks
from polaformer.backbones.config import StageConfig
from polaformer.backbones.parameter_names import translate_pvt
from polaformer.backbones.pvt import NORM_EPS, PVTConfig, pvt_blocks
from polaformer.backbones.pyramid import Pyramid, Stage
from polaformer.backbones.token_layout import TokenLayout


class OverlappingPatches(nn.Module):
    """A convolution with a kernel of nearly twice its stride, then a LayerNorm: ceil(H / stride) × ceil(W / stride) tokens."""

    def __init__(self, in_chans: int, dim: int, stride: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, kernel_size=2 * stride - 1, stride=stride, padding=stride - 1)
        self.norm = nn.LayerNorm(dim)

    def forward(self, image: Tensor) -> Tensor:
        """(B, C, H, W) to tokens (B, H', W', dim)."""
        return self.norm(self.proj(image).permute(0, 2, 3, 1))


class PVTv2Stage(Stage):
    """Embeds overlapping patches of the image, runs blocks, then a norm."""

    def __init__(self, config: StageConfig, blocks: Sequence[nn.Module]) -> None:
        super().__init__(config, blocks)
        self.patch_embed = OverlappingPatches(config.in_chans, config.dim, config.stride)
        self.norm = nn.LayerNorm(config.dim, eps=NORM_EPS)

    def forward(self, image: Tensor, layout: TokenLayout) -> tuple[Tensor, TokenLayout]:
        """Image (B, C, H, W) to tokens (B, N, dim) and their layout."""
        x = self.patch_embed(image)
        layout = layout.shrunk(self.stride, (x.shape[1], x.shape[2]))
        x = run_blocks(self.blocks, x.flatten(1, 2), layout, recompute=self.recompute)
        return self.norm(x), layout


class PVTv2(Pyramid):
    """PVTv2 with the given attention in each stage; takes the fields of PVTConfig. Every stage has its own norm."""

    config_type, translate = PVTConfig, staticmethod(translate_pvt)

    def __init__(self, **options: Any) -> None:
        config = PVTConfig.of(options)
        super().__init__(config)
        stages = []
        for stage, reduction in config.reduced_stages():
            stages.append(PVTv2Stage(stage, pvt_blocks(config, stage, reduction, local_mlp=True)))
        self.norm = nn.Identity()
        self.add_stages(config, stages, NORM_EPS)
        self.apply(initialise_linear)
        self.apply(initialise_convolution)


def initialise_convolution(module: nn.Module) -> None:
    """As in the published PVTv2: normal weights by fan-out, zero biases. For `Module.apply`."""
    if isinstance(module, nn.Conv2d):
        fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
        nn.init.normal_(module.weight, std=sqrt(2 / fan_out))
        if module.bias is not None:
            nn.init.zeros_(module.bias)


# Settings of PVTv2; drop path rates of FLatten's configurations, which the paper builds on, and b5's from the original.
VARIANTS: dict[str, dict[str, Any]] = {
    "b0": {"dims": (32, 64, 160, 256), "depths": (2, 2, 2, 2), "drop_path_rate": 0.1},
    "b1": {"depths": (2, 2, 2, 2), "drop_path_rate": 0.1},
    "b2": {"depths": (3, 4, 6, 3), "drop_path_rate": 0.1},
    "b3": {"depths": (3, 4, 18, 3), "drop_path_rate": 0.3},
    "b4": {"depths": (3, 8, 27, 3), "drop_path_rate": 0.3},
    "b5": {"depths": (3, 6, 40, 3), "mlp_ratios": (4, 4, 4, 4), "drop_path_rate": 0.3},
}
