"""Evaluation of a model over all processes."""

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from polaformer.data.batch import Batch
from polaformer.data.randomness import derive, reseed
from polaformer.training.job import Objective


@torch.no_grad()
def count(model: nn.Module, objective: Objective, batches: Iterable[Batch], accelerator: Accelerator) -> Any:
    """The counts of a model, already on its device, on the batches of all processes; a process may have no batches."""
    reseed(derive("evaluation", accelerator.process_index))  # some mechanisms draw random numbers here too
    model, counts = model.eval(), objective.new_counts()
    with accelerator.autocast():
        for batch in batches:
            counts.add(model, to_model(batch, model, accelerator))
    parts = gather_object([counts]) if accelerator.num_processes > 1 else [counts]
    return type(counts).merge(parts)


def to_model(batch: Batch, model: nn.Module, accelerator: Accelerator) -> Batch:
    """The batch on the device of the model, in the dtype of its weights."""
    return batch.to(accelerator.device, next(model.parameters()).dtype)
