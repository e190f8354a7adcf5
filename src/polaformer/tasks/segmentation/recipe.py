"""The recipe of semantic segmentation: every hyperparameter of a training run in one frozen dataclass."""

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar

from polaformer.tasks.dense.recipe import DenseRecipe
from polaformer.tasks.segmentation.inference_settings import Mode
from polaformer.tasks.segmentation.published import SegmenterName
from polaformer.training.metric import Metric, TaskTerms

if TYPE_CHECKING:
    from polaformer.tasks.segmentation.job import SegmentationJob


@dataclass(frozen=True, kw_only=True)
class SegmentationRecipe(DenseRecipe):
    """Semantic segmentation. Segmenter and augmentation are as published by default; recipes set the schedule."""

    task: ClassVar[str] = "segmentation"
    terms: ClassVar[TaskTerms] = TaskTerms(Metric("mIoU", "%"), "images", "--max-bad-share", "--on-bad-image skip")

    data: str | None = None
    """A folder in the layout of ADE20K (images, annotations) or CamVid (train, trainannot), or IMAGES:MASKS,IMAGES:MASKS."""
    label_set: str | None = None
    """Classes of the masks: ade20k, camvid, or a file; None: classes.txt in the data, else by their names."""
    segmenter: SegmenterName = "semantic-fpn"
    """The heads around the backbone."""
    fpn_width: int = 256
    """Channels of Semantic FPN's feature pyramid."""
    head_width: int | None = None
    """Channels of the head; None: as published (128; 512 for UPerNet)."""
    auxiliary: bool | None = None
    """Train a second head on stage 3 with 0.4 of the weight; None: as published (for UPerNet alone)."""
    auxiliary_width: int = 256
    """Channels of the auxiliary head."""
    dropout: float = 0.1
    """Dropout of channels before the last convolution of a head."""
    crop_size: int = 512
    """Side of the training crops, in pixels."""
    base_size: tuple[int, int] = (512, 2048)
    """Lengths of the shorter and the longer side, in pixels, that images are fitted into before they are scaled and cropped."""
    scales: tuple[float, float] = (0.5, 2.0)
    """Smallest and largest factor by which a training image is scaled."""
    max_class_share: float = 0.75
    """Crops in which one class has this share of the pixels or more are drawn again, up to ten times; 1: never."""
    photometric: bool = True
    """Whether to change brightness, contrast, saturation and hue of training images at random."""
    eval_size: int | None = 512
    """Length of the shorter side in evaluation, in pixels; None: the size that images have."""
    eval_max_size: int = 2048
    """Largest length of the longer side in evaluation, in pixels."""
    inference: Mode = "whole"
    """Segment whole images, or slide a window over them and average."""
    window: int | None = None
    """Side of the sliding window, in pixels; None: crop_size."""
    stride: int | None = None
    """Distance between windows, in pixels; None: two thirds of the window."""
    checkpoint: str | None = None
    """A whole segmenter to start from: a weights file, a run or a checkpoint; layers for other classes are dropped."""

    def problems(self) -> list[str]:
        """All problems with the values, one line each; needs neither the data nor PyTorch."""
        counts = ("fpn_width", "head_width", "auxiliary_width", "crop_size", "eval_size", "eval_max_size", "window", "stride")
        found = super().problems() + self.count_problems(counts)
        if not 0 <= self.dropout < 1:
            found.append(f"dropout is {self.dropout}; give a number in [0, 1)")
        if not 0 < self.max_class_share <= 1:
            found.append(f"max_class_share is {self.max_class_share}; give a number in (0, 1]")
        return found + self._size_problems() + self._window_problems()

    def _size_problems(self) -> list[str]:
        found = []
        if not 1 <= self.base_size[0] <= self.base_size[1]:
            found.append(f"base_size is {self.base_size}; give the shorter and the longer side, integers ≥ 1")
        if not (0 < self.scales[0] <= self.scales[1] and isfinite(self.scales[1])):
            found.append(f"scales is {self.scales}; give two numbers > 0, the smaller one first")
        if self.eval_size is not None and self.eval_size > self.eval_max_size:
            found.append(f"eval_max_size is {self.eval_max_size}, less than eval_size, {self.eval_size}; give a larger one")
        return found

    def _window_problems(self) -> list[str]:
        if self.inference == "whole" and (self.window, self.stride) != (None, None):
            return [
                "window and stride are for sliding windows, but inference is whole; give --inference slide, or leave them out"
            ]
        window, stride = self.window_and_stride
        if stride > window:
            return [f"stride is {stride}, larger than the window, {window}; give at most that, or pixels are left out"]
        return []

    @property
    def window_and_stride(self) -> tuple[int, int]:
        """The side of sliding windows and the distance between them, in pixels."""
        window = self.crop_size if self.window is None else self.window
        return window, max(1, 2 * window // 3) if self.stride is None else self.stride

    def absolute_data(self, data: str) -> str:
        """The data as a string that is valid from any working directory."""
        from polaformer.data.sources.semantic import absolute

        return absolute(data)

    def values_with_absolute_paths(self) -> dict[str, Any]:
        """The options for JSON, valid from any working directory."""
        from os.path import abspath, exists

        from polaformer.data.sources.label_sets import BUILT_IN

        is_file = self.label_set is not None and self.label_set not in BUILT_IN and exists(self.label_set)
        label_set = abspath(self.label_set) if self.label_set is not None and is_file else self.label_set
        return super().values_with_absolute_paths() | {"label_set": label_set}

    def job(self) -> "SegmentationJob":
        """Opens the data and builds the model; loads PyTorch, raises SettingsError or DataError."""
        from polaformer.tasks.segmentation.job import SegmentationJob

        return SegmentationJob(self)
