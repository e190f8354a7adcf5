"""What a weights file stores about a detector: everything that is needed to build it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import nn

from polaformer.tasks.dense.description import DenseDescription
from polaformer.tasks.dense.features import Features
from polaformer.tasks.dense.fpn import FeaturePyramid
from polaformer.tasks.detection.cascade import build_cascade
from polaformer.tasks.detection.detector import Detector
from polaformer.tasks.detection.detector_facts import DETECTORS, OF_REGIONS, DetectorFacts, DetectorName
from polaformer.tasks.detection.heads import BOX_HEADS
from polaformer.tasks.detection.mask_rcnn import build_mask_rcnn
from polaformer.tasks.detection.retinanet import build_retinanet
from polaformer.tasks.detection.stage import BOX_LOSSES

BUILDERS: dict[DetectorName, Callable[..., nn.Module]] = {
    "retinanet": build_retinanet,
    "mask-rcnn": build_mask_rcnn,
    "cascade-mask-rcnn": build_cascade,
}
MAX = {"num_classes": 100_000, "width": 8192, "box_width": 65_536, "mask_width": 8192, "num_samples": 100_000}
MAX |= {"num_proposals": 1_000_000, "max_detections": 1_000_000}


@dataclass(frozen=True, kw_only=True)
class DetectorDescription(DenseDescription):
    """The arguments of a detector; None stands for the published value. Raises SettingsError for anything implausible."""

    noun: ClassVar[str] = "detector"
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "detector": tuple(DETECTORS),
        "box_head": BOX_HEADS,
        "box_loss": (*BOX_LOSSES, None),
        "class_agnostic": (True, False, None),
    }
    most: ClassVar[Mapping[str, int]] = MAX
    ranges: ClassVar[Mapping[str, float]] = {"anchor_scale": 1000.0, "score_threshold": 1.0, "nms_threshold": 1.0}
    positive: ClassVar[tuple[str, ...]] = ("anchor_scale",)
    optional: ClassVar[tuple[str, ...]] = ("anchor_scale", "num_proposals")

    detector: DetectorName
    width: int = 256
    """Channels of the feature pyramid, and of RetinaNet's heads."""
    anchor_scale: float | None = None
    """Side of the smallest anchors, in strides; None: 4 for RetinaNet, else 8."""
    box_head: str = "2fc"
    """2fc: two linear layers; 4conv1fc: four convolutions with batch norm and a linear layer."""
    box_loss: str | None = None
    """l1, smooth-l1 or giou; None: l1, in a cascade smooth-l1, and giou with 4conv1fc there."""
    class_agnostic: bool | None = None
    """One box for all classes; None: in a cascade without 4conv1fc."""
    box_width: int = 1024
    """Channels of the linear layers of the box heads."""
    mask_width: int = 256
    """Channels of the convolutions of the mask heads."""
    num_samples: int = 512
    """Regions per image in training."""
    num_proposals: int | None = None
    """Proposals per image; None: 1000, and 2000 in the training of a cascade."""
    score_threshold: float = 0.05
    nms_threshold: float = 0.5
    max_detections: int = 100

    def problems(self) -> list[str]:
        """Options of regions that detectors without regions do not have."""
        if self.detector not in tuple(DETECTORS) or self.has_masks:
            return []
        default = {one.name: one.default for one in fields(self)}
        changed = [name for name in OF_REGIONS if getattr(self, name) != default[name]]
        return [f"{name} is {getattr(self, name)!r}, but {self.detector} has no regions; leave it out" for name in changed]

    @property
    def has_masks(self) -> bool:
        """Whether the detector also segments the objects."""
        return self.facts.has_masks

    @property
    def facts(self) -> DetectorFacts:
        """What sets the detector apart."""
        return DETECTORS[self.detector]

    def build(self) -> Detector:
        """A new detector."""
        features = Features(self.backbone, first_stage=self.facts.first_stage, **self.arguments_of_backbone())
        pyramid = FeaturePyramid(features.channels, self.width, self.facts.extra_levels, features.strides)
        return Detector(features, pyramid, self._heads())

    def _heads(self) -> nn.Module:
        names = ("score_threshold", "nms_threshold", "max_detections", "anchor_scale", *(OF_REGIONS if self.has_masks else ()))
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return BUILDERS[self.detector](self.width, self.num_classes, **given)
