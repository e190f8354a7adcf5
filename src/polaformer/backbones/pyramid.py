"""A pyramid of stages, as in PVT, PVTv2 and Swin: each stage has fewer and wider tokens than the one before.

# B batch, C channels, H height, W width, N = H·W tokens
"""

from collections.abc import Sequence
from typing import Any

from timm.models._features import feature_take_indices
from torch import Tensor, nn

from polaformer.arguments import check_choice
from polaformer.backbones.backbone import FORMATS, Backbone, mean_of_existing, set_native_grid
from polaformer.backbones.config import BackboneConfig, StageConfig
from polaformer.backbones.token_layout import TokenLayout
from polaformer.ops.grid import Grid


class Stage(nn.Module):
    """The base class of stages; a subclass adds the patch embedding, and maps an image and its layout to tokens and theirs."""

    def __init__(self, config: StageConfig, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.dim, self.stride, self.recompute = config.dim, config.stride, False
        self.blocks = nn.ModuleList(blocks)

    def set_grid(self, grid: Grid) -> None:
        """Makes the grid the native size of all tables of the stage."""
        set_native_grid(self, grid)


class Pyramid(Backbone):
    """A backbone whose features are the outputs of its stages; `norm` is applied to those of the last."""

    units, first_conv = "stages", "stages.0.patch_embed.proj"
    stages: Any  # nn.ModuleList of Stage

    def add_stages(self, config: BackboneConfig, stages: Sequence[Stage], norm_eps: float) -> None:
        """Adds the stages, and by `finish` what depends on their features."""
        self.stages = nn.ModuleList(stages)
        features = [(stage.dim, stage.reduction) for stage in config.stages()]
        info = [{"num_chs": dim, "reduction": ratio, "module": f"stages.{i}"} for i, (dim, ratio) in enumerate(features)]
        self.finish(config, info, norm_eps)

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Images (B, C, H, W) to the last stage's features, (B, C, H/stride, W/stride), zero outside the images."""
        image, layout = self._masked_images(x, mask)
        for stage in self.stages:
            tokens, layout = stage(image, layout)
            image = layout.image(tokens)
        return layout.image(self.norm(tokens))

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
        """The features of stages, preceded by those of `forward_features` unless intermediates_only.

        indices: which stages; an integer n: the last n; None: all. norm: apply the final norm to the last stage's features.
        With `feature_norms` the features of every stage get their own norm instead. output_fmt: "NCHW" or "NLC" (tokens).
        """
        check_choice(type(self).__name__, "output_fmt", output_fmt, FORMATS)
        take, last = feature_take_indices(len(self.stages), indices)
        image, layout = self._masked_images(x, mask)
        features = []
        for index, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            tokens, layout = stage(image, layout)
            image = layout.image(tokens)
            if index in take:
                feature = layout.image(self._normed(tokens, index, norm))
                features.append(feature.contiguous() if output_fmt == "NCHW" else feature.flatten(2).mT)
        return features if intermediates_only else (layout.image(self.norm(tokens)), features)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keeps only the inputs of blocks for backward and recomputes the rest: less memory, more time."""
        for stage in self.stages:
            stage.recompute = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """How timm groups parameters for layer-wise learning rates."""
        blocks = [(r"^stages\.(\d+)\.blocks\.(\d+)", None), (r"^stages\.(\d+)\.", (0,)), (r"^(?:norm|feature_norms)", (99999,))]
        return {"stem": r"^stages\.0\.(?:patch_embed|pos_embed)", "blocks": r"^stages\.(\d+)" if coarse else blocks}

    def _pool(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.global_pool != "avg":
            return x
        if mask is None:
            return x.mean(dim=(-2, -1))
        layout = TokenLayout((mask.shape[1], mask.shape[2]), mask)
        for stage in self.stages:
            layout = layout.shrunk(stage.stride)
        return mean_of_existing(x.flatten(2), layout)

    def _normed(self, tokens: Tensor, index: int, final: bool) -> Tensor:
        if self.feature_norms is not None:
            return self.feature_norms[index](tokens)
        return self.norm(tokens) if final and index == len(self.stages) - 1 else tokens

    def _resize_tables(self, pixels: TokenLayout) -> None:
        layout = pixels
        for stage in self.stages:
            layout = layout.shrunk(stage.stride)
            stage.set_grid(layout.grid)
