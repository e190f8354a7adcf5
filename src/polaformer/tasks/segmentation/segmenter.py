"""A segmenter: features of a backbone, a head that classifies every cell, and an auxiliary head in training.

# B batch, H height, W width in pixels, K classes, h height, w width in cells
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.data.sources.label_sets import IGNORED
from polaformer.ops.grid import Grid
from polaformer.ops.precision import computing_dtype, without_autocast
from polaformer.tasks.dense.model import DenseModel
from polaformer.tasks.dense.padding import sizes_of, upsampled


class Head(Protocol):
    """Maps features to class logits (B, K, h, w)."""

    stride: int  # of the logits

    def __call__(self, features: Sequence[Tensor], sizes: Sequence[Grid] | None = None) -> Tensor:
        """sizes: (height, width) of each image in pixels; None: all fill the batch."""
        ...


class Segmenter(DenseModel):
    """Called as `segmenter(images, mask)` for logits, as `segmenter(images, mask, labels)` for losses.

    The convolutions run in the precision of autocast; losses are in float32, for float64 weights in float64.
    """

    def __init__(
        self, features: nn.Module, head: nn.Module, auxiliary: nn.Module | None = None, auxiliary_weight: float = 0.4
    ) -> None:
        super().__init__(features)
        self.head, self.auxiliary, self.auxiliary_weight = head, auxiliary, auxiliary_weight

    def forward(self, images: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """Images (B, 3, H, W) of any size, and the mask (B, H, W) of their pixels if some are padded on the right or below.

        Without labels: the head's logits (B, K, ⌈H/4⌉, ⌈W/4⌉). With them: `losses`. In evaluation mode an image gets the same
        logits alone as in a padded batch.
        """
        return self.logits(images, mask) if labels is None else self.losses(images, mask, labels)

    def logits(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """The logits (B, K, h, w) with the head's stride, 4."""
        head: Head = self.head  # type: ignore[assignment]
        return head(self.features(images, mask), sizes_of(mask))

    def pixel_logits(self, images: Tensor) -> Tensor:
        """The logits (B, K, H, W) of all pixels, in float32 or float64."""
        stride = self.head.stride
        assert isinstance(stride, int)
        return logits_of_pixels(self.logits(images), (images.shape[-2], images.shape[-1]), stride)

    def losses(self, images: Tensor, mask: Tensor | None, labels: Tensor) -> dict[str, Tensor]:
        """The losses, whose sum is the loss: "loss_decode" and, weighted, "loss_auxiliary" if there is an auxiliary head.

        labels (B, H, W), integers: 0 to K-1 are classes, 255 is ignored.
        """
        sizes, features = sizes_of(mask), self.features(images, mask)
        found = {"loss_decode": _loss(self.head, features, sizes, labels)}
        if self.auxiliary is not None:
            found["loss_auxiliary"] = self.auxiliary_weight * _loss(self.auxiliary, features, sizes, labels)
        return found


def _loss(head: nn.Module, features: Sequence[Tensor], sizes: Sequence[Grid] | None, labels: Tensor) -> Tensor:
    stride = head.stride
    assert isinstance(stride, int)
    logits = logits_of_pixels(head(features, sizes), (labels.shape[-2], labels.shape[-1]), stride, sizes)
    return cross_entropy(logits, labels)


@without_autocast
def logits_of_pixels(logits: Tensor, grid: Grid, stride: int, sizes: Sequence[Grid] | None = None) -> Tensor:
    """The logits (B, K, h, w) of cells as those (B, K, H, W) of a grid of pixels, bilinearly, in float32 or float64.

    Departs: mmsegmentation stretches the logits to the pixels; where the stride does not divide their number, here the pixels
        beyond the border are cropped instead, so that cells stay where they are.
    """
    return upsampled(logits.to(computing_dtype(logits)), stride, grid, sizes, stride)


@without_autocast
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of the pixels that are not ignored; 0, with gradients of 0, if all are.

    Departs: mmsegmentation divides by the number of all pixels, ignored ones included.
    """
    total = F.cross_entropy(logits, labels.long(), ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


def training_losses(model: Segmenter, images: Tensor) -> dict[str, Tensor]:
    """The losses for images (B, 3, H, W) without known labels: what estimates of memory compute on the meta device.

    Batch norm keeps as much for backward without statistics of its own, which one image may not have.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model.losses(images, None, torch.zeros_like(images[:, 0], dtype=torch.uint8))
