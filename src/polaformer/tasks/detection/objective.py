"""The objective of detection: the sum of the detector's losses."""

from dataclasses import dataclass

from torch import Tensor, nn

from polaformer.data.detection_images import DetectionBatch
from polaformer.tasks.detection.counts import DetectionCounts


@dataclass(frozen=True)
class DetectionObjective:
    """The sum of the losses of proposals, classes, boxes and masks, and counts of the detections."""

    num_classes: int
    with_masks: bool

    def loss(self, model: nn.Module, batch: DetectionBatch) -> Tensor:
        """The loss of the batch; images without objects count too."""
        losses: dict[str, Tensor] = model(batch.images, batch.mask, batch.sizes, batch.targets)
        return sum(losses.values(), start=batch.images.new_zeros(()))

    def new_counts(self) -> DetectionCounts:
        """Empty counts."""
        return DetectionCounts(self.num_classes, self.with_masks)
