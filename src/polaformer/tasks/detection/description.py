"""What a weights file stores about a detector: everything that is needed to build it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from polaformer.backbones.fitting import misfits
from polaformer.errors import SettingsError, nearest
from polaformer.tasks.dense.features import Features, strides_of
from polaformer.tasks.dense.fpn import FeaturePyramid
from polaformer.tasks.detection.cascade import build_cascade
from polaformer.tasks.detection.detector import Detector
from polaformer.tasks.detection.detector_facts import DETECTORS, OF_REGIONS, DetectorFacts, DetectorName
from polaformer.tasks.detection.heads import BOX_HEADS, STRIDES
from polaformer.tasks.detection.mask_rcnn import build_mask_rcnn
from polaformer.tasks.detection.retinanet import build_retinanet
from polaformer.tasks.detection.stage import BOX_LOSSES
from polaformer.weights.errors import Misfits

BUILDERS: dict[DetectorName, Callable[..., nn.Module]] = {
    "retinanet": build_retinanet,
    "mask-rcnn": build_mask_rcnn,
    "cascade-mask-rcnn": build_cascade,
}
MAX = {"num_classes": 100_000, "width": 8192, "box_width": 65_536, "mask_width": 8192, "num_samples": 100_000}
MAX |= {"num_proposals": 1_000_000, "max_detections": 1_000_000}
MAX_OF_BACKBONE = 65_536  # for every number among its arguments
MAX_BLOCKS = 1000
NOT_OF_DESCRIPTION = ("num_classes", "global_pool", "feature_norms", "checkpoint", "features_only", "out_indices", "in_chans")


@dataclass(frozen=True, kw_only=True)
class DetectorDescription:
    """The arguments of a detector; None stands for the published value. Raises SettingsError for anything implausible.

    backbone: the name of a pyramid. backbone_options: other arguments of `create_model`, as JSON can hold them.
    """

    detector: DetectorName
    backbone: str
    num_classes: int
    backbone_options: Mapping[str, Any] = field(default_factory=dict)
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

    def __post_init__(self) -> None:
        problems = [*self._wrong_names(), *self._wrong_numbers(), *self._wrong_backbone()]
        if problems:
            raise SettingsError(problems)

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
        features = Features(self.backbone, first_stage=self.facts.first_stage, **_as_arguments(self.backbone_options))
        pyramid = FeaturePyramid(features.channels, self.width, self.facts.extra_levels, features.strides)
        return Detector(features, pyramid, self._heads())

    def _heads(self) -> nn.Module:
        names = ("score_threshold", "nms_threshold", "max_detections", "anchor_scale", *(OF_REGIONS if self.has_masks else ()))
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return BUILDERS[self.detector](self.width, self.num_classes, **given)

    def misfits(self, state: Mapping[str, Tensor]) -> Misfits:
        """What prevents the detector from having these parameters; allocates no memory for a detector as large as described."""
        with torch.device("meta"):
            return misfits(dict(state), self.build())

    def to_json(self) -> str:
        """The description as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "DetectorDescription":
        """The inverse of `to_json`; raises SettingsError for anything else."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SettingsError(f"the description of the detector is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise SettingsError(f"the description of the detector is a {type(found).__name__}; give a JSON object")
        known = [one.name for one in fields(cls)]
        problems = [
            f"detector: unknown key {key!r}; {nearest(key, known)}it has {', '.join(known)}"
            for key in found
            if key not in known
        ]
        problems += [f"detector: {name} is missing" for name in ("detector", "backbone", "num_classes") if name not in found]
        if problems:
            raise SettingsError(problems)
        return cls(**found)

    def _wrong_names(self) -> list[str]:
        allowed = {
            "detector": tuple(DETECTORS),
            "box_head": BOX_HEADS,
            "box_loss": (*BOX_LOSSES, None),
            "class_agnostic": (True, False, None),
        }
        found = []
        for name, choices in allowed.items():
            value = getattr(self, name)
            if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
                hint = nearest(value, [str(one) for one in choices]) if isinstance(value, str) else ""
                found.append(f"{name} is {value!r}; {hint}choose one of {', '.join(map(str, choices))}")
        default = {one.name: one.default for one in fields(self)}
        if self.detector in [name for name, facts in DETECTORS.items() if not facts.has_masks]:
            changed = [name for name in OF_REGIONS if getattr(self, name) != default[name]]
            found += [
                f"{name} is {getattr(self, name)!r}, but {self.detector} has no regions; leave it out" for name in changed
            ]
        return found

    def _wrong_numbers(self) -> list[str]:
        found = []
        for name, most in MAX.items():
            value = getattr(self, name)
            if value is None and name == "num_proposals":
                continue
            if not _is_integer(value) or not 1 <= value <= most:
                found.append(f"{name} is {value!r}; give an integer from 1 to {most}")
        for name, most_share in (("anchor_scale", 1000.0), ("score_threshold", 1.0), ("nms_threshold", 1.0)):
            value = getattr(self, name)
            if value is None and name == "anchor_scale":
                continue
            if not _is_number(value) or not 0 <= value <= most_share or (name == "anchor_scale" and value == 0):
                found.append(f"{name} is {value!r}; give a number from 0 to {most_share:g}")
        return found

    def _wrong_backbone(self) -> list[str]:
        options = self.backbone_options
        if not isinstance(self.backbone, str):
            return [f"backbone is {self.backbone!r}; give the name of a model"]
        if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
            return [f"backbone_options is {options!r}; give a mapping from argument names to values"]
        if refused := [name for name in options if name in NOT_OF_DESCRIPTION]:
            return [f"backbone_options has {', '.join(refused)}, which a detector sets itself; leave them out"]
        if too_large := [name for name, value in options.items() if _largest(value) > MAX_OF_BACKBONE]:
            return [
                f"backbone_options has {name}={options[name]!r}; give numbers up to {MAX_OF_BACKBONE}" for name in too_large
            ]
        depths = options.get("depths", 1)
        if _total(depths) > MAX_BLOCKS:
            return [f"backbone_options has depths={depths!r}; give at most {MAX_BLOCKS} blocks"]
        try:
            strides = strides_of(self.backbone, _as_arguments(options))
        except SettingsError as error:
            return error.problems
        if strides != STRIDES:
            return [
                f"the stages of the backbone have strides {strides}, but detectors need {STRIDES}; give four, and patch_size 4"
            ]
        return []


def _as_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with tuples for the lists of JSON."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _total(value: Any) -> float:
    """The sum of the numbers in a list, or the number."""
    return sum(one for one in (value if isinstance(value, list | tuple) else [value]) if _is_number(one))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _largest(value: Any) -> float:
    """The largest number in a value as JSON holds it."""
    if isinstance(value, Mapping):
        return max((_largest(one) for one in value.values()), default=0.0)
    if isinstance(value, list | tuple):
        return max((_largest(one) for one in value), default=0.0)
    return abs(value) if _is_number(value) else 0.0
