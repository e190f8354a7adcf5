"""Labelled images as samples and batches.

# B batch, C channels
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polaformer.data.batch import Batch
from polaformer.data.sources.source import Source
from polaformer.data.transforms import Transform


@dataclass(frozen=True, kw_only=True)
class LabelledImages(Batch):
    """Images (B, C, H, W) and their labels (B,)."""

    images: Tensor
    labels: Tensor

    def logits(self, model: nn.Module) -> Tensor:
        """The outputs of a model for the images, (B, K)."""
        return model(self.images)


class LabelledImage(NamedTuple):
    """An image (C, H, W) and its label."""

    image: Tensor
    label: int


class ImageReader:
    """Reads the images of a source through a transform, with three channels or one."""

    def __init__(self, source: Source, transform: Transform, *, channels: int) -> None:
        self.source, self.transform, self.channels = source, transform, channels

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> LabelledImage:
        """The image at `index`, transformed; raises ImageError."""
        return LabelledImage(self.transform(self.source.read(index, self.channels)), self.source.labels[index])

    def collate(self, samples: Sequence[LabelledImage], indices: list[int], bad: list[str]) -> LabelledImages:
        """The images, possibly none, as a batch."""
        return LabelledImages(
            images=torch.stack([one.image for one in samples]) if samples else torch.empty(0, self.channels, 1, 1),
            labels=torch.tensor([one.label for one in samples], dtype=torch.int64),
            indices=torch.tensor(indices, dtype=torch.int64),
            bad=bad,
        )
