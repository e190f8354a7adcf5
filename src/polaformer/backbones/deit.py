"""DeiT, the plain vision transformer, with any attention.

The paper reports PolaFormer on DeiT-T, but its code is not released. This is a reconstruction that matches the parameter
and FLOP columns: DeiT with its class token; the keys of all tokens have positions; the convolution acts on the patches, the
gate on all tokens. With softmax it is timm's deit_*_patch16_224.

# B batch, C channels, H height, W width, N = H·W patches, P prefix tokens (1 or 0)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import PatchEmbed
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from polaformer.arguments import check_choice
from polaformer.attention import create_layer
from polaformer.attention.layer.token_table import TokenTable
from polaformer.backbones.backbone import FORMATS, Backbone, mean_of_existing, set_native_grid
from polaformer.backbones.block import Block, initialise_linear, run_blocks
from polaformer.backbones.config import BackboneConfig
from polaformer.backbones.parameter_names import translate_deit
from polaformer.backbones.token_layout import TokenLayout, pad_to_multiple

NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class DeiTConfig(BackboneConfig):
    """class_token: False leaves it out; then global_pool is "avg" (the mean of the patches is classified).

    global_pool: None means "token", or "avg" without a class token. reductions: one key per r×r square of patches.
    dims, depths, num_heads, mlp_ratios, reductions: one number, or a sequence of one, as for the other backbones.
    """

    dims: int | Sequence[int] = 192
    depths: int | Sequence[int] = 12
    num_heads: int | Sequence[int] = 3
    patch_size: int = 16
    class_token: bool = True
    reductions: int | Sequence[int] = 1
    global_pool: str | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.global_pool is None:
            object.__setattr__(self, "global_pool", "token" if self.class_token else "avg")

    @property
    def num_stages(self) -> int:
        """One: the grid is the same in all blocks."""
        return 1

    @property
    def num_outputs(self) -> int:
        """The last three blocks, as in timm."""
        return min(3, *self.per_stage("depths"))


class DeiT(Backbone):
    """DeiT with the given attention; takes the fields of DeiTConfig."""

    config_type, translate = DeiTConfig, staticmethod(translate_deit)
    units, first_conv = "blocks", "patch_embed.proj"
    blocks: Any  # nn.ModuleList of Block

    def __init__(self, **options: Any) -> None:
        config = DeiTConfig.of(options)
        self.pools = ("token", "avg", "") if config.class_token else ("avg", "")
        super().__init__(config)
        (stage,), (reduction,) = config.stages(), config.per_stage("reductions")
        self.stride, self.recompute, self.num_prefix_tokens = stage.stride, False, int(config.class_token)
        self.patch_embed = PatchEmbed(None, stage.stride, stage.in_chans, stage.dim, output_fmt="NHWC")
        self.cls_token = nn.Parameter(torch.zeros(1, 1, stage.dim)) if config.class_token else None
        self.pos_embed = TokenTable(stage.grid, stage.dim, self.num_prefix_tokens)
        sizes = {"tokens": stage.grid, "reduction": reduction, "num_prefix_tokens": self.num_prefix_tokens}
        blocks = []
        for drop_path in stage.drop_paths:
            layer_options = sizes | config.layer_options(stage.mechanism)
            attention = create_layer(stage.mechanism, stage.dim, stage.num_heads, **layer_options)
            blocks.append(Block(stage, attention, NORM_EPS, drop_path, config.proj_drop_rate))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(stage.dim, eps=NORM_EPS)
        info = {"num_chs": stage.dim, "reduction": stage.stride}
        self.finish(config, [info | {"module": f"blocks.{i}"} for i in range(len(blocks))], NORM_EPS)
        self.apply(initialise_linear)
        nn.init.trunc_normal_(self.pos_embed.rows, std=0.02)
        if self.cls_token is not None:
            nn.init.trunc_normal_(self.cls_token, std=0.02)

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Images (B, C, H, W) to tokens (B, P + N, dim), the class token first, zero outside the images."""
        tokens, layout = self._embed(x, mask)
        return self._final_tokens(run_blocks(self.blocks, tokens, layout, recompute=self.recompute), layout)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        mask: Tensor | None = None,
        return_prefix_tokens: bool = False,
    ) -> Any:
        """The patches after blocks, preceded by the tokens of `forward_features` unless intermediates_only.

        indices: which blocks; an integer n: the last n; None: all. norm: apply the final norm. output_fmt: "NCHW" or "NLC".
        return_prefix_tokens: return pairs of patches and class token (B, P, dim) instead of patches.
        """
        check_choice("DeiT", "output_fmt", output_fmt, FORMATS)
        take, last = feature_take_indices(len(self.blocks), indices)
        tokens, layout = self._embed(x, mask)
        features: list[Any] = []
        for index, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            tokens = run_blocks([block], tokens, layout, recompute=self.recompute)
            if index in take:
                out = self._normed(tokens, index, norm)
                prefix, patches = out[:, : self.num_prefix_tokens], out[:, self.num_prefix_tokens :]
                image = layout.image(patches)
                feature = image.contiguous() if output_fmt == "NCHW" else image.flatten(2).mT
                features.append((feature, prefix) if return_prefix_tokens else feature)
        return features if intermediates_only else (self._final_tokens(tokens, layout), features)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keeps only the inputs of blocks for backward and recomputes the rest: less memory, more time."""
        self.recompute = enable

    def no_weight_decay(self) -> set[str]:
        """The class token and the position embeddings, as in DeiT; the key tables are decayed."""
        return {"cls_token", "pos_embed.rows"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """How timm groups parameters for layer-wise learning rates; blocks are the coarsest groups."""
        return {
            "stem": r"^(?:cls_token|pos_embed|patch_embed)",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^(?:norm|feature_norms)", (99999,))],
        }

    def _embed(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, TokenLayout]:
        image, layout = self._masked_images(x, mask)
        tokens = self.patch_embed(pad_to_multiple(image, self.stride))  # (B, H, W, dim)
        layout = layout.shrunk(self.stride, (tokens.shape[1], tokens.shape[2]))
        tokens = tokens.flatten(1, 2)
        if self.cls_token is not None:
            tokens = torch.cat([self.cls_token.expand(tokens.shape[0], -1, -1).to(tokens.dtype), tokens], dim=1)
        return tokens + self.pos_embed(layout.grid, layout.sizes).to(tokens.dtype), layout

    def _normed(self, tokens: Tensor, index: int, final: bool) -> Tensor:
        if self.feature_norms is not None:
            return self.feature_norms[index](tokens)
        return self.norm(tokens) if final else tokens

    def _final_tokens(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        tokens, exists = self.norm(tokens), layout.token_mask(self.num_prefix_tokens)
        return tokens if exists is None else tokens.masked_fill(~exists[..., None], 0.0)

    def _pool(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.global_pool != "avg":
            return x[:, 0] if self.global_pool == "token" else x
        patches = x[:, self.num_prefix_tokens :]
        if mask is None:
            return patches.mean(dim=1)
        return mean_of_existing(patches.mT, TokenLayout((mask.shape[1], mask.shape[2]), mask).shrunk(self.stride))

    def _resize_tables(self, pixels: TokenLayout) -> None:
        grid = pixels.shrunk(self.stride).grid
        self.pos_embed.resize(grid)
        set_native_grid(self.blocks, grid)


VARIANTS: dict[str, dict[str, Any]] = {
    "tiny": {"dims": 192, "num_heads": 3},
    "small": {"dims": 384, "num_heads": 6, "drop_path_rate": 0.1},
    "base": {"dims": 768, "num_heads": 12, "drop_path_rate": 0.1},
}
