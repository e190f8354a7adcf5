"""Swin with any attention: the authors' pola_swin (linear in the first two stages) and its softmax twin.

Linear stages attend globally, at every input size; softmax stages attend in windows, shifted in every other block.

# B batch, C channels, H height, W width, N = H·W tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from timm.layers import PatchEmbed
from torch import Tensor, nn

from polaformer.attention import AttentionLayer, create_layer
from polaformer.backbones.block import Block, initialise_linear, run_blocks
from polaformer.backbones.config import BackboneConfig, StageConfig
from polaformer.backbones.parameter_names import translate_swin
from polaformer.backbones.pyramid import Pyramid, Stage
from polaformer.backbones.token_layout import TokenLayout, pad_to_multiple

NORM_EPS = 1e-5


class PatchMerging(nn.Module):
    """2×2 squares of tokens to one token: channels concatenated, a LayerNorm, a projection without bias."""

    def __init__(self, in_chans: int, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * in_chans, eps=NORM_EPS)
        self.reduction = nn.Linear(4 * in_chans, dim, bias=False)

    def forward(self, image: Tensor) -> Tensor:
        """(B, C, H, W) with even H and W to tokens (B, H', W', dim)."""
        squares = image.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # (B, C, H/2, row, W/2, column)
        # The published order of channels: column before row.
        tokens = squares.permute(0, 2, 4, 5, 3, 1).flatten(3)  # (B, H', W', 4C)
        return self.reduction(self.norm(tokens))


class SwinStage(Stage):
    """Embeds patches of the image, or merges the tokens of the stage before, then runs blocks."""

    def __init__(self, config: StageConfig, blocks: Sequence[nn.Module], *, first: bool) -> None:
        super().__init__(config, blocks)
        in_chans, dim, norm = config.in_chans, config.dim, partial(nn.LayerNorm, eps=NORM_EPS)
        self.patch_embed = (
            PatchEmbed(None, config.stride, in_chans, dim, norm_layer=norm, output_fmt="NHWC")
            if first
            else PatchMerging(in_chans, dim)
        )

    def forward(self, image: Tensor, layout: TokenLayout) -> tuple[Tensor, TokenLayout]:
        """Image (B, C, H, W) to tokens (B, N, dim) and their layout."""
        x = self.patch_embed(pad_to_multiple(image, self.stride))  # (B, H, W, dim)
        layout = layout.shrunk(self.stride, (x.shape[1], x.shape[2]))
        return run_blocks(self.blocks, x.flatten(1, 2), layout, recompute=self.recompute), layout


@dataclass(frozen=True, kw_only=True)
class SwinConfig(BackboneConfig):
    """windows: the side of windows, for all stages or per stage; clipped to the native grid, as in the authors' code."""

    attention: str | Sequence[str] = "pola,pola,softmax,softmax"
    dims: int | Sequence[int] = (96, 192, 384, 768)
    depths: int | Sequence[int] = (2, 2, 6, 2)
    num_heads: int | Sequence[int] = (3, 6, 12, 24)
    patch_size: int = 4
    windows: int | Sequence[int] = 7
    drop_path_rate: float = 0.2

    has_windows: ClassVar[bool] = True


class Swin(Pyramid):
    """Swin with the given attention in each stage; takes the fields of SwinConfig."""

    config_type, translate, dense_norms = SwinConfig, staticmethod(translate_swin), True

    def __init__(self, **options: Any) -> None:
        config = SwinConfig.of(options)
        super().__init__(config)
        stages, windows = [], config.per_stage("windows")
        for i, stage in enumerate(config.stages()):
            window = min(windows[i], *stage.grid)
            blocks = []
            for j, drop_path in enumerate(stage.drop_paths):
                attention = _attention(config, stage, window, shifted=j % 2 == 1)
                blocks.append(Block(stage, attention, NORM_EPS, drop_path, config.proj_drop_rate))
            stages.append(SwinStage(stage, blocks, first=i == 0))
        self.norm = nn.LayerNorm(stages[-1].dim, eps=NORM_EPS)
        self.add_stages(config, stages, NORM_EPS)
        self.apply(initialise_linear)

    def no_weight_decay(self) -> set[str]:
        """The tables of relative positions, as in the authors' code."""
        return {name for name, _ in self.named_parameters() if name.endswith("relative_positions.table")}


def _attention(config: SwinConfig, stage: StageConfig, window: int, *, shifted: bool) -> AttentionLayer:
    """Attention in windows if the mechanism's facts say so (softmax), else over the whole grid."""
    where: dict[str, Any] = {"tokens": stage.grid}
    if config.in_windows(stage.mechanism):
        where = {"window": window, "shift": window // 2 if shifted else 0}
    return create_layer(stage.mechanism, stage.dim, stage.num_heads, **where, **config.layer_options(stage.mechanism))


# Settings and drop path rates of the released configurations; 384 has those of 224, as none is released for small.
_TINY = {"depths": (2, 2, 6, 2), "drop_path_rate": 0.2}
_SMALL = {"depths": (2, 2, 18, 2), "drop_path_rate": 0.3}
_BASE = {"dims": (128, 256, 512, 1024), "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32), "drop_path_rate": 0.5}
_AT_384 = {"img_size": 384, "windows": 12}
VARIANTS: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    "small": _SMALL,
    "base": _BASE,
    "tiny_384": _TINY | _AT_384,
    "small_384": _SMALL | _AT_384,
    "base_384": _BASE | _AT_384,
}
