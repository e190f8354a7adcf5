"""What sets each detector apart, by name. Needs no PyTorch."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

DetectorName = Literal["retinanet", "mask-rcnn", "cascade-mask-rcnn"]
# Settings of detectors that classify regions.
OF_REGIONS = ("box_head", "box_loss", "class_agnostic", "box_width", "mask_width", "num_samples", "num_proposals")


class DetectorFacts(NamedTuple):
    """The properties of a detector.

    has_masks: it classifies regions, with the settings OF_REGIONS, and predicts their masks. first_stage: of the backbone whose
    features it takes. extra_levels: how its `FeaturePyramid` continues them. as_published: settings of the paper's rows.
    """

    has_masks: bool = True
    first_stage: int = 0
    extra_levels: str = "pool"
    as_published: Mapping[str, Any] = {}


DETECTORS: dict[DetectorName, DetectorFacts] = {
    "retinanet": DetectorFacts(has_masks=False, first_stage=1, extra_levels="convolutions"),
    "mask-rcnn": DetectorFacts(),
    # The heads are those of Swin's configuration.
    "cascade-mask-rcnn": DetectorFacts(as_published={"box_head": "4conv1fc", "box_loss": "giou", "class_agnostic": False}),
}
