"""How a segmenter segments an image: as a whole or by sliding windows, at several scales, flipped.

# K classes, H height, W width of a view of the image, h height, w width of the result, in pixels
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from polaformer.ops.grid import Grid
from polaformer.tasks.segmentation.inference_settings import Inference
from polaformer.tasks.segmentation.segmenter import Segmenter

CHUNK = 16  # classes that are resized at once


@torch.no_grad()
def segment(model: Segmenter, views: Sequence[Tensor], size: Grid, inference: Inference) -> Tensor:
    """The probabilities (K, h, w) of the classes of one image, in the (height, width) asked for.

    views: the image once per scale, (3, H, W).
    As in mmsegmentation: logits are upsampled to the pixels of a view, averaged over windows and resized; then probabilities
    are averaged over views and flips. Keeps at most two tensors of the size of the result.
    """
    total: Tensor | None = None
    number = 0
    for view, is_flipped in _flipped(views, inference):
        own = _softmax_in_place(_resized(_logits(model, view, inference), size))
        own = own.flip(-1) if is_flipped else own
        total = own if total is None else total.add_(own)
        number += 1
    assert total is not None
    return total if number == 1 else total.div_(number)


@torch.no_grad()
def classify(model: Segmenter, views: Sequence[Tensor], size: Grid, inference: Inference) -> Tensor:
    """The most probable class of each pixel, (h, w) uint8, the first of equals; arguments as of `segment`.

    With one scale and no flip, the result needs no memory of K × h × w: a few classes are resized at a time.
    """
    if not inference.is_single:
        return segment(model, views, size, inference).argmax(dim=0).to(torch.uint8)
    [(view, _)] = _flipped(views, inference)
    logits = _logits(model, view, inference)
    best, found = _best_of(logits[:CHUNK], size)
    for start in range(CHUNK, len(logits), CHUNK):
        value, index = _best_of(logits[start : start + CHUNK], size)
        is_better = value > best
        best, found = torch.where(is_better, value, best), torch.where(is_better, index + start, found)
    return found.to(torch.uint8)


def _best_of(logits: Tensor, size: Grid) -> tuple[Tensor, Tensor]:
    value, index = _resized(logits, size).max(dim=0)
    return value, index


def _flipped(views: Sequence[Tensor], inference: Inference) -> Iterator[tuple[Tensor, bool]]:
    """Each view as a batch (1, 3, H, W), and its mirror image after it."""
    shapes = [tuple(view.shape) for view in views]
    if len(shapes) != len(inference.scales) or any(len(shape) != 3 for shape in shapes):
        raise ValueError(
            f"segment: views have shapes {shapes}; give an image (3, height, width) for each of {inference.scales}"
        )
    for view in views:
        yield view[None], False
        if inference.flip:
            yield view[None].flip(-1), True


def _logits(model: Segmenter, view: Tensor, inference: Inference) -> Tensor:
    """The logits (K, H, W) of the pixels of a view (1, 3, H, W)."""
    if inference.mode == "whole":
        return model.pixel_logits(view)[0]
    rows, columns = (positions(side, inference.window, inference.stride) for side in view.shape[-2:])
    if len(rows) == len(columns) == 1:
        return model.pixel_logits(view)[0]
    return _averaged(model, view, rows, columns)


def _averaged(model: Segmenter, view: Tensor, rows: list[range], columns: list[range]) -> Tensor:
    """The mean logits (K, H, W) of all windows over each pixel."""
    total: Tensor | None = None
    for row in rows:
        for column in columns:
            own = model.pixel_logits(view[..., row.start : row.stop, column.start : column.stop])[0]
            if total is None:
                total = own.new_zeros(len(own), *view.shape[-2:])
            total[:, row.start : row.stop, column.start : column.stop] += own
    assert total is not None
    height, width = (
        _number_of_windows(side, where, view) for side, where in zip(view.shape[-2:], (rows, columns), strict=True)
    )
    return total.div_(height[:, None]).div_(width)


def _number_of_windows(side: int, windows: list[range], like: Tensor) -> Tensor:
    """How many windows each row (or column) is in."""
    counts = like.new_zeros(side)
    for window in windows:
        counts[window.start : window.stop] += 1
    return counts


def positions(side: int, window: int, stride: int) -> list[range]:
    """The windows along a side: every `stride` pixels, the last one moved back so that it ends with the image."""
    number = -(-max(side - window, 0) // stride) + 1
    ends = [min(index * stride + window, side) for index in range(number)]
    return [range(max(end - window, 0), end) for end in ends]


def _resized(logits: Tensor, size: Grid) -> Tensor:
    """Logits (K, H, W) to (K, h, w)."""
    if tuple(logits.shape[-2:]) == tuple(size):
        return logits
    return F.interpolate(logits[None], size=tuple(size), mode="bilinear", align_corners=False)[0]


def _softmax_in_place(logits: Tensor) -> Tensor:
    """The softmax over the first dimension, in the memory of the logits."""
    exponentials = logits.sub_(logits.amax(dim=0)).exp_()
    return exponentials.div_(exponentials.sum(dim=0))
