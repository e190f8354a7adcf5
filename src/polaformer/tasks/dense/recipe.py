"""What recipes of detection and segmentation share: the backbone, held-out images, normalisation. Needs no PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from polaformer.tasks.image_recipe import IMAGENET_MEAN, IMAGENET_STD, ImageRecipe, normalisation_problems


@dataclass(frozen=True, kw_only=True)
class DenseRecipe(ImageRecipe):
    """A recipe whose model has a pyramid as its backbone, and heads on the maps of all its stages."""

    model: str = "pola_pvt_tiny"
    """Name of the backbone, a PVT, PVTv2 or Swin; `polaformer models` lists them."""
    backbone: str | None = None
    """Weights for the backbone: ours, the authors', timm's, or the backbone of an mmdetection or mmsegmentation file."""
    val_share: float = 0.1
    """Share of the images to hold out if the data have no validation split; 0: validate on the training images."""
    hflip: float = 0.5
    """Probability of flipping a training image horizontally."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Mean of each channel, for normalisation."""
    std: tuple[float, ...] = IMAGENET_STD
    """Standard deviation of each channel, for normalisation."""

    def problems(self) -> list[str]:
        """All problems with the values, one line each; needs neither the data nor PyTorch."""
        found = super().problems()
        if self.checkpoint is not None and self.backbone is not None:
            found.append("checkpoint and backbone are both given; give one: a whole model, or weights of its backbone")
        if not 0 <= self.val_share < 1:
            found.append(f"val_share is {self.val_share}; give a number in [0, 1)")
        return found + normalisation_problems(self.mean, self.std) + self.share_problems("hflip")

    def share_problems(self, *names: str) -> list[str]:
        """The fields of these names that are not in [0, 1]."""
        return [f"{n} is {getattr(self, n)}; give a number in [0, 1]" for n in names if not 0 <= getattr(self, n) <= 1]

    def count_problems(self, names: Sequence[str]) -> list[str]:
        """The fields of these names that are below 1; None is allowed."""
        values = {name: getattr(self, name) for name in names}
        return [f"{n} is {v}; give an integer ≥ 1" for n, v in values.items() if v is not None and v < 1]

    def absolute_data(self, data: str) -> str:
        """The data as a string that is valid from any working directory."""
        raise NotImplementedError(f"{type(self).__name__} does not implement absolute_data()")

    def values_with_absolute_paths(self) -> dict[str, Any]:
        """The options for JSON, valid from any working directory."""
        from os.path import abspath

        values = super().values_with_absolute_paths()
        data = None if self.data is None else self.absolute_data(self.data)
        return values | {"data": data, "backbone": None if self.backbone is None else abspath(self.backbone)}

    def without_weights(self) -> Self:
        """The recipe without the weights that it starts from."""
        return replace(super().without_weights(), backbone=None)
