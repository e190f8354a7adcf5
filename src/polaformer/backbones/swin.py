"""Swin with any attention: the authors' pola_swin (linear in the first two stages) and its softmax twin.

Linear stages attend globally, at every input size; softmax stages attend in windows, shifted in every other block.

# B batch, C channels, H height, W width, N = H·W tokens
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from timm.layers import PatchEmbed
from torch import Tensor, nn

from polaformer.attention import AttentionLayer, WindowAttention
from polaformer.backbones.backbone import Backbone, Stage, check_dims, per_stage
from polaformer.backbones.block import Block, initialise_linear, run_blocks
from polaformer.backbones.mechanisms import (
    check_attention_options,
    create_attention,
    has_local_mlp,
    honoured,
    mechanism_of_stages,
    tell_layers_apart,
)
from polaformer.backbones.parameter_names import translate_swin
from polaformer.backbones.token_grid import Layout, pad_to_multiple
from polaformer.ops.grid import Grid

NORM_EPS = 1e-5


class PatchMerging(nn.Module):
    """Squares of 2×2 tokens to one: their channels side by side, a LayerNorm, a projection without bias."""

    def __init__(self, in_chans: int, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * in_chans, eps=NORM_EPS)
        self.reduction = nn.Linear(4 * in_chans, dim, bias=False)

    def forward(self, image: Tensor) -> Tensor:
        """(B, C, H, W), with even sides, to tokens (B, H', W', dim)."""
        squares = image.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # (B, C, H/2, row, W/2, column)
        # The published order of channels: column before row.
        tokens = squares.permute(0, 2, 4, 5, 3, 1).flatten(3)  # (B, H', W', 4C)
        return self.reduction(self.norm(tokens))


class SwinStage(Stage):
    """Patches of an image, or merged tokens of the stage before, through blocks; returns tokens and their layout."""

    def __init__(self, in_chans: int, dim: int, stride: int, blocks: Sequence[nn.Module], *, first: bool) -> None:
        super().__init__(dim, stride, blocks)
        self.patch_embed = (
            PatchEmbed(None, stride, in_chans, dim, norm_layer=partial(nn.LayerNorm, eps=NORM_EPS), output_fmt="NHWC")
            if first
            else PatchMerging(in_chans, dim)
        )

    def forward(self, image: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
        """Image (B, C, H, W) to tokens (B, N, dim)."""
        x = self.patch_embed(pad_to_multiple(image, self.stride))  # (B, H, W, dim)
        layout = layout.shrunk(self.stride, (x.shape[1], x.shape[2]))
        return run_blocks(self.blocks, x.flatten(1, 2), layout, recompute=self.recompute), layout


class Swin(Backbone):
    """Swin with the given attention in each stage.

    windows: the side of softmax windows, one for all stages or one for each; clipped to the native grid, as the authors do.
    feature_norms: a LayerNorm for each stage's features, for dense tasks.
    attention_options: further arguments of the attention (gate, conv, polarity, backend, …), for every stage that can honour
        them; softmax windows take gate, gate_init and the arguments of their core.
    """

    translate = staticmethod(translate_swin)

    def __init__(
        self,
        *,
        img_size: int | Grid = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        attention: str | Sequence[str] = "pola,pola,softmax,softmax",
        dims: Sequence[int] = (96, 192, 384, 768),
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: int | Sequence[int] = (3, 6, 12, 24),
        mlp_ratios: float | Sequence[float] = 4,
        patch_size: int = 4,
        windows: int | Sequence[int] = 7,
        alpha: float = 4.0,
        kernel_size: int = 5,
        attention_options: Mapping[str, Any] | None = None,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.2,
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
        windows = per_stage("windows", windows, num_stages, whole=True)
        self.attention = mechanism_of_stages(attention, num_stages)
        check_attention_options(self.attention, attention_options, windows=True)
        make_attention = partial(
            _create_attention,
            qkv_bias=qkv_bias,
            proj_drop=proj_drop_rate,
            alpha=alpha,
            kernel_size=kernel_size,
            options=attention_options,
        )

        def make_block(i: int, j: int, grid: Grid, drop_path: float) -> Block:
            attention = make_attention(self.attention[i], dims[i], num_heads[i], windows[i], shifted=j % 2 == 1, grid=grid)
            return Block(
                dims[i],
                attention,
                mlp_ratio=mlp_ratios[i],
                norm_eps=NORM_EPS,
                drop_path=drop_path,
                proj_drop=proj_drop_rate,
                local_mlp=has_local_mlp(self.attention[i]),
            )

        def make_stage(i: int, stride: int, grid: Grid, blocks: Sequence[nn.Module]) -> Stage:
            return SwinStage(dims[i - 1] if i else in_chans, dims[i], stride, blocks, first=i == 0)

        self.norm = nn.LayerNorm(dims[-1], eps=NORM_EPS)
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
        self.apply(initialise_linear)

    def no_weight_decay(self) -> set[str]:
        """The tables of relative positions, as the authors have it."""
        return {name for name, _ in self.named_parameters() if name.endswith("relative_positions.table")}


def _create_attention(
    mechanism: str,
    dim: int,
    num_heads: int,
    window: int,
    *,
    shifted: bool,
    grid: Grid,
    qkv_bias: bool,
    proj_drop: float,
    options: Mapping[str, Any] | None,
    **pola_options: Any,
) -> AttentionLayer:
    """Softmax in windows, anything else over the whole grid."""
    shared: dict[str, Any] = {"qkv_bias": qkv_bias, "proj_drop": proj_drop}
    if mechanism != "softmax":
        return create_attention(mechanism, dim, num_heads, grid=grid, options=options, **shared, **pola_options)
    window = min(window, *grid)
    shift = window // 2 if shifted else 0
    return WindowAttention(dim, num_heads, window, shift=shift, **shared, **honoured(mechanism, options, in_windows=True))


# Numbers and drop path rates of the released configurations; those at 384 are of 224: there is none for small at 384.
_TINY = {"depths": (2, 2, 6, 2), "drop_path_rate": 0.2}
_SMALL = {"depths": (2, 2, 18, 2), "drop_path_rate": 0.3}
_BASE = {
    "dims": (128, 256, 512, 1024),
    "depths": (2, 2, 18, 2),
    "num_heads": (4, 8, 16, 32),
    "drop_path_rate": 0.5,
}
_AT_384 = {"img_size": 384, "windows": 12}
VARIANTS: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    "small": _SMALL,
    "base": _BASE,
    "tiny_384": _TINY | _AT_384,
    "small_384": _SMALL | _AT_384,
    "base_384": _BASE | _AT_384,
}
