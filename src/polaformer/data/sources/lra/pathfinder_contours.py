"""Grows the contours of Pathfinder images: two long ones per image, and short ones, the distractors, in the space left.

Most attempts at two long contours fail: they run into each other or into the border. So thousands grow at the same time, each
pair on a canvas of its own, one segment per step, and a pair that fails is dropped at once. A canvas only holds what is
occupied; pictures are drawn afterwards, from the positions and directions of the segments.

# A canvases, B contours that still grow, C candidates for the end of a segment, L segments of a contour, P pixels of a patch
"""

from math import cos, pi, sin
from typing import NamedTuple

import numpy as np

from polaformer.data.sources.lra import pathfinder_stamps as stamps
from polaformer.data.sources.lra.pathfinder_stamps import AREA, GAP, LENGTH, MASKS, NUM_DEGREES, PATCH

SEED_DISTANCE = 7  # between the starts of the two long contours
NUM_DISTRACTORS = 5
SEGMENT_TRIES, DISTRACTOR_TRIES = 3, 5
NUM_ATTEMPTS = 2048  # at pairs of long contours, at the same time

# Occupancies are 0 to 255, for 0 to 1.
MAX_OCCUPANCY = 76  # 0.3: of a pixel that a contour can start at
MAX_OCCUPANCY_SUM = 458  # below 1.8: of a pixel and of the segment drawn on it
MIN_WEIGHT = 1e-4 * 255  # of all candidates together
MIN_SHARE = 0.01  # of pixels that are free, for one more distractor


class Contours(NamedTuple):
    """Contours that grow at the same time, each on its own canvas: their last segments."""

    canvas: np.ndarray  # (B,) its number
    pivot: np.ndarray  # (B,) the position that the segment points away from
    direction: np.ndarray  # (B,)
    start: np.ndarray  # (B,) the position that the segment is drawn from
    mask: np.ndarray  # (B, P) what it occupies: entered into the canvas one step later, since its successor may touch it

    def at(self, which: np.ndarray) -> "Contours":
        """Those at the indices."""
        return Contours(*(one[which] for one in self))


class Segments(NamedTuple):
    """All segments of one contour on each of some canvases."""

    start: np.ndarray  # (A, L) position, −1 where there is no contour
    direction: np.ndarray  # (A, L)

    @staticmethod
    def none(num_canvases: int, length: int) -> "Segments":
        """No contour on any canvas."""
        return Segments(*(np.full((num_canvases, length), -1, dtype=np.intp) for _ in Segments._fields))

    def put(self, number: int, contours: Contours) -> None:
        """Stores the last segment of the contours as number `number` of all."""
        self.start[contours.canvas, number] = contours.start
        self.direction[contours.canvas, number] = contours.direction


class Pairs(NamedTuple):
    """Two long contours on each canvas."""

    occupied: np.ndarray  # (A, AREA)
    first: Segments
    second: Segments


# Two seeds


def seed_pairs(number: int, random: np.random.Generator) -> tuple[Contours, Contours]:
    """The first segments of the two contours on each canvas: the first near the middle, the second 7 pixels away.

    The second may overlap the first. Both are so near the middle that they stay in the window: there is nothing to try again.
    """
    start = integers(random, len(_STARTS), number)
    tail = _FIRST_TAILS[start, integers(random, _NUM_FIRST_TAILS[start], number)]
    around = _CIRCLE[:, integers(random, 360, number)]  # (2, A)
    y, x = np.rint(stamps.coordinates(tail) + SEED_DISTANCE * around).astype(np.intp)
    second_tail = stamps.position(y, x)
    canvas = np.arange(number)
    return _seeds(canvas, tail, _STARTS[start]), _seeds(canvas, second_tail, integers(random, NUM_DEGREES, number))


def _seeds(canvas: np.ndarray, tail: np.ndarray, direction: np.ndarray) -> Contours:
    mask = MASKS[direction] * stamps.INSIDE[tail[:, None] + PATCH]
    return Contours(canvas, _pivot(tail, direction), direction, tail, mask)


