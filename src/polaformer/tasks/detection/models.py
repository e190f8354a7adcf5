"""The models of `polaformer models --task detection`: those of all recipes, and their softmax twins."""

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from polaformer.ops.grid import Grid
from polaformer.tasks.dense.listing import Row, list_around_backbones, name_of, native_size
from polaformer.tasks.detection import nano
from polaformer.tasks.detection.detector import Detector
from polaformer.tasks.detection.detector_facts import DETECTORS
from polaformer.tasks.detection.job import describe
from polaformer.tasks.detection.published import ROWS
from polaformer.tasks.detection.recipe import DetectionRecipe
from polaformer.tasks.detection.typical_outputs import NUM_REGIONS, typical_outputs
from polaformer.tasks.task import ListedModel, ListedModels

SIZE = (800, 1280)
NUM_CLASSES = 80
HEADS = "For one image and 80 classes, with 1000 regions (those named nano: 300) and 100 masks, as mmdetection counts."


def list_detectors(pattern: str, attention: Sequence[str]) -> ListedModels:
    """The detectors whose names match, such as "mask-rcnn-pola-pvt-tiny"; with mechanisms, the pola ones with each of them."""
    examples = '"*", "retinanet-*" or "*-pola-swin-tiny"'
    return list_around_backbones("Detectors", _rows(), pattern, attention, _listed, note=HEADS, examples=examples)


def _rows() -> Iterator[Row]:
    """The models of all recipes."""
    for detector, model in dict.fromkeys((row.detector, row.model) for row in ROWS):
        recipe = DetectionRecipe(detector=detector, model=model, **DETECTORS[detector].as_published)
        yield Row(name_of(detector, model), recipe, NUM_CLASSES, (SIZE,))
    for settings in (nano.RETINANET, nano.MASK_RCNN):
        recipe = DetectionRecipe(**settings)
        yield Row(name_of(recipe.detector, "pola_pvt_nano"), recipe, NUM_CLASSES, ((recipe.eval_size, recipe.max_size),))


def _listed(row: Row, size: Grid) -> ListedModel:
    recipe: DetectionRecipe = row.recipe
    description = describe(recipe, row.num_classes, native_size(row, size))
    about = {"detector": recipe.detector, "backbone": recipe.model, "size": list(size)}
    run = partial(forward, size, min(NUM_REGIONS, recipe.num_proposals or NUM_REGIONS))
    return ListedModel(row.name, description.build, run, about)


def forward(size: Grid, num_regions: int, model: Detector) -> list[Tensor]:
    """A forward pass of one image, with so many regions."""
    return typical_outputs(model, next(model.parameters()).new_empty(1, 3, *size), num_regions=num_regions)
