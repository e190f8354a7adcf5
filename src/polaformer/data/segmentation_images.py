"""Images with a class per pixel as samples and batches.

# B batch, C channels, H, W height and width of a batch, h, w of an image
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """Normalised images with their labels.

    In training: images (B, C, H, W), padded with zeros on the right and below; the mask (B, H, W), True inside an image; sizes,
    (height, width) of each image without padding; labels (B, H, W) uint8, IGNORED outside the images and where pixels do not
    count. H and W are 0 in evaluation.
    In evaluation: views, of each image one (C, h, w) per scale; truths, the labels (h, w) uint8 of each in its original pixels.
    """

    images: Tensor
    mask: Tensor
    sizes: list[Grid]
    labels: Tensor
    views: list[list[Tensor]]
    truths: list[Tensor]


class SegmentationSample(NamedTuple):
    """An image (C, h, w), in evaluation once per scale, and its labels: (h, w) uint8, in evaluation in the original pixels."""

    views: list[Tensor]
    labels: Tensor


class SegmentationReader:
    """Reads the images of a source, and their label maps, through a transform.

    mean, std: per channel, of values between 0 and 1. training: gives images and labels, else views and truths. multiple: of
    the sides of a padded batch, which are at least those of a crop.
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
        images, labels = self.transform(*self.source.pair(index, len(self.mean)))
        views = [normalised(image, self.mean, self.std) for image in images]
        return SegmentationSample(views, torch.from_numpy(np.array(labels)))

    def collate(self, samples: Sequence[SegmentationSample], indices: list[int], bad: list[str]) -> SegmentationBatch:
        """The samples, possibly none, as a batch."""
        known: dict[str, Any] = {"indices": torch.tensor(indices, dtype=torch.int64), "bad": bad}
        label_maps, number, channels = [one.labels for one in samples], len(samples), len(self.mean)
        if self.training:
            images = [view for one in samples for view in one.views]
            padded = pad_images(images, self.multiple, least=self.transform.least, channels=channels)
            labels = _padded(label_maps, padded.mask.shape)
            return SegmentationBatch(**padded._asdict(), labels=labels, views=[], truths=[], **known)
        nothing = torch.empty(number, 0, 0, dtype=torch.bool)
        known |= {
            "images": torch.empty(number, channels, 0, 0),
            "mask": nothing,
            "sizes": [],
            "labels": nothing.to(torch.uint8),
        }
        return SegmentationBatch(views=[one.views for one in samples], truths=label_maps, **known)


def _padded(label_maps: Sequence[Tensor], size: Sequence[int]) -> Tensor:
    """Label maps (h, w) as one tensor of that size (B, H, W), IGNORED around them."""
    padded = torch.full(tuple(size), IGNORED, dtype=torch.uint8)
    for one, (height, width), labels in zip(padded, (one.shape for one in label_maps), label_maps, strict=True):
        one[:height, :width] = labels
    return padded
