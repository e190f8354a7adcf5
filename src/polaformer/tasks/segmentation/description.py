"""What a weights file stores about a segmenter: everything that is needed to build it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from polaformer.data.sources.label_sets import MAX_CLASSES
from polaformer.ops.grid import Grid
from polaformer.tasks.dense.description import DenseDescription
from polaformer.tasks.dense.features import STRIDES, Features
from polaformer.tasks.segmentation.fcn import FCN
from polaformer.tasks.segmentation.segmenter import Segmenter
from polaformer.tasks.segmentation.semantic_fpn import SemanticFPN
from polaformer.tasks.segmentation.upernet import UPerNet

SEMANTIC_FPN, UPERNET = "semantic-fpn", "upernet"
SEGMENTERS = (SEMANTIC_FPN, UPERNET)
AUXILIARY_WEIGHT = 0.4
_FPN_WIDTH = 256


@dataclass(frozen=True, kw_only=True)
class SegmenterDescription(DenseDescription):
    """The arguments of a segmenter; None stands for the published value. Raises SettingsError for anything implausible."""

    noun: ClassVar[str] = "segmenter"
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {"segmenter": SEGMENTERS, "auxiliary": (True, False, None)}
    most: ClassVar[Mapping[str, int]] = {
        "num_classes": MAX_CLASSES,
        "fpn_width": 8192,
        "head_width": 8192,
        "auxiliary_width": 8192,
    }
    ranges: ClassVar[Mapping[str, float]] = {"dropout": 0.99}
    optional: ClassVar[tuple[str, ...]] = ("head_width",)

    segmenter: str
    fpn_width: int = _FPN_WIDTH
    """Channels of the feature pyramid of Semantic FPN."""
    head_width: int | None = None
    """Channels of the head; None: 128 for Semantic FPN, 512 for UPerNet."""
    auxiliary: bool | None = None
    """Whether a head on the third stage is trained too, with 0.4 of the weight; None: only with UPerNet."""
    auxiliary_width: int = 256
    """Channels of that head."""
    dropout: float = 0.1
    """Share of the channels that are dropped before the classification."""

    def problems(self) -> list[str]:
        """An option of Semantic FPN that UPerNet does not have."""
        if self.segmenter == UPERNET and self.fpn_width != _FPN_WIDTH:
            return [f"fpn_width is {self.fpn_width!r}, but the pyramid of {UPERNET} has head_width channels; leave it out"]
        return []

    @property
    def has_auxiliary(self) -> bool:
        """Whether there is an auxiliary head."""
        return self.segmenter == UPERNET if self.auxiliary is None else self.auxiliary

    def build(self) -> Segmenter:
        """A new segmenter."""
        features = Features(self.backbone, **self.arguments_of_backbone())
        head, auxiliary = self._head(features.channels), None
        if self.has_auxiliary:
            auxiliary = FCN(features.channels, self.num_classes, width=self.auxiliary_width, dropout=self.dropout)
        return Segmenter(features, head, auxiliary, AUXILIARY_WEIGHT)

    def _head(self, channels: Sequence[int]) -> nn.Module:
        options: dict[str, Any] = {"dropout": self.dropout} | ({} if self.head_width is None else {"width": self.head_width})
        if self.segmenter == UPERNET:
            return UPerNet(channels, self.num_classes, **options)
        return SemanticFPN(channels, self.num_classes, fpn_width=self.fpn_width, **options)


def needs_two_images(description: SegmenterDescription, size: Grid | None = None) -> bool:
    """Whether batch norm cannot train on one image (of that size) at a time: one value per channel has no variance.

    So it is for UPerNet, which averages the whole image, and for images within one cell of the coarsest stage.
    """
    return description.segmenter == UPERNET or (size is not None and max(size) <= STRIDES[-1])
