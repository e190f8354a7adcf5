"""What an evaluation of any classifier counts.

# B batch, K classes
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOP = 5


class LabelledBatch(Protocol):
    """A batch with a class per sample."""

    labels: Tensor  # (B,)
    bad: list[str]

    def logits(self, model: nn.Module) -> Tensor:
        """The outputs of a model for the batch, (B, K)."""
        ...


@dataclass
class ClassificationCounts:
    """What a model gets right, as integers: exactly equal for any number of processes."""

    num_classes: int
    confusion: Tensor = field(init=False)  # (K, K): how often class i was predicted as class j
    top5: int = 0
    loss: float = 0.0  # summed
    bad: list[str] = field(default_factory=list)  # one line for every sample that could not be read

    def __post_init__(self) -> None:
        self.confusion = torch.zeros(self.num_classes, self.num_classes, dtype=torch.int64)

    def add(self, model: nn.Module, batch: LabelledBatch) -> None:
        """Adds one batch."""
        self.bad += batch.bad
        if not len(batch.labels):
            return
        logits = at_least_float32(batch.logits(model))  # (B, K)
        best = logits.topk(min(TOP, self.num_classes)).indices
        self.top5 += int((best == batch.labels[:, None]).any(dim=1).sum())
        self.loss += float(F.cross_entropy(logits, batch.labels, reduction="sum"))
        places = (batch.labels * self.num_classes + best[:, 0]).cpu()
        self.confusion += torch.bincount(places, minlength=self.num_classes**2).view_as(self.confusion)

    @classmethod
    def merge(cls, parts: "Sequence[ClassificationCounts]") -> "ClassificationCounts":
        """The sum of the counts of all processes."""
        bad = sorted(line for part in parts for line in part.bad)
        found = cls(parts[0].num_classes, sum(part.top5 for part in parts), sum(part.loss for part in parts), bad)
        for part in parts:
            found.confusion += part.confusion
        return found

    @property
    def samples(self) -> int:
        """Number of samples evaluated."""
        return int(self.confusion.sum())

    @property
    def top1(self) -> int:
        """Number of samples whose most probable class is the true one."""
        return int(self.confusion.trace())

    def record(self) -> dict[str, Any]:
        """The counts and the accuracies in %, for journals and tables."""
        total = max(self.samples, 1)
        accuracies = {"accuracy": 100 * self.top1 / total, "top5_accuracy": 100 * self.top5 / total}
        return {
            "samples": self.samples,
            "correct": self.top1,
            "correct_top5": self.top5,
            **accuracies,
            "loss": self.loss / total,
        }

    def summary(self) -> dict[str, str]:
        """The result for people."""
        record = self.record()
        top5 = {"top-5": f"{record['top5_accuracy']:.2f} %"} if self.num_classes > TOP else {}
        return {
            "accuracy": f"{record['accuracy']:.2f} %",
            "correct": f"{record['correct']:,} of {record['samples']:,}",
            **top5,
            "loss": f"{record['loss']:.4f}",
        }


def at_least_float32(logits: Tensor) -> Tensor:
    """The logits in float32 or float64, for computing losses."""
    return logits if logits.dtype == torch.float64 else logits.float()
