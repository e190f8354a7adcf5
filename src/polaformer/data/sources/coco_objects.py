"""The rules for one object of an annotation file: what of its box, segmentation, area and crowd flag is repaired or dropped."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from polaformer.data.masks import Polygons, Rle, Segmentation, compressed, mask_of, run_lengths
from polaformer.data.sources.coco_annotations import Annotation
from polaformer.data.views import Box
from polaformer.ops.grid import Grid

# COCO's own boxes, rounded to two decimals, leave images by up to a hundredth of a pixel, and are evaluated so.
TOLERANCE = 1.0  # pixels by which a box may leave its image unchanged


class ObjectRules:
    """The rules for an object on an image of size (height, width). note: called with what was repaired, dropped or skipped."""

    def __init__(self, size: Grid, note: Callable[[str], object]) -> None:
        self.height, self.width = self.size = size
        self.note = note

    def annotation(self, record: dict[str, Any], label: int, number: int) -> Annotation | None:
        """The object of a record, or None if it is skipped."""
        crowd = self._crowd(record.get("iscrowd"))
        if crowd is None:
            return None
        segmentation = self._segmentation(record.get("segmentation"))
        box = self._box(record.get("bbox"), segmentation)
        if box is None:
            return None
        return Annotation(box, label, self._area(record.get("area"), segmentation, box), crowd, segmentation, number)

    def _crowd(self, value: Any) -> bool | None:
        if type(value) in (int, float) and value in (0, 1):
            return value == 1
        if value is None:
            self.note("iscrowd missing; taken as 0")
            return False
        if isinstance(value, bool):
            self.note("iscrowd true or false; taken as 1 or 0")
            return value
        self.note("iscrowd neither 0 nor 1; skipped")
        return None

    def _box(self, value: Any, segmentation: Segmentation | None) -> Box | None:
        """The stated box, or that of the segmentation."""
        if type(value) is list and str in map(type, value):
            value = [_number(one) for one in value]
            if _are_numbers(value) and len(value) == 4:
                self.note("box with numbers as strings; converted")
        problem = self._box_problem(value)
        if problem is None:
            left, top, width, height = map(float, value)
            box = (left, top, left + width, top + height)
            if max(-left, -top, box[2] - self.width, box[3] - self.height) <= TOLERANCE:
                return box
            self.note("box partly outside the image; clipped")
            return self._clipped(box)
        around = None if segmentation is None else self._around(segmentation)
        self.note(f"{problem}; {'skipped' if around is None else 'taken from the segmentation'}")
        return around

    def _box_problem(self, value: Any) -> str | None:
        """Why four numbers (left, top, width, height) cannot be used as a box."""
        if value is None:
            return "box missing"
        if type(value) is not list or len(value) != 4:
            return "box without four entries"
        if not _are_numbers(value):
            return "box with entries that are not numbers"
        if not _are_finite(value):
            return "box not finite"
        left, top, width, height = map(float, value)
        if width < 0 or height < 0:
            return "box with negative size"
        if width == 0 or height == 0:
            return "box of size zero"
        return "box outside the image" if self._clipped((left, top, left + width, top + height)) is None else None

    def _clipped(self, box: Box) -> Box | None:
        """The part of the box that is inside the image, if there is one."""
        left, top = max(box[0], 0.0), max(box[1], 0.0)
        right, bottom = min(box[2], float(self.width)), min(box[3], float(self.height))
        return (left, top, right, bottom) if left < right and top < bottom else None

    def _around(self, segmentation: Segmentation) -> Box | None:
        """The box around an object."""
        if isinstance(segmentation, dict):
            rows, columns = np.nonzero(mask_of(segmentation, self.size))
            if not len(rows):
                return None
            return float(columns.min()), float(rows.min()), float(columns.max() + 1), float(rows.max() + 1)
        points = np.concatenate(segmentation)
        (left, top), (right, bottom) = points.min(axis=0).tolist(), points.max(axis=0).tolist()
        return self._clipped((left, top, right, bottom))

    def _area(self, value: Any, segmentation: Segmentation | None, box: Box) -> float:
        """The stated area, or that of the segmentation or box."""
        if type(value) in (int, float) and _are_finite([value]) and value > 0:
            return float(value)
        self.note("area missing or not positive; computed")
        of_box = (box[2] - box[0]) * (box[3] - box[1])
        if isinstance(segmentation, dict):
            return float(run_lengths(segmentation["counts"])[1::2].sum())
        return of_box if segmentation is None else min(sum(map(_area_of, segmentation)), of_box)

    def _segmentation(self, value: Any) -> Segmentation | None:
        if value is None or value == []:
            return None
        if isinstance(value, dict):
            return self._run_lengths(value)
        if not isinstance(value, list):
            self.note("segmentation neither polygons nor run lengths; dropped")
            return None
        if _are_numbers(value):
            self.note("polygon without a list around it; taken as the only one")
            value = [value]
        polygons: Polygons = tuple(polygon for polygon in map(self._polygon, value) if polygon is not None)
        return polygons or None

    def _polygon(self, value: Any) -> np.ndarray | None:
        problem = self._polygon_problem(value)
        if problem is None:
            return np.array(value, dtype=np.float64).reshape(-1, 2)
        self.note(f"polygon {problem}; dropped")
        return None

    def _polygon_problem(self, value: Any) -> str | None:
        """Why a list of coordinates cannot be used. What leaves the image a little is cut off when the mask is made."""
        if type(value) is not list or not _are_numbers(value):
            return "not a list of numbers"
        if len(value) % 2:
            return "with an odd number of coordinates"
        if len(value) < 6:
            return "with fewer than 3 points"
        if not _are_finite(value):
            return "not finite"
        x, y = value[::2], value[1::2]
        left, right, top, bottom = min(x), max(x), min(y), max(y)
        if right <= 0 or left >= self.width or bottom <= 0 or top >= self.height:
            return "outside the image"
        # The rasteriser takes time and memory in proportion to the outline.
        is_far = left < -self.width or right > 2 * self.width or top < -self.height or bottom > 2 * self.height
        return "far outside the image" if is_far else None

    def _run_lengths(self, value: dict[str, Any]) -> Rle | None:
        counts = value.get("counts")
        if value.get("size") != list(self.size):
            self.note("run lengths of another size than the image; dropped")
            return None
        if isinstance(counts, str):
            try:
                runs = run_lengths(counts).tolist()
            except ValueError:
                runs = []
        else:
            runs = counts if type(counts) is list and set(map(type, counts)) <= {int} else []
        if not runs or min(runs) < 0 or sum(runs) != self.height * self.width:
            self.note("run lengths that do not fill the image; dropped")
            return None
        return {"size": list(self.size), "counts": counts} if isinstance(counts, str) else compressed(runs, self.size)


def _number(value: Any) -> Any:
    """The number in a string; other values unchanged."""
    try:
        return float(value) if type(value) is str else value
    except ValueError:
        return value


def _are_numbers(values: list[Any]) -> bool:
    """Whether they are JSON numbers; true and false are not."""
    return set(map(type, values)) <= {int, float}


def _are_finite(values: list[Any]) -> bool:
    try:
        return all(map(math.isfinite, values))
    except OverflowError:  # an integer that no float can hold
        return False


def _area_of(polygon: np.ndarray) -> float:
    """The area inside a polygon (P, 2), by the shoelace formula."""
    x, y = polygon.T
    return float(abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2)