def _pivot(tail: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """The position that a first segment points away from: the gap before its tail."""
    return stamps.move(stamps.move(tail, direction, LENGTH), direction, LENGTH + GAP, backwards=True)


# Extension step


def extend(occupied: np.ndarray, last: Contours, random: np.random.Generator) -> tuple[np.ndarray, Contours]:
    """One more segment: the indices of the contours that it was possible for, and these contours.

    Enters the segments before the new ones into `occupied` (A, AREA).
    """
    pivot = stamps.move(last.pivot, last.direction, LENGTH + 2 * GAP)
    candidates = pivot[:, None] + stamps.CIRCLE  # (B, C)
    cumulative = _weights(occupied, last, candidates).cumsum(1)
    chosen = np.zeros(len(pivot), dtype=np.intp)
    mask = np.empty_like(last.mask)
    pending = np.flatnonzero(cumulative[:, -1] >= MIN_WEIGHT)
    found = []
    for _ in range(SEGMENT_TRIES):
        threshold = random.random(len(pending)) * cumulative[pending, -1]
        chosen[pending] = (cumulative[pending] > threshold[:, None]).argmax(1)
        patch = candidates[pending, chosen[pending], None] + PATCH  # (B, P)
        mask[pending] = MASKS[NUM_DEGREES + chosen[pending]] * stamps.INSIDE[patch]
        below = occupied.ravel()[last.canvas[pending, None] * AREA + patch]
        fits = np.add(mask[pending], below, dtype=np.uint16).max(1, initial=0) <= MAX_OCCUPANCY_SUM
        found.append(pending[fits])
        pending = pending[~fits]
    grown = np.sort(np.concatenate(found))
    enter(occupied, last.at(grown))
    start, direction = candidates[grown, chosen[grown]], NUM_DEGREES + chosen[grown]
    return grown, Contours(last.canvas[grown], pivot[grown], direction, start, mask[grown])


def enter(occupied: np.ndarray, contours: Contours) -> None:
    """Enters the last segments into `occupied` (A, AREA)."""
    patch = (contours.canvas * AREA + contours.start)[:, None] + PATCH
    occupied.ravel()[patch] = np.maximum(occupied.ravel()[patch], contours.mask)


def _weights(occupied: np.ndarray, last: Contours, candidates: np.ndarray) -> np.ndarray:
    """(B, C), larger for a candidate with free pixels around it, and for a small turn."""
    around = (last.canvas[:, None] * AREA + candidates)[:, :, None] + stamps.NEIGHBOURS  # (B, C, 5)
    free = 255 - occupied.ravel()[around].max(2)
    return free * stamps.TURNS[last.direction] * stamps.INSIDE[candidates]


# Two long contours


def grow_pairs(number: int, length: int, random: np.random.Generator) -> Pairs:
    """Two contours of `length` segments each, on `number` canvases."""
    found: list[Pairs] = []
    while sum(len(pairs.occupied) for pairs in found) < number:
        found.append(attempt_pairs(NUM_ATTEMPTS, length, random))
    occupied = np.concatenate([pairs.occupied for pairs in found])[:number]
    first, second = (
        Segments(*(np.concatenate(parts)[:number] for parts in zip(*contours, strict=True)))
        for contours in ([pairs.first for pairs in found], [pairs.second for pairs in found])
    )
    return Pairs(occupied, first, second)


def attempt_pairs(number: int, length: int, random: np.random.Generator) -> Pairs:
    """The pairs that succeed out of `number` attempts."""
    occupied = np.tile(stamps.EMPTY, (number, 1))
    first, second = seed_pairs(number, random)
    segments = Segments.none(number, length), Segments.none(number, length)
    segments[0].put(0, first)
    segments[1].put(0, second)
    for step in range(1, length):
        there, first = extend(occupied, first, random)
        segments[0].put(step, first)
        there, second = extend(occupied, second.at(there), random)
        segments[1].put(step, second)
        first = first.at(there)
    enter(occupied, second)  # and not the first, as the original does
    return Pairs(occupied[first.canvas], *(Segments(*(part[first.canvas] for part in one)) for one in segments))


# Distractors


def add_distractors(occupied: np.ndarray, length: int, random: np.random.Generator) -> list[Segments]:
    """Five short contours per canvas, entered into `occupied` (A, AREA). One that fails five times is left out."""
    return [_add_distractor(occupied, length, random) for _ in range(NUM_DISTRACTORS)]


def _add_distractor(occupied: np.ndarray, length: int, random: np.random.Generator) -> Segments:
    added = Segments.none(len(occupied), length)
    pending = np.arange(len(occupied))
    for _ in range(DISTRACTOR_TRIES):
        trial = occupied[pending]  # a copy: what fails leaves no trace
        segments = Segments.none(len(trial), length)
        contours = seed_distractors(trial, random)
        segments.put(0, contours)
        for step in range(1, length):
            _, contours = extend(trial, contours, random)
            segments.put(step, contours)
        enter(trial, contours)
        done = contours.canvas
        for whole, part in zip((occupied, *added), (trial, *segments), strict=True):
            whole[pending[done]] = part[done]
        pending = np.delete(pending, done)
    return added


def seed_distractors(occupied: np.ndarray, random: np.random.Generator) -> Contours:
    """The first segment of a distractor on each canvas of `occupied` (A, AREA) that has room for it."""
    found = []
    free = (stamps.window(occupied) <= MAX_OCCUPANCY).mean(axis=(1, 2))
    pending = np.flatnonzero(free >= MIN_SHARE)
    for _ in range(SEGMENT_TRIES):
        direction = integers(random, NUM_DEGREES, len(pending))
        tails = free_tails(occupied[pending], direction)
        num_tails = tails.sum(1)
        chosen = integers(random, num_tails, len(pending))
        tail = _WINDOW[(tails.cumsum(1) > chosen[:, None]).argmax(1)]
        is_inside = stamps.INSIDE[stamps.move(tail, direction, LENGTH)] & stamps.INSIDE[_pivot(tail, direction)]
        good = (num_tails > 0) & is_inside
        found.append(_seeds(pending[good], tail[good], direction[good]))
        pending = pending[(num_tails > 0) & ~is_inside]
    return Contours(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def free_tails(occupied: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """The pixels of the window that a contour can start at: (A, AREA), (A,) to (A, SIDE · SIDE), boolean.

    As in the original, a direction has no such pixel at all if at some pixel of the window, even in a corner, all those that
    would have to be free are outside it: the original finds −∞ there, and gives up. This leaves 30 of 360 directions, all to
    the upper left, and most distractors are left out.
    """
    window = np.arange(len(occupied))[:, None] * AREA + _WINDOW
    most = np.zeros(window.shape, dtype=np.uint8)
    for offset in _KERNELS[direction].T:
        most = np.maximum(most, occupied.ravel()[window + offset[:, None]])
    return (most <= MAX_OCCUPANCY) & np.isin(direction, _STARTS)[:, None]


def integers(random: np.random.Generator, below: int | np.ndarray, number: int) -> np.ndarray:
    """Uniform integers from 0; made from random.random, whose numbers are the same in all versions of NumPy."""
    return (random.random(number) * below).astype(np.intp)


def _kernels() -> np.ndarray:
    """The offsets from the tail of a seed to the pixels that must be free for it, (360, most), padded by repetition.

    They are one pixel further down and to the right than the segment will be, as in the original.
    """
    radius = LENGTH + GAP
    masks = MASKS[:NUM_DEGREES].reshape(NUM_DEGREES, 2 * stamps.RADIUS + 1, -1)[:, : 2 * radius + 1, : 2 * radius + 1]
    kernels = [stamps.offset(*(np.argwhere(mask == 255) - radius).T) for mask in masks]
    most = max(len(kernel) for kernel in kernels)
    return np.stack([np.pad(kernel, (0, most - len(kernel)), mode="edge") for kernel in kernels])


def _first_tails() -> np.ndarray:
    """The positions that a first contour may start at for each of _STARTS, (30, most), 0 after the last one."""
    band = 2 * SEED_DISTANCE
    occupied = stamps.EMPTY.copy()
    stamps.window(occupied)[:] = 255
    stamps.window(occupied)[band:-band, band:-band] = 0
    free = free_tails(np.tile(occupied, (len(_STARTS), 1)), _STARTS)
    tails = np.zeros((len(_STARTS), free.sum(1).max()), dtype=np.intp)
    for row, is_free in zip(tails, free, strict=True):
        row[: is_free.sum()] = _WINDOW[is_free]
    return tails


_CIRCLE = np.array([[way(degrees * pi / 180) for degrees in range(360)] for way in (sin, cos)])
_WINDOW = np.flatnonzero(stamps.INSIDE)  # the positions of the pixels of the window
_KERNELS = _kernels()
_STARTS = np.flatnonzero(stamps.INSIDE[_WINDOW[:, None, None] + _KERNELS].any(2).all(0))  # directions; see free_tails
_FIRST_TAILS = _first_tails()
_NUM_FIRST_TAILS = (_FIRST_TAILS > 0).sum(1)
