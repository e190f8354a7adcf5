"""Training steps of the Long Range Arena's models, timed in interleaved rounds: tokens per millisecond, and memory.

A step is forward, backward, clipping and the update of AdamW, on full-length random sequences. The published table times whole
training runs, evaluations included. Without dropout of attention weights, which PyTorch's fused softmax for
CPUs does not support.

# B samples per step, K documents per sample, N tokens
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_

from polaformer.analysis.call_memory import allocated_peak
from polaformer.analysis.timing import Ratio, Timing, measure, slowdown
from polaformer.attention.layer.published_layer import PublishedSoftmax
from polaformer.data.randomness import reseed
from polaformer.data.sources.lra.datasets import DatasetName
from polaformer.recipes.lra import build_recipe
from polaformer.tasks.sequence.data import SequenceBatch
from polaformer.tasks.sequence.description import describe
from polaformer.tasks.sequence.objective import SequenceObjective
from polaformer.training.optim import create_optimizer

BASELINE = "softmax"  # by PyTorch's fused kernel
MATERIALISED = "softmax-materialised"  # with its N×N maps in memory, as published


@dataclass(frozen=True)
class SpeedRow:
    """One model on one task. tokens: B·N, which counts one of the two documents of Retrieval, as the paper does."""

    tokens: int
    timing: Timing
    speedup: Ratio | None  # over softmax
    peak_bytes: int | None  # of PyTorch's allocator, for one micro-batch
    memory_ratio: float | None  # … relative to softmax
    speedup_over_materialised: Ratio | None = None  # these two are None if materialised softmax is not timed
    memory_ratio_to_materialised: float | None = None

    @property
    def tokens_per_millisecond(self) -> float | None:
        """The throughput; None if the step was too slow to time."""
        return throughput(self.tokens, self.timing.median)

    def as_record(self) -> dict[str, Any]:
        """The row for JSON."""
        return {
            "tokens_per_millisecond": self.tokens_per_millisecond,
            **_ratio_record("speedup", self.speedup),
            "peak_bytes": self.peak_bytes,
            "memory_ratio": self.memory_ratio,
            **_ratio_record("speedup_over_materialised", self.speedup_over_materialised),
            "memory_ratio_to_materialised": self.memory_ratio_to_materialised,
            "time": self.timing.as_record(),
        }


def _ratio_record(name: str, ratio: Ratio | None) -> dict[str, Any]:
    return {name: ratio and ratio.median, f"{name}_interval": ratio and (ratio.low, ratio.high)}


def throughput(tokens: int, seconds: float | None) -> float | None:
    """Tokens per millisecond."""
    return None if seconds is None else tokens / (1e3 * seconds)


class TrainingStep:
    """A call that makes one update of a model on random sequences, in micro-batches."""

    def __init__(self, task: DatasetName, row: str, batch: int, micro_batch: int, device: str) -> None:
        recipe = build_recipe(task, BASELINE if row == MATERIALISED else row)
        options = tuple(pair for pair in recipe.attention_options or () if not pair.startswith("dropout="))
        self.description, self.device = describe(replace(recipe, attention_options=options or None)), device
        reseed(0)
        self.model = self.description.build().to(device).train()
        if row == MATERIALISED:
            for layer in self.model.attentions():
                layer.core = PublishedSoftmax(layer.num_heads, layer.dim // layer.num_heads)
        ids = torch.randint(1, 15, (batch, self.description.num_documents, self.description.length), dtype=torch.int32)
        self.parts = [self._batch(part.to(device)) for part in ids.split(micro_batch)]
        self.optimizer = create_optimizer(self.model, recipe)
        self.objective = SequenceObjective(len(self.description.classes))

    def _batch(self, ids: Tensor) -> SequenceBatch:
        labels = torch.zeros(len(ids), dtype=torch.int64, device=self.device)
        return SequenceBatch(ids=ids, labels=labels, indices=torch.arange(len(ids)), bad=[])

    def __call__(self) -> None:
        """Forward and backward of each micro-batch, clipping, update."""
        for part in self.parts:
            (self.objective.loss(self.model, part) / len(self.parts)).backward()
        clip_grad_value_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak_bytes(self) -> int:
        """The peak of PyTorch's allocator for one micro-batch, beyond what was allocated before."""

        def one() -> None:
            self.objective.loss(self.model, self.parts[0]).backward()

        found = allocated_peak(one, self.device)
        self.optimizer.zero_grad()
        return found


def compare(
    task: DatasetName,
    rows: Sequence[str],
    *,
    batch: int,
    micro_batch: int,
    rounds: int,
    seconds: float,
    device: str = "cpu",
    on_call: Callable[[str], None] = lambda _: None,
) -> dict[str, SpeedRow]:
    """The rows of one task, timed in interleaved rounds: the same batch and micro-batch for all."""
    steps, peaks = {}, {}
    for row in rows:
        on_call(f"{row}, memory")
        steps[row] = TrainingStep(task, row, batch, micro_batch, device)
        peaks[row] = steps[row].peak_bytes()
    timings = measure(steps, baseline=BASELINE, rounds=rounds, seconds=seconds, on_call=on_call)
    tokens = batch * next(iter(steps.values())).description.length
    found = {}
    for row, timing in timings.items():
        to_base, to_maps = (
            (slowdown(timings.get(one), timing), _quotient(peaks[row], peaks.get(one))) for one in (BASELINE, MATERIALISED)
        )
        found[row] = SpeedRow(tokens, timing, to_base[0], peaks[row], to_base[1], *to_maps)
    return found


def _quotient(number: int, other: int | None) -> float | None:
    return number / other if other else None
