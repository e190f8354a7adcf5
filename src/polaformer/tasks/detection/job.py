"""A detection recipe with its data, model and objective, ready for the training loop."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polaformer.data.detection_images import DetectionBatch, DetectionReader, aspect_groups
from polaformer.data.detection_transforms import DetectionTransform, RandomCrop, RandomView
from polaformer.data.order import Order
from polaformer.data.sources.coco import CocoSource, digest_of_annotations, open_coco
from polaformer.errors import DataError, SettingsError, raise_all
from polaformer.ops.grid import Grid
from polaformer.tasks.dense.job import DenseJob
from polaformer.tasks.dense.memory_limit import check_fits, device_name
from polaformer.tasks.dense.preprocessing import DensePreprocessing
from polaformer.tasks.detection import figures
from polaformer.tasks.detection.counts import DetectionCounts
from polaformer.tasks.detection.description import DetectorDescription
from polaformer.tasks.detection.detector import Detector
from polaformer.tasks.detection.detector_facts import OF_REGIONS
from polaformer.tasks.detection.objective import DetectionObjective
from polaformer.tasks.detection.predictor import DetectionPredictor, check_evaluation, detector_metadata, resize_of
from polaformer.tasks.detection.recipe import DetectionRecipe
from polaformer.tasks.detection.typical_outputs import typical_outputs
from polaformer.tasks.figures import Figure
from polaformer.training.memory_estimate import MemoryEstimate
from polaformer.training.optim import check_settings, check_trainable


class DetectionJob(DenseJob):
    """A detection recipe with its data opened and its model built; raises SettingsError or DataError."""

    batch_class = DetectionBatch
    recipe: DetectionRecipe
    parts: Mapping[str, CocoSource]
    notices: list[str]

    def __init__(self, recipe: DetectionRecipe) -> None:
        self.recipe = recipe
        raise_all(recipe.problems(), [lambda: check_settings(recipe), lambda: _check_model(recipe)])
        assert recipe.data is not None
        self.data = open_coco(recipe.data, val_share=recipe.val_share)
        self.parts, self.classes = self.data.splits, self.data.classes
        self.on_bad, self.max_bad_share = recipe.on_bad_image, recipe.max_bad_share
        self.description = describe(recipe, len(self.classes))
        _check_objects(self.parts, self.description)
        self.preprocessing = DensePreprocessing(recipe.eval_size, recipe.max_size, recipe.mean, recipe.std)
        groups = aspect_groups(self.data.train.sizes)
        order = Order(len(self.data.train), recipe.batch_size, recipe.seed, groups=groups, group_size=recipe.group_size)
        self.use_order(order)
        self.notices = [f"{name}: {count} × {what}" for name, one in self.parts.items() for what, count in one.repaired.items()]
        self.model: Detector = self.initialised_model()
        self.objective = DetectionObjective(len(self.classes), self.description.has_masks)

    def reader(self, split: str, *, training: bool) -> DetectionReader:
        """Reads the images of a split, at random scales for training."""
        recipe, with_masks = self.recipe, self.description.has_masks
        transform: DetectionTransform = resize_of(self.preprocessing)
        if training:
            transform = RandomView(recipe.sizes, recipe.max_size, recipe.hflip, RandomCrop() if recipe.crop else None)
        return DetectionReader(self.parts[split], transform, recipe.mean, recipe.std, with_masks, training)

    def evaluation_batch_size(self, world: int) -> int:
        """Images per batch of an evaluation, in each process."""
        return self.recipe.eval_batch_size

    def metadata(self) -> dict[str, str]:
        """The metadata of weights files: how to build the detector, class names, sizes of the images."""
        predictor = self.predictor(self.model)
        return detector_metadata(predictor) | {"recipe": self.recipe.name}

    def data_fingerprint(self) -> dict[str, Any]:
        """The number of images in each split, and a digest of their annotations."""
        counts = {name: len(source) for name, source in self.parts.items()}
        return {"images": counts, "names": {name: digest_of_annotations(source) for name, source in self.parts.items()}}

    def memory(self, part: int) -> MemoryEstimate:
        """The memory to train on `part` images of the largest size at once; raises SettingsError if there is less."""

        def build(native: Grid | None) -> Detector:
            return describe(self.recipe, len(self.classes), native).build()

        def forward(model: Detector, images: Tensor) -> list[Tensor]:
            return typical_outputs(model, images, num_regions=part * self.recipe.num_samples, training=True)

        size = largest_size(self.recipe, mixed=part > self.recipe.group_size)
        return check_fits(build, size, part, self.recipe, forward=forward, device=device_name())

    def check_evaluation(self) -> None:
        """Raises SettingsError if the detector cannot be evaluated at the size that the recipe names."""
        advice = "make eval_size, max_size or eval_batch_size smaller"
        check_evaluation(self.description, self.preprocessing, self.recipe.eval_batch_size, advice=advice)

    def figures(self, predictor: DetectionPredictor, counts: Mapping[str, DetectionCounts]) -> dict[str, Figure]:
        """Predictions beside the ground truth, precision and recall, average precision by class, of the validation images."""
        return figures.collect_figures(counts["val"], self.data.val, self.validated_on)

    def predictor(self, model: torch.nn.Module) -> DetectionPredictor:
        """The trained detector with its class names and the size of its images."""
        assert isinstance(model, Detector)
        return DetectionPredictor(model, self.description, self.classes, self.preprocessing, self.data.train.category_ids)


def describe(recipe: DetectionRecipe, num_classes: int, native: Grid | None = None) -> DetectorDescription:
    """How to build the detector of a recipe; native: the size that its tables are for, None: the backbone's."""
    names = ("detector", "anchor_scale", *OF_REGIONS, "score_threshold", "nms_threshold", "max_detections")
    options = recipe.backbone_options() | ({} if native is None else {"img_size": native})
    given = {name: getattr(recipe, name) for name in names}
    return DetectorDescription(
        backbone=recipe.model, backbone_options=options, num_classes=num_classes, width=recipe.fpn_width, **given
    )


def largest_size(recipe: DetectionRecipe, *, mixed: bool = False) -> Grid:
    """The (height, width) of the largest padded batches of training; mixed: of tall and wide images together."""
    shorter, longer = (-(-side // 32) * 32 for side in (max(recipe.sizes), recipe.max_size))
    return (longer, longer) if mixed else (shorter, longer)


def _check_model(recipe: DetectionRecipe) -> None:
    """Raises SettingsError unless the model can be built and has the stages and parameters that the recipe names."""
    with torch.device("meta"):
        check_trainable(describe(recipe, 2).build(), recipe)


def _check_objects(parts: Mapping[str, CocoSource], description: DetectorDescription) -> None:
    if not parts["train"].has_objects:
        raise DataError(f"{parts['train'].file}: there is no object to train on; annotate some")
    without = [name for name, source in parts.items() if not source.has_masks]
    if description.has_masks and without:
        raise SettingsError(
            f"{description.detector} predicts masks, but no object of the {without[0]} split has one; choose --detector "
            "retinanet, or give annotations with segmentations"
        )
