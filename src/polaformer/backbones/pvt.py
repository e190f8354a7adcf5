"""PVT (Pyramid Vision Transformer, v1) with any attention: the authors' pola_pvt and its softmax twin.

Four stages of stride 4, 2, 2, 2, each: patches, a learned position for each token, blocks. The mean of the last tokens is
classified, without a norm.

# B batch, C channels, H height, W width, N = H·W tokens
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from timm.layers import PatchEmbed
from torch import Tensor, nn

from polaformer.attention import facts
from polaformer.attention.layer.token_table import TokenTable
from polaformer.backbones.backbone import Backbone, Stage, check_dims, per_stage
from polaformer.backbones.block import Block, initialise_linear, run_blocks
from polaformer.backbones.mechanisms import (
    check_attention_options,
    create_attention,
    has_local_mlp,
    mechanism_of_stages,
    tell_layers_apart,
)
from polaformer.backbones.parameter_names import translate_pvt
from polaformer.backbones.token_grid import Layout, pad_to_multiple
from polaformer.ops.grid import Grid

NORM_EPS = 1e-6  # of blocks; the norms after patches and after key reduction have 1e-5


class PVTStage(Stage):
    """Patches of an image to tokens, with positions, through blocks; returns tokens and their layout."""

    def __init__(self, in_chans: int, dim: int, stride: int, grid: Grid, blocks: Sequence[nn.Module]) -> None:
        super().__init__(dim, stride, blocks)
        self.patch_embed = PatchEmbed(None, stride, in_chans, dim, norm_layer=nn.LayerNorm, output_fmt="NHWC")
        self.pos_embed = TokenTable(grid, dim, mode="bilinear")
        nn.init.trunc_normal_(self.pos_embed.rows, std=0.02)

    def forward(self, image: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
        """Image (B, C, H, W) to tokens (B, N, dim)."""
        x = self.patch_embed(pad_to_multiple(image, self.stride))  # (B, H, W, dim)
        layout = layout.shrunk(self.stride, (x.shape[1], x.shape[2]))
        x = x.flatten(1, 2)
        x = x + self.pos_embed(layout.grid, layout.sizes).to(x.dtype)
        return run_blocks(self.blocks, x, layout, recompute=self.recompute), layout

    def set_grid(self, grid: Grid) -> None:
        """Makes the grid the native size of all tables of the stage."""
        super().set_grid(grid)
        self.pos_embed.resize(grid)


class PVT(Backbone):
    """PVT with the given attention in each stage.

    reductions: one key for each r×r square of tokens; unless given, 1 in linear stages and 8, 4, 2, 1 in quadratic ones.
    feature_norms: a LayerNorm for each stage's features, for dense tasks.
    attention_options: further arguments of the attention (gate, conv, polarity, backend, …), for every stage that can honour
        them; one that none can is refused.
    """

    translate = staticmethod(translate_pvt)
    local_mlp = False
    stage_type: Callable[..., Stage] = PVTStage

    def __init__(
        self,
        *,
        img_size: int | Grid = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        attention: str | Sequence[str] = "pola",
        dims: Sequence[int] = (64, 128, 320, 512),
        depths: Sequence[int] = (2, 2, 2, 2),
        num_heads: int | Sequence[int] = (1, 2, 5, 8),
        mlp_ratios: float | Sequence[float] = (8, 8, 4, 4),
        patch_size: int = 4,
        reductions: int | Sequence[int] | None = None,
        alpha: float = 4.0,
        kernel_size: int = 5,
        attention_options: Mapping[str, Any] | None = None,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        global_pool: str = "avg",
        feature_norms: bool = False,
    ) -> None:
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=global_pool,
            drop_rate=drop_rate,
            proj_drop_rate=proj_drop_rate,
            drop_path_rate=drop_path_rate,
        )
        dims = check_dims(dims)
        num_stages = len(dims)
        depths = per_stage("depths", depths, num_stages, whole=True)
        num_heads = per_stage("num_heads", num_heads, num_stages, whole=True)
        mlp_ratios = per_stage("mlp_ratios", mlp_ratios, num_stages)
        self.attention = mechanism_of_stages(attention, num_stages)
        check_attention_options(self.attention, attention_options)
        ratios = reductions_of_stages(reductions, self.attention)
        make_attention = partial(
            create_attention,
            qkv_bias=qkv_bias,
            proj_drop=proj_drop_rate,
            alpha=alpha,
            kernel_size=kernel_size,
            options=attention_options,
        )

        def make_block(i: int, j: int, grid: Grid, drop_path: float) -> Block:
            attention = make_attention(self.attention[i], dims[i], num_heads[i], grid=grid, reduction=ratios[i])
            return Block(
                dims[i],
                attention,
                mlp_ratio=mlp_ratios[i],
                norm_eps=NORM_EPS,
                drop_path=drop_path,
                proj_drop=proj_drop_rate,
                local_mlp=self.local_mlp or has_local_mlp(self.attention[i]),
            )

        def make_stage(i: int, stride: int, grid: Grid, blocks: Sequence[nn.Module]) -> Stage:
            return self.stage_type(dims[i - 1] if i else in_chans, dims[i], stride, grid, blocks)

        self.norm = self.last_norm(dims[-1])
        self.build_stages(
            depths,
            make_block,
            make_stage,
            patch_size=patch_size,
            drop_path_rate=drop_path_rate,
            feature_norms=feature_norms,
            norm_eps=NORM_EPS,
        )
        tell_layers_apart(self, attention_options)
        self.initialise()

    def initialise(self) -> None:
        """Initial values as published."""
        self.apply(initialise_linear)

    def last_norm(self, dim: int) -> nn.Module:
        """What the published models call their norm."""
        return UnusedNorm(dim, eps=NORM_EPS)


class UnusedNorm(nn.LayerNorm):
    """The published models hold a last norm and never apply it: kept for their files, and frozen, as nothing trains it."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps=eps)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """x, as it is."""
        return x


def reductions_of_stages(reductions: int | Sequence[int] | None, attention: Sequence[str]) -> tuple[int, ...]:
    """The reduction of keys in each stage: as given, or PVT's where the cost is quadratic, as softmax's is, and 1 elsewhere."""
    if reductions is not None:
        return per_stage("reductions", reductions, len(attention), whole=True)
    # 8, 4, 2, 1 for four stages: the last sees every token, each one before it half of what the next sees on a side.
    return tuple(2 ** (len(attention) - 1 - i) if facts(name).cost == "quadratic" else 1 for i, name in enumerate(attention))


# Depths and drop path rates of the released configurations.
VARIANTS: dict[str, dict[str, Any]] = {
    "tiny": {"depths": (2, 2, 2, 2), "drop_path_rate": 0.1},
    "small": {"depths": (3, 4, 6, 3), "drop_path_rate": 0.1},
    "medium": {"depths": (3, 4, 18, 3), "drop_path_rate": 0.3},
    "large": {"depths": (3, 8, 27, 3), "drop_path_rate": 0.3},
}
