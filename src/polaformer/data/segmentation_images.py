"""Images with a class per pixel as samples and batches.

# B batch, C channels, H, W height and width of a batch, h, w of an image
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from polaformer.data.batch import Batch
from polaformer.data.padded_images import normalised, pad_images
from polaformer.data.segmentation_transforms import SegmentationTransform
from polaformer.data.sources.label_sets import IGNORED
from polaformer.data.sources.semantic import SemanticSource
from polaformer.ops.grid import Grid


@dataclass(frozen=True, kw_only=True)
class SegmentationBatch(Batch):
    """Images (B, C, H, W), normalised and padded with zeros on the right and below; the mask (B, H, W) is True inside an image.

    sizes: (height, width) of each image without padding.
    labels: in training, (B, H, W) uint8, IGNORED outside the images and where pixels do not count; (B, 0, 0) in evaluation.
    truths: in evaluation, the labels (h, w) uint8 of each image in its original pixels; empty in training.
    """

    images: Tensor
    mask: Tensor
    sizes: list[Grid]
    labels: Tensor
    truths: list[Tensor]


class SegmentationSample(NamedTuple):
    """An image (C, h, w), and its labels: (h, w) uint8 in training, those of the original pixels in evaluation."""

    image: Tensor
    labels: Tensor


class SegmentationReader:
    """Reads the images of a source, and their label maps, through a transform.

    mean, std: per channel, of values between 0 and 1. training: gives labels, else truths. multiple: of the sides of a padded
    batch, which in training are at least those of a crop.
    """

    def __init__(
        self,
        source: SemanticSource,
        transform: SegmentationTransform,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        training: bool,
        multiple: int = 32,
    ) -> None:
        self.source, self.transform, self.training = source, transform, training
        self.mean, self.std, self.multiple = mean, std, multiple

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> SegmentationSample:
        """The image at `index`, transformed, with its labels; raises ImageError."""
        image, labels = self.transform(*self.source.pair(index, len(self.mean)))
        return SegmentationSample(normalised(image, self.mean, self.std), torch.from_numpy(np.array(labels)))

    def collate(self, samples: Sequence[SegmentationSample], indices: list[int], bad: list[str]) -> SegmentationBatch:
        """The samples, possibly none, as a batch."""
        images, label_maps = [one.image for one in samples], [one.labels for one in samples]
        padded = pad_images(images, self.multiple, least=self.transform.least, channels=len(self.mean))
        nothing = torch.empty(len(samples), 0, 0, dtype=torch.uint8)
        return SegmentationBatch(
            **padded._asdict(),
            labels=_padded(label_maps, padded.mask.shape) if self.training else nothing,
            truths=[] if self.training else label_maps,
            indices=torch.tensor(indices, dtype=torch.int64),
            bad=bad,
        )


def _padded(label_maps: Sequence[Tensor], size: Sequence[int]) -> Tensor:
    """Label maps (h, w) as one tensor of that size (B, H, W), IGNORED around them."""
    padded = torch.full(tuple(size), IGNORED, dtype=torch.uint8)
    for one, (height, width), labels in zip(padded, (one.shape for one in label_maps), label_maps, strict=True):
        one[:height, :width] = labels
    return padded
