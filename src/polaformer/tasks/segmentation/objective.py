"""The objective of semantic segmentation: cross-entropy over the labelled pixels."""

from dataclasses import dataclass

from torch import Tensor, nn

from polaformer.data.segmentation_images import SegmentationBatch
from polaformer.tasks.segmentation.counts import SegmentationCounts
from polaformer.tasks.segmentation.inference_settings import Inference


@dataclass(frozen=True)
class SegmentationObjective:
    """The losses of the segmenter's heads, and counts of pixels by true and predicted class."""

    num_classes: int
    inference: Inference

    def loss(self, model: nn.Module, batch: SegmentationBatch) -> Tensor:
        """The loss of the batch, a mean over its labelled pixels."""
        losses: dict[str, Tensor] = model(batch.images, batch.mask, batch.labels)
        return sum(losses.values(), start=batch.images.new_zeros(()))

    def new_counts(self) -> SegmentationCounts:
        """Empty counts."""
        return SegmentationCounts(self.num_classes, self.inference)
