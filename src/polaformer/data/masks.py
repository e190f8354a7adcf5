"""Segmentations in COCO's two forms, polygons and run lengths (RLE), as masks and back. pycocotools does the work.

Run lengths count pixels column by column, zeros first. `Rle` stands for their compressed form, which is a string:
{"size": [height, width], "counts": str}.

# n objects, H height, W width, P points
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polaformer.extras import require
from polaformer.ops.grid import Grid

Polygons = tuple[np.ndarray, ...]  # of one object, each (P, 2) float64: x and y in pixels
Rle = dict[str, Any]
Segmentation = Polygons | Rle

_LONGEST_NUMBER = 6  # characters of five bits; 2³⁰ pixels are more than any image has


def mask_of(segmentation: Segmentation, size: Grid) -> np.ndarray:
    """The pixels of an object in an image of size (height, width): (H, W) uint8, 0 or 1; what is outside is cut off.

    The mask is that of `COCO.annToMask`. Raises ValueError for run lengths of another size.
    """
    return np.ascontiguousarray(_columns(rle_of(segmentation, size), 0, size[1]).T)


def masks_of(segmentations: Sequence[Segmentation], size: Grid) -> Tensor:
    """The masks of several objects, (n, H, W) uint8; faster than one after the other, since most objects are small."""
    masks = np.zeros((len(segmentations), *size), dtype=np.uint8)
    for mask, segmentation in zip(masks, segmentations, strict=True):
        rle = rle_of(segmentation, size)
        left, top, width, height = _pycocotools().toBbox(rle).astype(int).tolist()
        columns = _columns(rle, left, left + width)
        mask[top : top + height, left : left + width] = columns[:, top : top + height].T
    return torch.from_numpy(masks)


def _columns(rle: Rle, first: int, end: int) -> np.ndarray:
    """The columns from `first` to before `end` of a mask, (end - first, H) uint8."""
    height = rle["size"][0]
    ends = np.cumsum(run_lengths(rle["counts"])).clip(first * height, end * height)
    runs = np.diff(ends, prepend=first * height)
    return np.repeat(np.arange(len(runs), dtype=np.uint8) & 1, runs).reshape(-1, height)


def has_pixels(rle: Rle) -> bool:
    """Whether the mask is not empty."""
    return bool(_pycocotools().area(rle))


def rle_of(segmentation: Segmentation, size: Grid) -> Rle:
    """The run lengths of an object in an image of size (height, width); raises ValueError if they have another size."""
    if isinstance(segmentation, dict):
        if list(segmentation["size"]) != list(size):
            raise ValueError(f"the run lengths are for {segmentation['size']}, but the image has {list(size)} (height, width)")
        return segmentation
    if not segmentation:
        return rle_from_mask(np.zeros(size, dtype=np.uint8))
    flat = [polygon.reshape(-1) for polygon in segmentation]
    few = next((polygon for polygon in flat if len(polygon) < 6), None)  # pycocotools takes four numbers for a box
    if few is not None:
        raise ValueError(f"a polygon has {len(few) // 2} points; at least 3 are needed")
    return _as_text(_pycocotools().merge(_pycocotools().frPyObjects(flat, *size)))


def rle_from_mask(mask: np.ndarray | Tensor) -> Rle:
    """The compressed run lengths of a mask (H, W); pixels that are not 0 belong to the object."""
    pixels = mask.cpu().numpy() if isinstance(mask, Tensor) else mask
    return _as_text(_pycocotools().encode(np.asfortranarray(pixels != 0, dtype=np.uint8)))


def compressed(runs: Sequence[int], size: Grid) -> Rle:
    """The compressed form of run lengths, which must be ≥ 0 and add up to the pixels of the image."""
    return _as_text(_pycocotools().frPyObjects({"counts": list(runs), "size": list(size)}, *size))


def run_lengths(counts: str) -> np.ndarray:
    """The run lengths that a compressed string stands for, int64; raises ValueError if it stands for none.

    A number has five bits per character, the lowest first, and its sign in the highest; from the fourth number on, it is the
    difference from the number two places before. This reads them without pycocotools, which trusts the string.
    """
    codes = np.frombuffer(counts.encode("ascii", "replace"), dtype=np.uint8).astype(np.int64) - 48
    if not len(codes) or codes.min() < 0 or codes.max() > 63 or codes[-1] & 32:
        raise ValueError("it has characters that stand for no number, or ends within one")
    ends = np.flatnonzero(codes & 32 == 0)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > _LONGEST_NUMBER:
        raise ValueError("it has a number that is too large")
    places = np.arange(len(codes)) - np.repeat(starts, lengths)
    numbers = np.add.reduceat((codes & 31) << 5 * places, starts)
    numbers -= np.where(codes[ends] & 16, 1 << 5 * lengths, 0)
    for first in (1, 2):
        numbers[first::2] = np.cumsum(numbers[first::2])
    return numbers


def _as_text(rle: Rle) -> Rle:
    """The run lengths with a string in place of bytes, ready for JSON."""
    return {"size": [int(side) for side in rle["size"]], "counts": rle["counts"].decode("ascii")}


@cache
def _pycocotools() -> Any:
    """Its functions on masks; raises MissingExtraError."""
    require("train", "pycocotools")
    return import_module("pycocotools.mask")
