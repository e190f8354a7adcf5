"""Counting what a model gets right, over all processes."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from polaformer.data.samples import Batch
from polaformer.training.processes import sum_over


class Task(Protocol):
    """What is learnt."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a batch."""
        ...

    def new_counts(self) -> Any:
        """Counts of nothing, with `add(model, batch)`, `summed(reduce)` and `record()`."""
        ...


@torch.no_grad()
def count(model: nn.Module, task: Task, batches: Iterable[Batch], accelerator: Accelerator) -> Any:
    """The counts of a model, on the device already, on the batches of all processes; a process may have none."""
    model, counts = model.eval(), task.new_counts()
    with accelerator.autocast():
        for batch in batches:
            counts.add(model, moved(batch, model, accelerator))
    total = counts.summed(lambda values: sum_over(accelerator, values))
    if accelerator.num_processes > 1:
        total.bad = sorted(gather_object(total.bad))
    return total


def moved(batch: Batch, model: nn.Module, accelerator: Accelerator) -> Batch:
    """The batch on the device of the model, in the precision of its weights."""
    images = batch.images.to(accelerator.device, next(model.parameters()).dtype, non_blocking=True)
    return batch._replace(images=images, labels=batch.labels.to(accelerator.device, non_blocking=True))
