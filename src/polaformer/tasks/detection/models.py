"""The models of `polaformer models --task detection`: those of all recipes, and their softmax twins."""

from collections.abc import Sequence
from fnmatch import fnmatch
from functools import partial

from torch import Tensor

from polaformer.attention import names as mechanism_names
from polaformer.backbones.published import with_mechanism
from polaformer.backbones.registry import MODELS, softmax_twin
from polaformer.errors import SettingsError, nearest
from polaformer.tasks.detection.description import DetectorDescription
from polaformer.tasks.detection.detector import Detector
from polaformer.tasks.detection.detector_facts import DETECTORS, DetectorName
from polaformer.tasks.detection.published import ROWS
from polaformer.tasks.detection.typical_outputs import typical_outputs
from polaformer.tasks.task import ListedModel, ListedModels

SIZE = (800, 1280)
NUM_CLASSES = 80
NOTES = (
    "For one image of 800×1280 pixels and 80 classes. Parameters in millions, MACs in billions: first everything; then the",
    "paper's way of counting, only linear layers, convolutions and norms. Heads are counted for 1000 regions and 100 masks, as",
    "mmdetection does. Names are DETECTOR-MODEL; --attention shows the pola models with other mechanisms.",
)


def list_detectors(pattern: str, attention: Sequence[str]) -> ListedModels:
    """The detectors whose names match, such as "mask-rcnn-pola-pvt-tiny"; with mechanisms, the pola ones with each of them."""
    known = ("all", *mechanism_names())
    if unknown := [name for name in attention if name not in known]:
        raise SettingsError(f"--attention has {unknown[0]!r}; {nearest(unknown[0], known)}choose from {', '.join(known)}")
    mechanisms = mechanism_names() if "all" in attention else tuple(dict.fromkeys(attention))
    pairs = list(dict.fromkeys((row.detector, row.model) for row in ROWS))
    if mechanisms:
        models = [_listed(detector, model, mechanism) for detector, model in pairs for mechanism in mechanisms]
    else:
        twins = ((detector, twin) for detector, model in pairs for twin in (model, softmax_twin(model)))
        models = [_listed(detector, model) for detector, model in twins]
    models = [model for model in models if fnmatch(model.name, pattern)]
    if not models:
        raise SettingsError(f'no model matches {pattern!r}; try "*", "retinanet-*" or "*-pola-swin-tiny"')
    columns = {"attention": lambda model: model.about["attention"]}
    return ListedModels("Detectors", columns, models, NOTES)


def _listed(detector: DetectorName, model: str, mechanism: str | None = None) -> ListedModel:
    config = MODELS[model].config
    stages = None if mechanism is None else with_mechanism(mechanism, config)
    own = config.mechanisms if len(set(config.mechanisms)) > 1 else config.mechanisms[:1]
    name = f"{detector}-{model.replace('_', '-')}"
    about = {"detector": detector, "backbone": model, "attention": mechanism or ",".join(own), "size": list(SIZE)}
    return ListedModel(name, partial(build, detector, model, stages), forward, about)


def build(detector: DetectorName, model: str, attention: str | None = None) -> Detector:
    """The detector of the paper's rows around a backbone, for the classes of COCO."""
    options = {} if attention is None else {"attention": attention}
    published = DETECTORS[detector].as_published
    return DetectorDescription(
        detector=detector, backbone=model, num_classes=NUM_CLASSES, backbone_options=options, **published
    ).build()


def forward(model: Detector) -> list[Tensor]:
    """A forward pass of one image, with a typical number of regions."""
    return typical_outputs(model, next(model.parameters()).new_empty(1, 3, *SIZE))
