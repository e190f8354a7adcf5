"""The objective of sequence classification: cross-entropy."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.tasks.accuracy import ClassificationCounts, at_least_float32
from polaformer.tasks.sequence.data import SequenceBatch


@dataclass(frozen=True)
class SequenceObjective:
    """The mean cross-entropy as loss, and counts of correct answers."""

    num_classes: int

    def loss(self, model: nn.Module, batch: SequenceBatch) -> Tensor:
        """The mean cross-entropy of the batch."""
        return F.cross_entropy(at_least_float32(batch.logits(model)), batch.labels)

    def new_counts(self) -> ClassificationCounts:
        """Empty counts."""
        return ClassificationCounts(self.num_classes)
