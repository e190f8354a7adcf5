"""The models of `polaformer models --task detection`: those of all recipes, and their softmax twins."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from polaformer.tasks.dense.listing import NOTES, list_around_backbones, name_of, options_of_backbone
from polaformer.tasks.detection.counting import typical_outputs
from polaformer.tasks.detection.description import DetectorDescription
from polaformer.tasks.detection.detector import Detector
from polaformer.tasks.detection.published import ROWS, SWIN_CASCADE
from polaformer.tasks.task import ListedModel, ListedModels

SIZE = (800, 1280)
NUM_CLASSES = 80
HEADS = "For one image of 800×1280 pixels and 80 classes, with 1000 regions and 100 masks, as mmdetection counts."


def list_detectors(pattern: str, attention: Sequence[str]) -> ListedModels:
    """The detectors whose names match, such as "mask-rcnn-pola-pvt-tiny"; with mechanisms, the pola ones with each of them."""
    pairs = [(row.detector, row.model) for row in ROWS]
    models = list_around_backbones(pairs, pattern, attention, _listed, '"*", "retinanet-*" or "*-pola-swin-tiny"')
    return ListedModels("Detectors", {"attention": lambda model: model.about["attention"]}, models, (HEADS, *NOTES))


def _listed(detector: str, model: str, stages: str | None, mechanism: str) -> list[ListedModel]:
    about = {"detector": detector, "backbone": model, "attention": mechanism, "size": list(SIZE)}
    return [ListedModel(name_of(detector, model), partial(build, detector, model, stages), forward, about)]


def build(detector: str, model: str, attention: str | None = None) -> Detector:
    """The detector of the paper's rows around a backbone, for the classes of COCO."""
    options = options_of_backbone(attention, SIZE)
    published = SWIN_CASCADE if detector == "cascade-mask-rcnn" else {}
    return DetectorDescription(
        detector=detector, backbone=model, num_classes=NUM_CLASSES, backbone_options=options, **published
    ).build()


def forward(model: Detector) -> list[Tensor]:
    """A forward pass of one image, with a typical number of regions."""
    return typical_outputs(model, next(model.parameters()).new_empty(1, 3, *SIZE))
