"""What a weights file stores about a detector: everything that is needed to build it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import nn

from polaformer.tasks.dense.description import DenseDescription
from polaformer.tasks.dense.features import Features
from polaformer.tasks.dense.fpn import FeaturePyramid
from polaformer.tasks.detection.cascade import build_cascade
from polaformer.tasks.detection.detector import Detector
from polaformer.tasks.detection.heads import BOX_HEADS
from polaformer.tasks.detection.mask_rcnn import build_mask_rcnn
from polaformer.tasks.detection.retinanet import build_retinanet
from polaformer.tasks.detection.stage import BOX_LOSSES

RETINANET, MASK_RCNN, CASCADE = "retinanet", "mask-rcnn", "cascade-mask-rcnn"
DETECTORS = (RETINANET, MASK_RCNN, CASCADE)
MOST = {"num_classes": 100_000, "width": 8192, "box_width": 65_536, "mask_width": 8192, "num_samples": 100_000}
MOST |= {"num_proposals": 1_000_000, "max_detections": 1_000_000}
REGIONS_ONLY = ("box_head", "box_loss", "class_agnostic", "box_width", "mask_width", "num_samples", "num_proposals")


@dataclass(frozen=True, kw_only=True)
class DetectorDescription(DenseDescription):
    """The arguments of a detector; None stands for the published value. Raises SettingsError for anything implausible."""

    noun: ClassVar[str] = "detector"
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "detector": DETECTORS,
        "box_head": BOX_HEADS,
        "box_loss": (*BOX_LOSSES, None),
        "class_agnostic": (True, False, None),
    }
    most: ClassVar[Mapping[str, int]] = MOST
    ranges: ClassVar[Mapping[str, float]] = {"anchor_scale": 1000.0, "score_threshold": 1.0, "nms_threshold": 1.0}
    positive: ClassVar[tuple[str, ...]] = ("anchor_scale",)
    optional: ClassVar[tuple[str, ...]] = ("anchor_scale", "num_proposals")

    detector: str
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
        """Options of regions that RetinaNet does not have."""
        if self.detector != RETINANET:
            return []
        default = {one.name: one.default for one in fields(self)}
        changed = [name for name in REGIONS_ONLY if getattr(self, name) != default[name]]
        return [f"{name} is {getattr(self, name)!r}, but {RETINANET} has no regions; leave it out" for name in changed]

    @property
    def has_masks(self) -> bool:
        """Whether the detector also segments the objects."""
        return self.detector != RETINANET

    def build(self) -> Detector:
        """A new detector."""
        is_retinanet = not self.has_masks
        features = Features(self.backbone, first_stage=int(is_retinanet), **self.arguments_of_backbone())
        pyramid = FeaturePyramid(features.channels, self.width, "convolutions" if is_retinanet else "pool", features.strides)
        return Detector(features, pyramid, self._heads())

    def _heads(self) -> nn.Module:
        options: dict[str, Any] = {name: getattr(self, name) for name in ("score_threshold", "nms_threshold", "max_detections")}
        given = {name: getattr(self, name) for name in ("anchor_scale", *REGIONS_ONLY) if getattr(self, name) is not None}
        if self.detector == RETINANET:
            scale = {name: given[name] for name in given if name == "anchor_scale"}
            return build_retinanet(self.width, self.num_classes, **scale, **options)
        build = build_mask_rcnn if self.detector == MASK_RCNN else build_cascade
        return build(self.width, self.num_classes, **given, **options)
