"""The base of detectors and segmenters: a backbone's features, and what training asks of a model with a backbone."""

from typing import Any

from torch import nn

from polaformer.tasks.dense.features import within


class DenseModel(nn.Module):
    """A model around `features`, usually a `Features`; a subclass adds the rest."""

    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.features = features

    @property
    def backbone(self) -> nn.Module:
        """The backbone, for its weights."""
        return self.features.get_submodule("backbone")

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The backbone's groups, for frozen stages and layer-wise learning rates; all other parameters come last."""
        return within("features", self.features.group_matcher(coarse))  # type: ignore[operator]

    def no_weight_decay(self) -> set[str]:
        """The backbone's tables of positions."""
        return {f"features.{name}" for name in self.features.no_weight_decay()}  # type: ignore[operator]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keeps only the inputs of the backbone's blocks for backward: less memory, more time."""
        self.features.set_grad_checkpointing(enable)  # type: ignore[operator]
