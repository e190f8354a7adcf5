"""Detections of an image: boxes, scores, labels and masks, and what is done with them after the model.

# n detections, H height, W width
"""

from math import ceil, floor
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polaformer.ops.grid import Grid

THRESHOLD = 0.5  # of mask probabilities


class Detections(NamedTuple):
    """The detections of an image, best first; boxes are (x1, y1, x2, y2) in pixels."""

    boxes: Tensor  # (n, 4), float32
    scores: Tensor  # (n,)
    labels: Tensor  # (n,), from 0 on
    masks: Tensor | None = None  # (n, 1, 28, 28) probabilities inside each box


def rescaled(detections: Detections, size: Grid, original_size: Grid) -> Detections:
    """The detections in an image of `size` as those in the original image that it was resized from."""
    vertical, horizontal = original_size[0] / size[0], original_size[1] / size[1]
    boxes = detections.boxes * detections.boxes.new_tensor([horizontal, vertical, horizontal, vertical])
    limit = boxes.new_tensor([original_size[1], original_size[0]] * 2)
    return detections._replace(boxes=boxes.clamp(min=0).minimum(limit))


def paste_masks(masks: Tensor, boxes: Tensor, size: Grid) -> Tensor:
    """Mask probabilities (n, 1, h, w) of boxes (n, 4) as boolean masks (n, H, W) of the whole image.

    Interpolated bilinearly at the centres of pixels, in float32, as in mmdetection; boxes are not rounded.
    """
    pasted = torch.zeros((len(boxes), *size), dtype=torch.bool, device=masks.device)
    for target, mask, box in zip(pasted, masks.float(), boxes.float(), strict=True):
        left, top, right, bottom = box.tolist()
        if not (right > left and bottom > top):  # NaN too
            continue
        first_row, last_row = max(floor(top), 0), min(ceil(bottom), size[0])
        first_column, last_column = max(floor(left), 0), min(ceil(right), size[1])
        if last_row <= first_row or last_column <= first_column:
            continue
        columns = torch.arange(first_column, last_column, device=masks.device)
        rows = torch.arange(first_row, last_row, device=masks.device)
        x = (columns + 0.5 - box[0]) / (box[2] - box[0]) * 2 - 1
        y = (rows + 0.5 - box[1]) / (box[3] - box[1]) * 2 - 1
        grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)  # (rows, columns, 2)
        inside = F.grid_sample(mask[None], grid[None], align_corners=False)[0, 0] >= THRESHOLD
        target[first_row:last_row, first_column:last_column] = inside
    return pasted
