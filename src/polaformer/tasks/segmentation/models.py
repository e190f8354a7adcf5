"""The models of `polaformer models --task segmentation`: those of all recipes, and their softmax twins, at their sizes."""

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from polaformer.ops.grid import Grid
from polaformer.tasks.dense.listing import Row, list_around_backbones, name_of, native_size
from polaformer.tasks.segmentation import nano
from polaformer.tasks.segmentation.job import describe
from polaformer.tasks.segmentation.published import ROWS
from polaformer.tasks.segmentation.recipe import SegmentationRecipe
from polaformer.tasks.segmentation.segmenter import Segmenter
from polaformer.tasks.task import ListedModel, ListedModels

SIZES: tuple[Grid, ...] = ((512, 512), (512, 2048))
NUM_CLASSES = 150
IMAGES = "For one image and 150 classes (those named nano: 11). Parameters with UPerNet's auxiliary head, MACs without it."


def list_segmenters(pattern: str, attention: Sequence[str]) -> ListedModels:
    """The segmenters whose names match, such as "upernet-pola-swin-tiny"; with mechanisms, the pola ones with each of them."""
    examples = '"*", "upernet-*" or "*-pola-pvt-tiny"'
    return list_around_backbones("Segmenters", _rows(), pattern, attention, _listed, note=IMAGES, examples=examples)


def _rows() -> Iterator[Row]:
    """The models of all recipes."""
    for row in ROWS:
        recipe = SegmentationRecipe(segmenter=row.segmenter, model=row.model)
        yield Row(name_of(row.segmenter, row.model), recipe, NUM_CLASSES, SIZES)
    recipe = SegmentationRecipe(**nano.SEMANTIC_FPN)
    assert recipe.eval_size is not None
    name = name_of(recipe.segmenter, "pola_pvt_nano")
    yield Row(name, recipe, nano.NUM_CLASSES, ((recipe.eval_size, recipe.eval_max_size),))


def _listed(row: Row, size: Grid) -> ListedModel:
    recipe: SegmentationRecipe = row.recipe
    description = describe(recipe, row.num_classes, native_size(row, size))

    def build() -> Segmenter:  # in training, batch norm would refuse a single image
        return description.build().eval()

    about = {"segmenter": recipe.segmenter, "backbone": recipe.model, "size": list(size)}
    return ListedModel(row.name, build, partial(forward, size), about)


def forward(size: Grid, model: Segmenter) -> Tensor:
    """A forward pass of one image, to logits of cells."""
    return model.logits(next(model.parameters()).new_empty(1, 3, *size))
