"""What recipes for images share: unreadable images, and the backbone. Needs no PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from polaformer.tasks.attention_options import attention_option_problems, parse_attention_options
from polaformer.tasks.recipe import Recipe
from polaformer.tasks.task import ResumeOptions

ON_BAD_IMAGE = ("error", "skip")
PER_STAGE = ("dims", "depths", "num_heads", "mlp_ratios", "reductions")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalisation_problems(mean: Sequence[float], std: Sequence[float], *, or_one: bool = False) -> list[str]:
    """The problem with the mean and deviation of three channels, if any; or_one: one channel is allowed too."""
    fits = len(mean) in ((1, 3) if or_one else (3,)) and len(std) == len(mean)
    if fits and all(map(isfinite, (*mean, *std))) and all(one > 0 for one in std):
        return []
    return [f"mean is {mean} and std {std}; give three numbers each{', or one each' * or_one}, all finite, and std above 0"]


@dataclass(frozen=True, kw_only=True)
class ImageRecipe(Recipe):
    """A recipe whose samples are images and whose model has one of the backbones."""

    on_bad_image: str = "error"
    """What to do with an unreadable image: error ends the run, skip replaces it with another one."""
    max_bad_share: float = 0.001
    """Share of the images of an epoch that may be skipped before the run ends; one is always allowed."""
    model: str = "pola_swin_tiny"
    """Model name; `polaformer models` lists them."""
    attention: str | None = None
    """Mechanism of all stages, or one per stage, separated by commas; None: the model's own."""
    attention_options: tuple[str, ...] | None = None
    """Arguments of the attention layer and its mechanism as NAME=VALUE, such as gate=linear.
    Added to the recipe's own, which they replace by name; with another --attention they are all. None: as published."""
    patch_size: int | None = None
    """Patch size in pixels; None, here and for the next options: the model's own."""
    dims: tuple[int, ...] | None = None
    """Channels, one number per stage."""
    depths: tuple[int, ...] | None = None
    """Blocks, one number per stage."""
    num_heads: tuple[int, ...] | None = None
    """Attention heads, one number per stage."""
    mlp_ratios: tuple[float, ...] | None = None
    """Hidden width of the MLP relative to the width of the block, one number per stage."""
    reductions: tuple[int, ...] | None = None
    """Factor by which the key grid is smaller than the query grid along height and width, one per stage."""
    drop_path_rate: float | None = None
    """Largest drop path rate (stochastic depth) of the blocks."""

    def problems(self) -> list[str]:
        """All problems with the values, one line each."""
        found = super().problems() + attention_option_problems(self.attention_options)
        if self.on_bad_image not in ON_BAD_IMAGE:
            found.append(f"on_bad_image is {self.on_bad_image!r}; choose one of {', '.join(ON_BAD_IMAGE)}")
        if not 0 <= self.max_bad_share <= 1:
            found.append(f"max_bad_share is {self.max_bad_share}; give a number in [0, 1]")
        if self.drop_path_rate is not None and not 0 <= self.drop_path_rate < 1:
            found.append(f"drop_path_rate is {self.drop_path_rate}; give a number in [0, 1)")
        if self.patch_size is not None and self.patch_size < 1:
            found.append(f"patch_size is {self.patch_size}; give an integer ≥ 1")
        for name in PER_STAGE:
            values = getattr(self, name)
            if values is not None and (not values or any(not 0 < value < float("inf") for value in values)):
                found.append(f"{name} is {values}; give positive numbers, one per stage")
        return found

    def backbone_options(self) -> dict[str, Any]:
        """The arguments of `create_model` for the backbone, without its name and sizes."""
        names = ("attention", "patch_size", *PER_STAGE, "drop_path_rate")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.attention_options is not None:
            given["attention_options"] = parse_attention_options(self.attention_options)
        return given


@dataclass(frozen=True, kw_only=True)
class ImageResume(ResumeOptions):
    """What may change when a run on images resumes."""

    on_bad_image: Literal["error", "skip"] | None = None
    """What to do with an unreadable image from now on; unchanged by default."""
    max_bad_share: float | None = None
    """Share of the images of an epoch that may be skipped; unchanged by default."""
