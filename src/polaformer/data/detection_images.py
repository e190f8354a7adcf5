"""Images with annotated objects as samples and batches.

# B batch, C channels, n objects on an image
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from polaformer.data.batch import Batch
from polaformer.data.detection_transforms import DetectionTransform
from polaformer.data.masks import has_pixels, masks_of, rle_of
from polaformer.data.padded_images import normalised, pad_images
from polaformer.data.sources.coco import CocoSource
from polaformer.data.sources.coco_annotations import Annotation
from polaformer.ops.grid import Grid


@dataclass(frozen=True, kw_only=True)
class DetectionBatch(Batch):
    """Images (B, C, H, W), normalised and padded with zeros on the right and below; the mask (B, H, W) is True inside an image.

    sizes: (height, width) of each image without padding.
    targets: in training, for each image, boxes (n, 4) as corners, labels (n,) from 0, and if asked for masks (n, height, width)
        uint8, all in its resized pixels; n may be 0. There are no crowd regions. Empty in evaluation.
    truths: in evaluation, for each image, its image_id, its height and width before resizing, and its annotations in COCO's
        form, but for category_id, which is the label; with masks, those that have a segmentation have it as run lengths. All
        are in original pixels. Empty in training.
    """

    images: Tensor
    mask: Tensor
    sizes: list[Grid]
    targets: list[dict[str, Tensor]]
    truths: list[dict[str, Any]]

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """The batch on a device, its images in `dtype` if given. Boxes stay in float32: half precision would move them."""
        moved = super().to(device)
        return moved if dtype is None else replace(moved, images=moved.images.to(dtype))


class DetectionSample(NamedTuple):
    """An image (C, H, W), and its target in training or its truth in evaluation."""

    image: Tensor
    target: dict[str, Tensor] | None
    truth: dict[str, Any] | None


class DetectionReader:
    """Reads the images of a source, and the objects on them, through a transform.

    mean, std: per channel, of values between 0 and 1. with_masks: objects then have masks, and those whose mask is unknown or
    has no pixel are left out of training. training: gives targets, else truths. multiple: of the sides of a padded batch.
    """

    def __init__(
        self,
        source: CocoSource,
        transform: DetectionTransform,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        with_masks: bool,
        training: bool,
        multiple: int = 32,
    ) -> None:
        self.source, self.transform, self.with_masks, self.training = source, transform, with_masks, training
        self.mean, self.std, self.multiple = mean, std, multiple

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> DetectionSample:
        """The image at `index`, transformed, with the objects on it; raises ImageError."""
        image, annotations = self.source.read(index, len(self.mean)), self.source.annotations(index)
        if not self.training:
            resized, _ = self.transform(image, [])
            return DetectionSample(normalised(resized, self.mean, self.std), None, self._truth(index, annotations))
        seen, objects = self.transform(image, [one for one in annotations if not one.crowd])
        return DetectionSample(normalised(seen, self.mean, self.std), self._target(objects, (seen.height, seen.width)), None)

    def collate(self, samples: Sequence[DetectionSample], indices: list[int], bad: list[str]) -> DetectionBatch:
        """The samples, possibly none, as a batch."""
        padded = pad_images([one.image for one in samples], self.multiple, channels=len(self.mean))
        return DetectionBatch(
            **padded._asdict(),
            targets=[one.target for one in samples if one.target is not None],
            truths=[one.truth for one in samples if one.truth is not None],
            indices=torch.tensor(indices, dtype=torch.int64),
            bad=bad,
        )

    def _target(self, objects: list[Annotation], size: Grid) -> dict[str, Tensor]:
        masks = {}
        if self.with_masks:
            known = [(one, rle_of(one.segmentation, size)) for one in objects if one.segmentation is not None]
            seen = [(one, rle) for one, rle in known if has_pixels(rle)]
            objects, masks = [one for one, _ in seen], {"masks": masks_of([rle for _, rle in seen], size)}
        boxes = torch.tensor([one.box for one in objects], dtype=torch.float32).view(-1, 4)
        labels = torch.tensor([one.label for one in objects], dtype=torch.int64)
        return {"boxes": boxes, "labels": labels} | masks

    def _truth(self, index: int, annotations: list[Annotation]) -> dict[str, Any]:
        image, size = self.source.image_id(index), self.source.sizes[index]
        found = [_record(one, image, size if self.with_masks else None) for one in annotations]
        return {"image_id": image, "height": size[0], "width": size[1], "annotations": found}


def aspect_groups(sizes: Sequence[Grid]) -> list[int]:
    """For `Order.groups`: 1 for images wider than high, else 0, so that images of a batch need little padding."""
    return [int(width > height) for height, width in sizes]


def _record(one: Annotation, image_id: int, mask_size: Grid | None) -> dict[str, Any]:
    """An annotation in COCO's form. mask_size: (height, width) of the image if the segmentation is wanted."""
    left, top, right, bottom = one.box
    record = {
        "id": one.id,
        "image_id": image_id,
        "category_id": one.label,
        # The differences are those of the file again, digit by digit, and so are comparisons of IoU with a threshold.
        "bbox": [left, top, round(right - left, 9), round(bottom - top, 9)],
        "area": one.area,
        "iscrowd": int(one.crowd),
    }
    if mask_size is not None and one.segmentation is not None:
        record["segmentation"] = rle_of(one.segmentation, mask_size)
    return record
