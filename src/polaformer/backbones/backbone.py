"""What all backbones have in common: timm's verbs, any input size, a classifier.

# B batch, C channels, H height, W width, N = H·W tokens
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from timm.layers import calculate_drop_path_rates
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from polaformer.attention import AttentionLayer
from polaformer.backbones.token_grid import Layout, pixel_layout
from polaformer.ops.grid import Grid
from polaformer.ops.precision import computing_dtype

FORMATS = ("NCHW", "NLC")


class Stage(nn.Module):
    """What the stages of the hierarchical backbones share; a subclass makes tokens of an image first."""

    def __init__(self, dim: int, stride: int, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.dim, self.stride, self.recompute = dim, stride, False
        self.blocks = nn.ModuleList(blocks)

    def set_grid(self, grid: Grid) -> None:
        """Makes the grid the native size of all tables of the stage."""
        for module in self.modules():
            if isinstance(module, AttentionLayer):
                module.set_grid(grid)


class Backbone(nn.Module):
    """A hierarchy of stages with a classifier; called as `model(images, mask=None)`.

    A stage is called as `stage(image, layout)`, gives tokens and their layout, and has `dim`, `stride` and
    `recompute` (gradient checkpointing). Subclasses make `stages` and `norm`; norm is applied to the last stage's tokens.

    Images of any size and aspect ratio are taken. mask (B, H, W), True where a pixel belongs to its image: for batches of
    unequal images, padded on the right and below. What lies outside influences nothing, and each image has the features that
    it has alone. Sizes are read from the mask: under torch.compile every new set of them is compiled anew.
    """

    translate: Callable[..., None]  # renames published parameters in a state dict, in place
    stages: Any  # nn.ModuleList of Stage
    norm: nn.Module
    pools: tuple[str, ...] = ("avg", "")

    def __init__(
        self,
        *,
        img_size: int | Grid,
        patch_size: int,
        in_chans: int,
        num_classes: int,
        global_pool: str,
        drop_rate: float,
        proj_drop_rate: float,
        drop_path_rate: float,
    ) -> None:
        super().__init__()
        check_whole("patch_size", patch_size, 1)
        check_whole("in_chans", in_chans, 1)
        check_whole("num_classes", num_classes, 0)
        check_rate("drop_rate", drop_rate)
        check_rate("proj_drop_rate", proj_drop_rate)
        check_rate("drop_path_rate", drop_path_rate)
        self.img_size, self.in_chans = as_grid("img_size", img_size), in_chans
        self.num_classes, self.global_pool = num_classes, self._checked_pool(global_pool)
        self.head_drop = nn.Dropout(drop_rate)
        self.register_load_state_dict_pre_hook(type(self).translate)
        self.feature_norms: nn.ModuleList | None = None
        self.pruned = False
        self.built_from: dict[str, Any] = {}
        self.feature_info: list[dict[str, Any]] = []

    def build_stages(
        self,
        depths: Sequence[int],
        make_block: Callable[[int, int, Grid, float], nn.Module],
        make_stage: Callable[[int, int, Grid, list[nn.Module]], Stage],
        *,
        patch_size: int,
        drop_path_rate: float,
        feature_norms: bool,
        norm_eps: float,
    ) -> None:
        """Makes the stages, and what depends on them: features, their norms, the classifier.

        make_block: from stage, block, native grid and drop path rate, which grows linearly over all blocks.
        make_stage: from stage, stride, native grid and blocks.
        """
        layout, reduction, stages = Layout(self.img_size), 1, []
        for i, drop_paths in enumerate(calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)):
            stride = patch_size if i == 0 else 2
            layout, reduction = layout.shrunk(stride), reduction * stride
            blocks = [make_block(i, j, layout.grid, drop_path) for j, drop_path in enumerate(drop_paths)]
            stages.append(make_stage(i, stride, layout.grid, blocks))
            self.feature_info.append({"num_chs": stages[-1].dim, "reduction": reduction, "module": f"stages.{i}"})
        self.stages = nn.ModuleList(stages)
        self.num_features = self.head_hidden_size = self.feature_info[-1]["num_chs"]
        if feature_norms:
            self.feature_norms = nn.ModuleList(nn.LayerNorm(info["num_chs"], eps=norm_eps) for info in self.feature_info)
        self.head = self._new_head()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Images (B, C, H, W) to logits (B, classes), or to features if there is no classifier."""
        return self.forward_head(self.forward_features(x, mask), mask=mask)

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Images (B, C, H, W) to the last stage's features, (B, C, H/stride, W/stride), zero outside the images."""
        image, layout = self._enter(x, mask)
        for stage in self.stages:
            tokens, layout = stage(image, layout)
            image = layout.image(tokens)
        return layout.image(self.norm(tokens))

    def forward_head(self, x: Tensor, pre_logits: bool = False, mask: Tensor | None = None) -> Tensor:
        """Features as `forward_features` gives them, and its mask, to logits; pre_logits: to the pooled features."""
        if self.global_pool == "avg":
            x = x.mean(dim=(-2, -1)) if mask is None else mean_of_existing(x.flatten(2), self._last_layout(mask))
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
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The features of stages, and unless intermediates_only those of `forward_features` before them.

        indices: which stages; a number: the last so many; None: all. norm: the last stage's features after the final norm.
        With `feature_norms` every stage's features go through a norm of their own. output_fmt: "NCHW" or "NLC" (tokens).
        """
        check_format(type(self).__name__, output_fmt)
        take, last = feature_take_indices(len(self.stages), indices)
        image, layout = self._enter(x, mask)
        features = []
        for index, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            tokens, layout = stage(image, layout)
            image = layout.image(tokens)
            if index in take:
                feature = layout.image(self._normed(tokens, index, norm))
                features.append(feature.contiguous() if output_fmt == "NCHW" else feature.flatten(2).mT)
        return features if intermediates_only else (layout.image(self.norm(tokens)), features)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops what the features of these stages do not need; returns the indices counted from the start."""
        take, last = feature_take_indices(len(self.stages), indices)
        self._prune_rest(take, last, prune_norm, prune_head)
        self.stages = self.stages[: last + 1]
        return take

    def get_classifier(self) -> nn.Module:
        """The last layer."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier; none if num_classes is 0."""
        check_whole("num_classes", num_classes, 0)
        self.global_pool = self.global_pool if global_pool is None else self._checked_pool(global_pool)
        self.num_classes = num_classes
        self._remember(num_classes=num_classes, global_pool=self.global_pool)
        old = next(self.parameters())
        self.head = self._new_head().to(old.device, old.dtype).train(self.training)

    def set_input_size(self, img_size: int | Grid) -> None:
        """Makes another size the native one, for good: tables are resized to it.

        Any size can be given to `forward` as it is; this saves the resizing there, and gives training tables of that size.
        """
        self.img_size = as_grid("img_size", img_size)
        self._remember(img_size=self.img_size)
        layout = Layout(self.img_size)
        for stage in self.stages:
            layout = layout.shrunk(stage.stride)
            stage.set_grid(layout.grid)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keeps only the inputs of blocks for backward and computes the rest again: less memory, more time."""
        for stage in self.stages:
            stage.recompute = enable

    def no_weight_decay(self) -> set[str]:
        """Parameters without weight decay, besides vectors; as the authors have it, powers, scales and tables are decayed."""
        return set()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """How timm groups parameters for layer-wise learning rates."""
        blocks = [(r"^stages\.(\d+)\.blocks\.(\d+)", None), (r"^stages\.(\d+)\.", (0,)), (r"^(?:norm|feature_norms)", (99999,))]
        return {"stem": r"^stages\.0\.(?:patch_embed|pos_embed)", "blocks": r"^stages\.(\d+)" if coarse else blocks}

    def _enter(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Layout]:
        layout = pixel_layout(type(self).__name__, x, mask, self.in_chans, next(self.parameters()))
        return layout.cleared(x), layout

    def _remember(self, **changes: Any) -> None:
        """Keeps `built_from` true, so that a saved file says how to make the model as it is."""
        if self.built_from:
            self.built_from = self.built_from | changes

    def _normed(self, tokens: Tensor, index: int, final: bool) -> Tensor:
        if self.feature_norms is not None:
            return self.feature_norms[index](tokens)
        return self.norm(tokens) if final and index == len(self.stages) - 1 else tokens

    def _prune_rest(self, take: list[int], last: int, prune_norm: bool, prune_head: bool) -> None:
        if last + 1 < len(self.feature_info) and not prune_head:
            raise ValueError(f"{type(self).__name__}: the classifier is for the last features; prune it too, or keep those")
        self.pruned = True
        self.num_features = self.head_hidden_size = self.feature_info[last]["num_chs"]
        if self.feature_norms is not None:
            kept = self.feature_norms[: last + 1]
            self.feature_norms = nn.ModuleList(norm if i in take else nn.Identity() for i, norm in enumerate(kept))
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")

    def _last_layout(self, mask: Tensor) -> Layout:
        layout = Layout((mask.shape[1], mask.shape[2]), mask)
        for stage in self.stages:
            layout = layout.shrunk(stage.stride)
        return layout

    def _new_head(self) -> nn.Module:
        if self.num_classes == 0:
            return nn.Identity()
        head = nn.Linear(self.num_features, self.num_classes)
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        return head

    def _checked_pool(self, global_pool: str) -> str:
        if global_pool not in self.pools:
            allowed = ", ".join(repr(pool) for pool in self.pools)
            raise ValueError(f"{type(self).__name__}: global_pool is {global_pool!r}; choose one of {allowed}")
        return global_pool


def as_grid(name: str, size: Any) -> Grid:
    """A size given as a number or as (height, width); raises unless both are positive whole numbers."""
    pair = tuple(size) if isinstance(size, Sequence | torch.Size) and not isinstance(size, str) else (size, size)
    if len(pair) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in pair):
        raise ValueError(f"{name} is {size!r}; give a whole number of pixels, or (height, width)")
    return pair[0], pair[1]


def check_dims(dims: Any) -> tuple[int, ...]:
    """The channels of each stage; raises unless it is a sequence of positive whole numbers."""
    if not isinstance(dims, Sequence) or isinstance(dims, str) or not dims:
        raise ValueError(f"dims is {dims!r}; give the channels of each stage, such as (64, 128, 320, 512)")
    return per_stage("dims", dims, len(dims), whole=True)


def per_stage(name: str, values: Any, num_stages: int, *, whole: bool = False) -> tuple[Any, ...]:
    """One value a stage, from one for all or from a sequence of the right length; raises for any other length.

    whole: raises for what is no whole number too.
    """
    found = tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else (values,) * num_stages
    if len(found) != num_stages:
        raise ValueError(
            f"{name} is {values!r}, {len(found)} values for {num_stages} stages; give one for each, or one for all"
        )
    kinds = int if whole else int | float
    if any(isinstance(value, bool) or not isinstance(value, kinds) or value <= 0 for value in found):
        raise ValueError(f"{name} is {values!r}; give positive {'whole ' if whole else ''}numbers")
    return found


def mean_of_existing(features: Tensor, layout: Layout) -> Tensor:
    """The mean (B, C) of features (B, C, N) over the tokens that exist, in float32 at least: a sum can leave half precision."""
    exists = layout.token_mask()
    assert exists is not None
    wide = features.to(computing_dtype(features)).masked_fill(~exists[:, None], 0.0)
    return (wide.sum(dim=-1) / exists.sum(dim=-1, keepdim=True)).to(features.dtype)


def check_whole(name: str, value: Any, least: int) -> None:
    """Raises unless the value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; give a whole number of at least {least}")


def check_rate(name: str, value: Any) -> None:
    """Raises unless the value is a share that can be dropped."""
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name} is {value!r}; give at least 0 and below 1")


def check_format(name: str, output_fmt: str) -> None:
    """Raises unless the format of features is known."""
    if output_fmt not in FORMATS:
        raise ValueError(f"{name}: output_fmt is {output_fmt!r}; choose one of {', '.join(FORMATS)}")
