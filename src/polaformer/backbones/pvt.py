"""PVT (Pyramid Vision Transformer, v1) with any attention: the authors' pola_pvt and its softmax twin.

Four stages of stride 4, 2, 2, 2, each: patches, a learned position per token, blocks. The mean of the last tokens is
classified, without a norm.

# B batch, C channels, H height, W width, N = H·W tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from timm.layers import PatchEmbed
from torch import Tensor, nn

from polaformer.attention import create_layer, facts
from polaformer.attention.layer.token_table import TokenTable
from polaformer.backbones.block import Block, initialise_linear, run_blocks
from polaformer.backbones.config import BackboneConfig, StageConfig
from polaformer.backbones.parameter_names import translate_pvt
from polaformer.backbones.pyramid import Pyramid, Stage
from polaformer.backbones.token_layout import TokenLayout, pad_to_multiple
from polaformer.ops.grid import Grid

NORM_EPS = 1e-6  # of blocks; the norms after patches and after key reduction have 1e-5


class PVTStage(Stage):
    """Embeds patches of the image, adds positions, then runs blocks."""

    def __init__(self, config: StageConfig, blocks: Sequence[nn.Module]) -> None:
        super().__init__(config, blocks)
        sizes = (config.stride, config.in_chans, config.dim)
        self.patch_embed = PatchEmbed(None, *sizes, norm_layer=nn.LayerNorm, output_fmt="NHWC")
        self.pos_embed = TokenTable(config.grid, config.dim, mode="bilinear")
        nn.init.trunc_normal_(self.pos_embed.rows, std=0.02)

    def forward(self, image: Tensor, layout: TokenLayout) -> tuple[Tensor, TokenLayout]:
        """Image (B, C, H, W) to tokens (B, N, dim) and their layout."""
        x = self.patch_embed(pad_to_multiple(image, self.stride))  # (B, H, W, dim)
        layout = layout.shrunk(self.stride, (x.shape[1], x.shape[2]))
        x = x.flatten(1, 2)
        x = x + self.pos_embed(layout.grid, layout.sizes).to(x.dtype)
        return run_blocks(self.blocks, x, layout, recompute=self.recompute), layout

    def set_grid(self, grid: Grid) -> None:
        """Makes the grid the native size of all tables of the stage."""
        super().set_grid(grid)
        self.pos_embed.resize(grid)


@dataclass(frozen=True, kw_only=True)
class PVTConfig(BackboneConfig):
    """reductions: one key per r×r square of tokens; by default 1 in linear stages and 8, 4, 2, 1 in quadratic ones."""

    dims: int | Sequence[int] = (64, 128, 320, 512)
    depths: int | Sequence[int] = (2, 2, 2, 2)
    num_heads: int | Sequence[int] = (1, 2, 5, 8)
    mlp_ratios: float | Sequence[float] = (8, 8, 4, 4)
    patch_size: int = 4
    reductions: int | Sequence[int] | None = None
    drop_path_rate: float = 0.1

    def key_reductions(self) -> tuple[int, ...]:
        """The key reduction of each stage."""
        if self.reductions is not None:
            return self.per_stage("reductions")
        # 8, 4, 2, 1 for four stages: no reduction in the last, twice that of the next stage in each other.
        last = self.num_stages - 1
        return tuple(2 ** (last - i) if facts(name).cost == "quadratic" else 1 for i, name in enumerate(self.mechanisms))

    def reduced_stages(self) -> list[tuple[StageConfig, int]]:
        """The settings of each stage, and its key reduction."""
        return list(zip(self.stages(), self.key_reductions(), strict=True))


class PVT(Pyramid):
    """PVT with the given attention in each stage; takes the fields of PVTConfig."""

    config_type, translate = PVTConfig, staticmethod(translate_pvt)

    def __init__(self, **options: Any) -> None:
        config = PVTConfig.of(options)
        super().__init__(config)
        stages = [PVTStage(stage, pvt_blocks(config, stage, reduction)) for stage, reduction in config.reduced_stages()]
        self.norm = UnusedNorm(stages[-1].dim, eps=NORM_EPS)
        self.add_stages(config, stages, NORM_EPS)
        self.apply(initialise_linear)


def pvt_blocks(config: PVTConfig, stage: StageConfig, reduction: int, *, local_mlp: bool = False) -> list[Block]:
    """The blocks of a stage, with key reduction in their attention."""
    options = config.layer_options(stage.mechanism) | {"tokens": stage.grid, "reduction": reduction}
    blocks = []
    for drop_path in stage.drop_paths:
        attention = create_layer(stage.mechanism, stage.dim, stage.num_heads, **options)
        blocks.append(Block(stage, attention, NORM_EPS, drop_path, config.proj_drop_rate, local_mlp=local_mlp))
    return blocks


class UnusedNorm(nn.LayerNorm):
    """A norm that the published models store but never apply: kept for their weights files, and frozen."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps=eps)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """x, unchanged."""
        return x


# Depths and drop path rates of the released configurations.
VARIANTS: dict[str, dict[str, Any]] = {
    "tiny": {"depths": (2, 2, 2, 2), "drop_path_rate": 0.1},
    "small": {"depths": (3, 4, 6, 3), "drop_path_rate": 0.1},
    "medium": {"depths": (3, 4, 18, 3), "drop_path_rate": 0.3},
    "large": {"depths": (3, 8, 27, 3), "drop_path_rate": 0.3},
}
