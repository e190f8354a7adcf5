"""DeiT, the plain vision transformer, with any attention.

The paper reports PolaFormer on DeiT-T but released no code for it. This is a reading that fits its parameter and FLOP
columns: DeiT with its class token; keys of all tokens have positions; the convolution acts on the patches, the gate on all
tokens. With softmax it is timm's deit_*_patch16_224.

# B batch, C channels, H height, W width, N = H·W patches, P prefix tokens (1 or 0)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.layers import PatchEmbed, calculate_drop_path_rates
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from polaformer.attention import AttentionLayer
from polaformer.attention.layer.token_table import TokenTable
from polaformer.backbones.backbone import Backbone, as_grid, check_format, mean_of_existing, per_stage
from polaformer.backbones.block import Block, initialise_linear, run_blocks
from polaformer.backbones.mechanisms import (
    check_attention_options,
    create_attention,
    has_local_mlp,
    mechanism_of_stages,
    tell_layers_apart,
)
from polaformer.backbones.parameter_names import translate_deit
from polaformer.backbones.token_grid import Layout, pad_to_multiple
from polaformer.ops.grid import Grid

NORM_EPS = 1e-6


class DeiT(Backbone):
    """DeiT with the given attention.

    class_token: False leaves it out; then global_pool is "avg" (the mean of the patches is classified).
    num_heads, dims, depths, mlp_ratios: one number, or a sequence of one, as for the other backbones.
    feature_norms: a LayerNorm for each block's features, for dense tasks.
    attention_options: further arguments of the attention (gate, conv, polarity, backend, …), for every stage that can honour
        them; one that none can is refused.
    """

    translate = staticmethod(translate_deit)
    pools: tuple[str, ...] = ("token", "avg", "")

    def __init__(
        self,
        *,
        img_size: int | Grid = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        attention: str | Sequence[str] = "pola",
        dims: int | Sequence[int] = 192,
        depths: int | Sequence[int] = 12,
        num_heads: int | Sequence[int] = 3,
        mlp_ratios: float | Sequence[float] = 4,
        patch_size: int = 16,
        class_token: bool = True,
        reductions: int | Sequence[int] = 1,
        alpha: float = 4.0,
        kernel_size: int = 5,
        attention_options: Mapping[str, Any] | None = None,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        global_pool: str | None = None,
        feature_norms: bool = False,
    ) -> None:
        if global_pool is None:
            global_pool = "token" if class_token else "avg"
        if not class_token:
            self.pools = ("avg", "")
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
        (dim,), (depth,) = per_stage("dims", dims, 1, whole=True), per_stage("depths", depths, 1, whole=True)
        (heads,), (ratio,) = per_stage("num_heads", num_heads, 1, whole=True), per_stage("mlp_ratios", mlp_ratios, 1)
        (reduction,) = per_stage("reductions", reductions, 1, whole=True)
        self.attention = mechanism_of_stages(attention, 1)
        check_attention_options(self.attention, attention_options)
        self.stride, self.recompute, self.num_prefix_tokens = patch_size, False, int(class_token)
        grid = Layout(self.img_size).shrunk(patch_size).grid
        self.patch_embed = PatchEmbed(None, patch_size, in_chans, dim, output_fmt="NHWC")
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if class_token else None
        self.pos_embed = TokenTable(grid, dim, self.num_prefix_tokens)
        self.blocks = nn.ModuleList(
            Block(
                dim,
                create_attention(
                    self.attention[0],
                    dim,
                    heads,
                    grid=grid,
                    reduction=reduction,
                    num_prefix_tokens=self.num_prefix_tokens,
                    qkv_bias=qkv_bias,
                    proj_drop=proj_drop_rate,
                    alpha=alpha,
                    kernel_size=kernel_size,
                    options=attention_options,
                ),
                mlp_ratio=ratio,
                norm_eps=NORM_EPS,
                drop_path=drop_path,
                proj_drop=proj_drop_rate,
                local_mlp=has_local_mlp(self.attention[0]),
            )
            for drop_path in calculate_drop_path_rates(drop_path_rate, depth)
        )
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.num_features = self.head_hidden_size = dim
        self.feature_info = [{"num_chs": dim, "reduction": patch_size, "module": f"blocks.{i}"} for i in range(depth)]
        if feature_norms:
            self.feature_norms = nn.ModuleList(nn.LayerNorm(dim, eps=NORM_EPS) for _ in range(depth))
        self.head = self._new_head()
        tell_layers_apart(self, attention_options)
        self.apply(initialise_linear)
        nn.init.trunc_normal_(self.pos_embed.rows, std=0.02)
        if self.cls_token is not None:
            nn.init.trunc_normal_(self.cls_token, std=0.02)

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Images (B, C, H, W) to tokens (B, P + N, dim), the class token first, zero outside the images."""
        tokens, layout = self._embed(x, mask)
        return self._last(run_blocks(self.blocks, tokens, layout, recompute=self.recompute), layout)

    def forward_head(self, x: Tensor, pre_logits: bool = False, mask: Tensor | None = None) -> Tensor:
        """Tokens as `forward_features` gives them, and its mask, to logits; pre_logits: to what is classified."""
        if self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool == "avg":
            x = self._mean_patch(x[:, self.num_prefix_tokens :], mask)
        x = self.head_drop(x)
        return x if pre_logits or self.num_classes == 0 else self.head(x)

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
        """The patches after blocks, and unless intermediates_only the tokens of `forward_features` before them.

        indices: which blocks; a number: the last so many; None: all. norm: after the final norm. output_fmt: "NCHW" or "NLC".
        return_prefix_tokens: pairs of patches and class token (B, P, dim) instead of patches.
        """
        check_format("DeiT", output_fmt)
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
        return features if intermediates_only else (self._last(tokens, layout), features)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops what the features of these blocks do not need; returns the indices counted from the start."""
        take, last = feature_take_indices(len(self.blocks), indices)
        self._prune_rest(take, last, prune_norm, prune_head)
        self.blocks = self.blocks[: last + 1]
        return take

    def set_input_size(self, img_size: int | Grid) -> None:
        """Makes another size the native one, for good: tables are resized to it."""
        self.img_size = as_grid("img_size", img_size)
        self._remember(img_size=self.img_size)
        grid = Layout(self.img_size).shrunk(self.stride).grid
        self.pos_embed.resize(grid)
        for module in self.blocks.modules():
            if isinstance(module, AttentionLayer):
                module.set_grid(grid)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keeps only the inputs of blocks for backward and computes the rest again: less memory, more time."""
        self.recompute = enable

    def no_weight_decay(self) -> set[str]:
        """The class token and the positions of tokens, as DeiT has it; the key tables are decayed."""
        return {"cls_token", "pos_embed.rows"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """How timm groups parameters for layer-wise learning rates; there are no coarser parts than blocks."""
        return {
            "stem": r"^(?:cls_token|pos_embed|patch_embed)",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^(?:norm|feature_norms)", (99999,))],
        }

    def _embed(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Layout]:
        image, layout = self._enter(x, mask)
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

    def _last(self, tokens: Tensor, layout: Layout) -> Tensor:
        tokens, exists = self.norm(tokens), layout.token_mask(self.num_prefix_tokens)
        return tokens if exists is None else tokens.masked_fill(~exists[..., None], 0.0)

    def _mean_patch(self, patches: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return patches.mean(dim=1)
        return mean_of_existing(patches.mT, Layout((mask.shape[1], mask.shape[2]), mask).shrunk(self.stride))


VARIANTS: dict[str, dict[str, Any]] = {
    "tiny": {"dims": 192, "num_heads": 3},
    "small": {"dims": 384, "num_heads": 6, "drop_path_rate": 0.1},
    "base": {"dims": 768, "num_heads": 12, "drop_path_rate": 0.1},
}
