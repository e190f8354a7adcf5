"""The base class of all backbones: classifier, pruning to features, timm's methods.

# B batch, C channels, H height, W width, N = H·W tokens
"""

from collections.abc import Callable
from inspect import signature
from typing import Any, ClassVar

from timm.models._features import feature_take_indices
from torch import Tensor, nn

from polaformer.arguments import check_integer
from polaformer.attention import AttentionLayer
from polaformer.attention.layer.seeds import separate_seeds
from polaformer.backbones.config import WHERE, BackboneConfig, as_grid
from polaformer.backbones.token_layout import TokenLayout, pixel_layout
from polaformer.ops.grid import Grid
from polaformer.ops.precision import computing_dtype

FORMATS = ("NCHW", "NLC")


class Backbone(nn.Module):
    """A vision transformer with a classifier; called as `model(images, mask=None)`.

    Images may have any size and aspect ratio. mask (B, H, W) is True where a pixel belongs to its image: for batches of images
    of different sizes, padded on the right and below. Masked positions have no effect, and each image gets the same features
    as alone. Sizes are read from the mask: torch.compile recompiles for every new set of them.

    A subclass takes the fields of its `config_type`, builds `norm` and the modules named by `units`, and calls `finish`.
    """

    config_type: ClassVar[type[BackboneConfig]]
    units: ClassVar[str]  # the attribute whose modules return one feature map each: "stages" or "blocks"
    first_conv: ClassVar[str]  # the name of the first convolution, for timm
    pools: tuple[str, ...] = ("avg", "")
    dense_norms: ClassVar[bool] = False  # whether the published models for dense tasks have a norm per feature map
    translate: Callable[..., None]  # renames published parameters in a state dict, in place
    norm: nn.Module

    def __init_subclass__(cls) -> None:
        if "config_type" in cls.__dict__:
            cls.__signature__ = signature(cls.config_type)  # type: ignore[attr-defined]

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.img_size, self.in_chans, self.attention = config.grid, config.in_chans, config.mechanisms
        self.num_classes, self.global_pool = config.num_classes, self._checked_pool(config.global_pool)
        self.head_drop = nn.Dropout(config.drop_rate)
        self.register_load_state_dict_pre_hook(type(self).translate)
        self.feature_norms: nn.ModuleList | None = None
        self.pruned = False
        self.built_from: dict[str, Any] = {}
        self.feature_info: list[dict[str, Any]] = []

    def finish(self, config: BackboneConfig, feature_info: list[dict[str, Any]], norm_eps: float) -> None:
        """Adds the norms of the features and the classifier; gives each layer of seeded attention another seed."""
        self.feature_info = feature_info
        self.num_features = self.head_hidden_size = feature_info[-1]["num_chs"]
        if config.feature_norms:
            self.feature_norms = nn.ModuleList(nn.LayerNorm(info["num_chs"], eps=norm_eps) for info in feature_info)
        self.head = self._new_head()
        if "seed" not in (config.attention_options or {}):
            separate_seeds(self)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Images (B, C, H, W) to logits (B, classes), or to pooled features without a classifier."""
        return self.forward_head(self.forward_features(x, mask), mask=mask)

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Images (B, C, H, W) to the last features, after the norm."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False, mask: Tensor | None = None) -> Tensor:
        """The result of `forward_features`, and its mask, to logits; pre_logits: to the pooled features."""
        x = self.head_drop(self._pool(x, mask))
        return x if pre_logits or self.num_classes == 0 else self.head(x)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Removes the modules that the given features do not need; returns their indices, counted from the start."""
        units = getattr(self, self.units)
        take, last = feature_take_indices(len(units), indices)
        if last + 1 < len(self.feature_info) and not prune_head:
            raise ValueError(f"{type(self).__name__}: the classifier needs the last features; prune it too, or keep those")
        self.pruned = True
        self.num_features = self.head_hidden_size = self.feature_info[last]["num_chs"]
        if self.feature_norms is not None:
            kept = self.feature_norms[: last + 1]
            self.feature_norms = nn.ModuleList(norm if i in take else nn.Identity() for i, norm in enumerate(kept))
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        setattr(self, self.units, units[: last + 1])
        return take

    def get_classifier(self) -> nn.Module:
        """The last layer."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the classifier; num_classes=0 removes it."""
        check_integer(type(self).__name__, "num_classes", num_classes, least=0)
        self.global_pool = self.global_pool if global_pool is None else self._checked_pool(global_pool)
        self.num_classes = num_classes
        self._remember(num_classes=num_classes, global_pool=self.global_pool)
        old = next(self.parameters())
        self.head = self._new_head().to(old.device, old.dtype).train(self.training)

    def set_input_size(self, img_size: int | Grid) -> None:
        """Makes another size the native one permanently: tables are resized to it.

        `forward` accepts any size anyway; this saves resizing in every call, and training then learns tables of that size.
        """
        self.img_size = as_grid("img_size", img_size)
        self._remember(img_size=self.img_size)
        self._resize_tables(TokenLayout(self.img_size))

    def no_weight_decay(self) -> set[str]:
        """Parameters without weight decay, besides vectors; as in the authors' code, powers, scales and tables are decayed."""
        return set()

    def _pool(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The features (B, C) to classify, from those of `forward_features`."""
        raise NotImplementedError

    def _resize_tables(self, pixels: TokenLayout) -> None:
        raise NotImplementedError

    def _masked_images(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, TokenLayout]:
        """The images with zeros for masked pixels, and the layout of their pixels; raises for wrong inputs."""
        layout = pixel_layout(type(self).__name__, x, mask, self.in_chans, next(self.parameters()))
        return layout.cleared(x), layout

    def _remember(self, **changes: Any) -> None:
        """Keeps `built_from` up to date, so that a saved file states how to build the model in its current form."""
        if self.built_from:
            self.built_from = self.built_from | changes

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
            raise ValueError(f"{WHERE}: global_pool is {global_pool!r}; choose one of {allowed}")
        return global_pool


def set_native_grid(blocks: nn.Module, grid: Grid) -> None:
    """Makes the grid the native size of all attention tables in the blocks."""
    for module in blocks.modules():
        if isinstance(module, AttentionLayer):
            module.set_grid(grid)


def mean_of_existing(features: Tensor, layout: TokenLayout) -> Tensor:
    """The mean (B, C) of features (B, C, N) over the existing tokens, in at least float32: a sum can overflow fp16."""
    exists = layout.token_mask()
    assert exists is not None
    wide = features.to(computing_dtype(features)).masked_fill(~exists[:, None], 0.0)
    return (wide.sum(dim=-1) / exists.sum(dim=-1, keepdim=True)).to(features.dtype)
