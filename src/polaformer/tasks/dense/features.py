"""A pyramid backbone as the feature extractor of a dense task.

# B batch, C channels, H height, W width
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from polaformer.attention.layer.token_table import TokenTable
from polaformer.attention.layer.window_attention import RelativePositions
from polaformer.backbones import create_model
from polaformer.backbones.pyramid import Pyramid
from polaformer.backbones.registry import MODELS, check_name
from polaformer.errors import SettingsError

STRIDES = (4, 8, 16, 32)  # of the stages of the published pyramids


class Features(nn.Module):
    """Maps images and their pixel mask to one feature map per stage, from `first_stage` on.

    Without its classifier, its final norm and the norms of unused features, so that every parameter gets a gradient.
    feature_norms: a LayerNorm per feature map; None: as in the published code for dense tasks, where Swin has them, PVT has
        none, and PVTv2 ends every stage with a norm anyway.
    options: other arguments of `create_model`: attention, img_size, dims, depths, drop_path_rate, … Raises SettingsError for
        those that do not go together.
    """

    def __init__(self, name: str, *, feature_norms: bool | None = None, first_stage: int = 0, **options: Any) -> None:
        super().__init__()
        check_pyramid(name)
        norms = MODELS[name].family.dense_norms if feature_norms is None else feature_norms
        try:
            backbone = create_model(name, num_classes=0, feature_norms=norms, **options)
        except (ValueError, TypeError) as error:
            raise SettingsError(f"backbone {name}: {error}") from error
        assert isinstance(backbone, Pyramid)
        self.backbone, self.first_stage = backbone, first_stage
        info = backbone.feature_info[first_stage:]
        if not info:
            raise SettingsError(
                f"{name} has {len(backbone.stages)} stages, but features are needed from stage {first_stage} on"
            )
        self.channels: list[int] = [one["num_chs"] for one in info]
        self.strides: list[int] = [one["reduction"] for one in info]
        self.indices = list(range(first_stage, len(backbone.stages)))
        backbone.prune_intermediate_layers(self.indices, prune_norm=True)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """Images (B, 3, H, W) and the mask (B, H, W) of their pixels to maps (B, C, H/stride, W/stride), zero outside.

        An image gets the same features alone as in a padded batch. A mask that is True everywhere costs nothing.
        """
        if mask is not None and not mask.is_meta and bool(mask.all()):
            mask = None
        found = self.backbone.forward_intermediates(images, self.indices, intermediates_only=True, mask=mask)
        assert isinstance(found, list)
        return found

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The backbone's groups of parameters, for frozen stages and layer-wise learning rates."""
        return within("backbone", self.backbone.group_matcher(coarse))

    def no_weight_decay(self) -> set[str]:
        """The tables of positions: of keys, of patches, and relative ones in windows."""
        return {
            f"{name}.{table}"
            for kind, table in ((TokenTable, "rows"), (RelativePositions, "table"))
            for name, module in self.named_modules()
            if isinstance(module, kind)
        }

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keeps only the inputs of the backbone's blocks for backward: less memory, more time."""
        self.backbone.set_grad_checkpointing(enable)


def within(module: str, matcher: dict[str, Any]) -> dict[str, Any]:
    """The group_matcher of a module as that of the model that has it under the given name."""
    prefix = rf"^{re.escape(module)}\."

    def prefixed(patterns: Any) -> Any:
        if isinstance(patterns, str):
            return prefix + patterns.removeprefix("^")
        return [(prefixed(pattern), order) for pattern, order in patterns]

    return {name: prefixed(patterns) for name, patterns in matcher.items()}


def check_pyramid(name: str) -> None:
    """Raises SettingsError unless a backbone of that name exists and has feature maps of several strides."""
    try:
        check_name(name)
    except ValueError as error:
        raise SettingsError(f"backbone: {error}") from error
    if not issubclass(MODELS[name].family, Pyramid):
        raise SettingsError(f"backbone is {name}, which has a single stride; choose a pyramid: a PVT, PVTv2 or Swin")


def strides_of(name: str, options: Mapping[str, Any]) -> tuple[int, ...]:
    """The strides of the stages of `create_model(name, **options)`, unbuilt; raises SettingsError unless it is a pyramid."""
    check_pyramid(name)
    variant = MODELS[name]
    try:
        stages = variant.family.config_type.of(variant.options | dict(options)).stages()
    except (ValueError, TypeError) as error:
        raise SettingsError(f"backbone {name}: {error}") from error
    return tuple(stage.reduction for stage in stages)
