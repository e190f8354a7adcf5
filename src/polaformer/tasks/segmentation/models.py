"""The models of `polaformer models --task segmentation`: those of all recipes, and their softmax twins, at two sizes."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from polaformer.ops.grid import Grid
from polaformer.tasks.dense.listing import NOTES, list_around_backbones, name_of, options_of_backbone
from polaformer.tasks.segmentation.description import SegmenterDescription
from polaformer.tasks.segmentation.published import ROWS
from polaformer.tasks.segmentation.segmenter import Segmenter
from polaformer.tasks.task import ListedModel, ListedModels

SIZES: tuple[Grid, ...] = ((512, 512), (512, 2048))
NUM_CLASSES = 150
IMAGES = "For one image and 150 classes. Parameters with UPerNet's auxiliary head, MACs without it."


def list_segmenters(pattern: str, attention: Sequence[str]) -> ListedModels:
    """The segmenters whose names match, such as "upernet-pola-swin-tiny"; with mechanisms, the pola ones with each of them."""
    pairs = [(row.segmenter, row.model) for row in ROWS]
    models = list_around_backbones(pairs, pattern, attention, _listed, '"*", "upernet-*" or "*-pola-pvt-tiny"')
    columns = {
        "attention": lambda model: model.about["attention"],
        "size": lambda model: "×".join(map(str, model.about["size"])),
    }
    return ListedModels("Segmenters", columns, models, (IMAGES, *NOTES))


def _listed(segmenter: str, model: str, stages: str | None, mechanism: str) -> list[ListedModel]:
    about = {"segmenter": segmenter, "backbone": model, "attention": mechanism}
    name = name_of(segmenter, model)
    return [
        ListedModel(name, partial(build, segmenter, model, stages, size), partial(forward, size), about | {"size": list(size)})
        for size in SIZES
    ]


def build(segmenter: str, model: str, attention: str | None = None, size: Grid = SIZES[0]) -> Segmenter:
    """The segmenter of the paper's rows for the classes of ADE20K and images of that size, in evaluation mode.

    In training, batch norm would refuse a single image.
    """
    options = options_of_backbone(attention, size)
    return (
        SegmenterDescription(segmenter=segmenter, backbone=model, num_classes=NUM_CLASSES, backbone_options=options)
        .build()
        .eval()
    )


def forward(size: Grid, model: Segmenter) -> Tensor:
    """A forward pass of one image, to logits of cells."""
    return model.logits(next(model.parameters()).new_empty(1, 3, *size))
