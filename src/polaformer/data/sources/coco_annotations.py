"""Annotated objects, packed into few arrays: millions of small Python objects would be copied into every data worker."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polaformer.data.masks import Rle, Segmentation
from polaformer.data.views import Box


@dataclass(frozen=True, slots=True)
class Annotation:
    """An object on an image. crowd: the box and segmentation are of a group of objects that are not annotated one by one.

    label: the index of the class. area: of the segmentation, in pixels. segmentation: polygons or run lengths; None if unknown.
    """

    box: Box
    label: int
    area: float
    crowd: bool
    segmentation: Segmentation | None
    id: int


class PackedAnnotations:
    """Annotations that are put together when they are asked for."""

    def __init__(self, annotations: Sequence[Annotation]) -> None:
        self.boxes = np.array([one.box for one in annotations], dtype=np.float64).reshape(-1, 4)
        self.labels = np.array([one.label for one in annotations], dtype=np.int32)
        self.areas = np.array([one.area for one in annotations], dtype=np.float64)
        self.crowds = np.array([one.crowd for one in annotations], dtype=bool)
        self.ids = np.array([one.id for one in annotations], dtype=np.int64)
        of_each = [one.segmentation if isinstance(one.segmentation, tuple) else () for one in annotations]
        polygons = [polygon for some in of_each for polygon in some]
        self.points = np.concatenate([np.empty((0, 2)), *polygons])
        self.polygon_ends = _ends([len(polygon) for polygon in polygons])
        self.object_ends = _ends([len(some) for some in of_each])
        self.run_lengths = {i: one.segmentation for i, one in enumerate(annotations) if isinstance(one.segmentation, dict)}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Annotation:
        left, top, right, bottom = self.boxes[index].tolist()
        return Annotation(
            box=(left, top, right, bottom),
            label=int(self.labels[index]),
            area=float(self.areas[index]),
            crowd=bool(self.crowds[index]),
            segmentation=self.segmentation(index),
            id=int(self.ids[index]),
        )

    def segmentation(self, index: int) -> Segmentation | None:
        """The polygons or run lengths of an object, or None."""
        found: Rle | None = self.run_lengths.get(index)
        if found is not None:
            return found
        polygons = range(self.object_ends[index], self.object_ends[index + 1])
        ends = self.polygon_ends
        return tuple(self.points[ends[one] : ends[one + 1]] for one in polygons) or None

    @property
    def with_masks(self) -> np.ndarray:
        """Which of them have a segmentation, (N,) bool."""
        found = np.diff(self.object_ends) > 0
        found[list(self.run_lengths)] = True
        return found


def _ends(lengths: Sequence[int]) -> np.ndarray:
    """Where each of several arrays ends that were joined into one, preceded by 0."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
