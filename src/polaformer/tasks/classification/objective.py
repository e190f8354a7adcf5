"""The objective of image classification: cross-entropy, of mixed images if they are mixed.

# B batch, K classes
"""

from dataclasses import dataclass

import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor, nn

from polaformer.data.labelled_images import LabelledImages
from polaformer.tasks.accuracy import ClassificationCounts, at_least_float32


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy as loss, and counts that add up over batches and processes.

    mixup: timm's, which draws from NumPy's generator; None: no mixup. smoothing: of labels, used only without mixup.
    """

    num_classes: int
    mixup: Mixup | None = None
    smoothing: float = 0.0

    def loss(self, model: nn.Module, batch: LabelledImages) -> Tensor:
        """The mean cross-entropy of the batch; with mixup, of mixed images against mixed labels."""
        if self.mixup is None:
            return F.cross_entropy(at_least_float32(batch.logits(model)), batch.labels, label_smoothing=self.smoothing)
        images, targets = self.mixup(batch.images.clone(), batch.labels)  # mixes in place, and the batch may be used again
        logits = at_least_float32(model(images))
        return F.cross_entropy(logits, targets.to(logits.dtype))

    def new_counts(self) -> ClassificationCounts:
        """Empty counts."""
        return ClassificationCounts(self.num_classes)
