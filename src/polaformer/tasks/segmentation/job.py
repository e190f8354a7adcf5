"""A segmentation recipe with its data, model and objective, ready for the training loop."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from polaformer.data.order import Order
from polaformer.data.segmentation_images import SegmentationBatch, SegmentationReader
from polaformer.data.segmentation_transforms import RandomScaleCrop, SegmentationTransform
from polaformer.data.sources.semantic import SemanticSource, digest_of_pairs, open_semantic
from polaformer.errors import SettingsError, raise_all
from polaformer.ops.grid import Grid
from polaformer.tasks.dense.job import DenseJob, shares_statistics
from polaformer.tasks.dense.memory_limit import check_fits, device_name
from polaformer.tasks.dense.preprocessing import DensePreprocessing
from polaformer.tasks.figures import Figure
from polaformer.tasks.segmentation import figures
from polaformer.tasks.segmentation.counts import SegmentationCounts
from polaformer.tasks.segmentation.description import SegmenterDescription, needs_two_images
from polaformer.tasks.segmentation.inference_settings import Inference
from polaformer.tasks.segmentation.objective import SegmentationObjective
from polaformer.tasks.segmentation.predictor import SegmentationPredictor, check_evaluation, resize_of, segmenter_metadata
from polaformer.tasks.segmentation.recipe import SegmentationRecipe
from polaformer.tasks.segmentation.segmenter import Segmenter, training_losses
from polaformer.training.memory_estimate import MemoryEstimate
from polaformer.training.optim import check_settings, check_trainable

MULTIPLE = 32  # of the sides of a batch


class SegmentationJob(DenseJob):
    """A segmentation recipe with its data opened and its model built; raises SettingsError or DataError."""

    batch_class = SegmentationBatch
    recipe: SegmentationRecipe
    parts: Mapping[str, SemanticSource]

    def __init__(self, recipe: SegmentationRecipe) -> None:
        self.recipe = recipe
        raise_all(recipe.problems(), [lambda: check_settings(recipe), lambda: _check_model(recipe)])
        assert recipe.data is not None
        self.data = open_semantic(recipe.data, label_set=recipe.label_set, val_share=recipe.val_share)
        self.parts, self.classes = self.data.splits, self.data.classes
        self.on_bad, self.max_bad_share = recipe.on_bad_image, recipe.max_bad_share
        self.description = describe(recipe, len(self.classes))
        self.preprocessing = DensePreprocessing(recipe.eval_size, recipe.eval_max_size, recipe.mean, recipe.std)
        self.use_order(Order(len(self.data.train), recipe.batch_size, recipe.seed))
        self.notices = []
        window, stride = recipe.window_and_stride
        self.inference = Inference(mode=recipe.inference, window=window, stride=stride)
        self.model: Segmenter = self.initialised_model()
        self.objective = SegmentationObjective(len(self.classes), self.inference)

    def reader(self, split: str, *, training: bool) -> SegmentationReader:
        """Reads the images of a split; random crops for training."""
        recipe = self.recipe
        found: SegmentationTransform = random_crop(recipe) if training else resize_of(self.preprocessing, self.inference)
        return SegmentationReader(self.parts[split], found, recipe.mean, recipe.std, training, MULTIPLE)

    def evaluation_batch_size(self, world: int) -> int:
        """Images per batch of an evaluation, in each process."""
        return 1

    def metadata(self) -> dict[str, str]:
        """The metadata of weights files: how to build the segmenter, class names and colours, sizes of the images."""
        return segmenter_metadata(self.predictor(self.model)) | {"recipe": self.recipe.name}

    def data_fingerprint(self) -> dict[str, Any]:
        """The number of images in each split, and a digest of the classes and of the names of images and masks."""
        counts = {name: len(source) for name, source in self.parts.items()}
        return {"images": counts, "names": {name: digest_of_pairs(source) for name, source in self.parts.items()}}

    def memory(self, part: int) -> MemoryEstimate:
        """The memory to train on `part` crops at once; raises SettingsError if there is less, or batch norm needs more."""
        side = -(-self.recipe.crop_size // MULTIPLE) * MULTIPLE
        if part == 1 and needs_two_images(self.description, (side, side)) and not shares_statistics():
            raise SettingsError(
                f"batch norm cannot train {self.recipe.segmenter} on one image of {side} pixels at a time, since a map with "
                f"one cell has no variance; batch_size is {self.recipe.batch_size} and accumulation "
                f"{self.recipe.accumulation}: give a larger batch_size, a smaller accumulation, or fewer processes"
            )

        def build(native: Grid | None) -> Segmenter:
            return describe(self.recipe, len(self.classes), native).build()

        return check_fits(build, (side, side), part, self.recipe, forward=training_losses, device=device_name())

    def check_evaluation(self) -> None:
        """Raises SettingsError if the segmenter cannot be evaluated at the size that the recipe names."""
        advice = "make eval_size and eval_max_size smaller, or give --inference slide"
        check_evaluation(self.description, self.preprocessing, self.inference, advice=advice)

    def figures(self, predictor: SegmentationPredictor, counts: Mapping[str, SegmentationCounts]) -> dict[str, Figure]:
        """Predictions beside the truth, IoU by class and the confusion of classes, of the validation images."""
        return figures.collect_figures(counts["val"], self.data.val, predictor, self.validated_on)

    def predictor(self, model: nn.Module) -> SegmentationPredictor:
        """The trained segmenter with its classes, the size of its images and its inference."""
        assert isinstance(model, Segmenter)
        about = (self.classes, self.preprocessing, self.data.train.colours, self.inference)
        return SegmentationPredictor(model, self.description, *about)


def describe(recipe: SegmentationRecipe, num_classes: int, native: Grid | None = None) -> SegmenterDescription:
    """How to build the segmenter of a recipe; native: the size that its tables are for, None: the backbone's."""
    names = ("segmenter", "fpn_width", "head_width", "auxiliary", "auxiliary_width", "dropout")
    options = recipe.backbone_options() | ({} if native is None else {"img_size": native})
    given = {name: getattr(recipe, name) for name in names}
    return SegmenterDescription(backbone=recipe.model, backbone_options=options, num_classes=num_classes, **given)


def random_crop(recipe: SegmentationRecipe) -> RandomScaleCrop:
    """The augmentation of training images."""
    names = ("scales", "hflip", "max_class_share", "photometric")
    return RandomScaleCrop(recipe.crop_size, recipe.base_size, **{name: getattr(recipe, name) for name in names})


def _check_model(recipe: SegmentationRecipe) -> None:
    """Raises SettingsError unless the model can be built and has the stages and parameters that the recipe names."""
    with torch.device("meta"):
        check_trainable(describe(recipe, 2).build(), recipe)
