"""The recipe of object detection: every hyperparameter of a training run in one frozen dataclass."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal

from polaformer.extras import require
from polaformer.tasks.dense.recipe import DenseRecipe
from polaformer.tasks.detection.detector_facts import DETECTORS, OF_REGIONS, DetectorName
from polaformer.training.metric import Metric, TaskTerms

if TYPE_CHECKING:
    from polaformer.tasks.detection.job import DetectionJob


@dataclass(frozen=True, kw_only=True)
class DetectionRecipe(DenseRecipe):
    """Object detection and instance segmentation. The detector's defaults are as published; recipes set the schedule."""

    task: ClassVar[str] = "detection"
    terms: ClassVar[TaskTerms] = TaskTerms(Metric("box_AP", "%"), "images", "--max-bad-share", "--on-bad-image skip")

    data: str | None = None
    """A folder in COCO's layout (annotations/instances_train2017.json, train2017, …), or TRAIN.json:IMAGES,VAL.json:IMAGES."""
    detector: DetectorName = "mask-rcnn"
    """The detector around the backbone."""
    fpn_width: int = 256
    """Channels of the feature pyramid, and of RetinaNet's heads."""
    box_head: Literal["2fc", "4conv1fc"] = "2fc"
    """Layers of the box heads: two fully connected ones, or four convolutions and one fully connected layer."""
    box_width: int = 1024
    """Channels of the fully connected layers of the box heads."""
    box_loss: Literal["l1", "smooth-l1", "giou"] | None = None
    """Loss of the boxes; None: as published (l1; in a cascade smooth-l1, with 4conv1fc giou)."""
    class_agnostic: bool | None = None
    """Predict one box for all classes instead of one for each; None: as published (in a cascade without 4conv1fc)."""
    num_samples: int = 512
    """RoIs per image sampled to train the box heads."""
    mask_width: int = 256
    """Channels of the mask heads."""
    num_proposals: int | None = None
    """Proposals per image; None: as published (1000; 2000 in the training of a cascade)."""
    anchor_scale: float | None = None
    """Side of the smallest anchors of each level relative to its stride; None: as published (8; 4 for RetinaNet)."""
    sizes: tuple[int, ...] = (800,)
    """Lengths of the shorter side in training, in pixels, one of which is drawn for each image."""
    max_size: int = 1333
    """Largest length of the longer side, in pixels."""
    eval_size: int = 800
    """Length of the shorter side in evaluation, in pixels."""
    crop: bool = False
    """With probability 0.5, first resize to 400, 500 or 600 pixels and crop a random region with sides of 384 to 600 pixels."""
    group_size: int = 2
    """Images per group, all portrait or all landscape, like the published batch of one GPU. Must divide batch_size."""
    eval_batch_size: int = 1
    """Images per batch in evaluation, in each process; with 1 results cannot depend on padding."""
    score_threshold: float = 0.05
    """Minimum score of a detection."""
    nms_threshold: float = 0.5
    """IoU threshold of non-maximum suppression, per class."""
    max_detections: int = 100
    """Maximum number of detections per image."""
    checkpoint: str | None = None
    """A whole detector to start from: weights file, run or checkpoint. For other classes their layers are newly initialised."""

    def problems(self) -> list[str]:
        """All problems with the values, one line each; needs neither the data nor PyTorch."""
        found = super().problems() + self.share_problems("score_threshold", "nms_threshold")
        if self.anchor_scale is not None and not 0 < self.anchor_scale < float("inf"):
            found.append(f"anchor_scale is {self.anchor_scale}; give a number > 0, or None")
        return found + self._size_problems() + self._head_problems()

    def _size_problems(self) -> list[str]:
        names = ["max_size", "eval_size", "fpn_width", "group_size", "eval_batch_size", "max_detections"]
        names += ["box_width", "mask_width", "num_samples", "num_proposals"]
        found = self.count_problems(names)
        if not self.sizes or min(self.sizes) < 1:
            found.append(f"sizes is {self.sizes}; give integers ≥ 1")
        elif max(*self.sizes, self.eval_size) > self.max_size:
            found.append(f"max_size is {self.max_size}, less than the largest of sizes and eval_size; give a larger one")
        if self.group_size >= 1 and self.batch_size % self.group_size:
            found.append(f"group_size is {self.group_size}, which does not divide batch_size, {self.batch_size}")
        return found

    def _head_problems(self) -> list[str]:
        if DETECTORS[self.detector].has_masks:
            return []
        defaults = {one.name: one.default for one in fields(self) if one.name in OF_REGIONS}
        changed = [name for name, value in defaults.items() if getattr(self, name) != value]
        return [
            f"{', '.join(changed)}: only for {' and '.join(name for name, one in DETECTORS.items() if one.has_masks)}; "
            f"start from a recipe of {self.detector}, such as coco/{self.detector}-pola-pvt-nano, or leave them out"
        ] * bool(changed)

    def absolute_data(self, data: str) -> str:
        """The data as a string that is valid from any working directory."""
        from polaformer.data.sources.coco import absolute

        return absolute(data)

    def before_training(self) -> list[str]:
        """Raises MissingExtraError unless the packages for masks and average precision are there."""
        require("train", "pycocotools")
        require("train", "faster_coco_eval")
        return []

    def job(self) -> "DetectionJob":
        """Opens the data and builds the model; loads PyTorch, raises SettingsError or DataError."""
        from polaformer.tasks.detection.job import DetectionJob

        return DetectionJob(self)
