"""What one segment of a Pathfinder contour looks like, and where the next one may end, for every direction: tables.

A contour is a row of segments and gaps. A direction is the number of an angle θ: y grows with sin θ, x with cos θ.
0 to 359 are the whole degrees from −180, which a contour may start in; such a segment is drawn forwards, from its tail. The C
directions after them are those to the candidates for the end of the next segment, which is drawn backwards, from that end.

A position is the flat index of a pixel (y, x) on a canvas: the window of 32×32 pixels with a margin around it, so that a patch
at the edge of the window needs no clipping. Grey levels and occupancies are 0 to 255.

# D directions, C candidates for the end of the next segment, P pixels of a patch
"""

from math import atan2, ceil, cos, pi, sin

import numpy as np
from PIL import Image, ImageDraw

from polaformer.data.sources.lra.datasets import SIDE

LENGTH = 2  # of a segment
THICKNESS = 0.5
GAP = 1  # between segments of one contour, and around a contour
ANTIALIAS = 2  # segments and markers are drawn this much larger, and reduced
BORDER = 1  # occupied pixels at each edge of the window
MARKER_RADIUS = 1.5

RADIUS = LENGTH + ceil(THICKNESS) + GAP  # of the patch that a segment is drawn on
MARGIN = 8  # around the window: more than a step, the circle of candidates and a disc
STRIDE = SIDE + 2 * MARGIN
AREA = STRIDE * STRIDE
NUM_DEGREES = 360


def offset(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The number to add to a position to move by (y, x)."""
    return y * STRIDE + x


def position(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The position of the pixel (y, x) of the window."""
    return offset(y + MARGIN, x + MARGIN)


def coordinates(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pixels (y, x) of the window at the positions."""
    y, x = np.divmod(positions, STRIDE)
    return y - MARGIN, x - MARGIN


def window(canvas: np.ndarray) -> np.ndarray:
    """The window of canvases: (…, AREA) to (…, SIDE, SIDE)."""
    inside = slice(MARGIN, MARGIN + SIDE)
    return canvas.reshape(*canvas.shape[:-1], STRIDE, STRIDE)[..., inside, inside]


def move(positions: np.ndarray, directions: np.ndarray, distance: float, *, backwards: bool = False) -> np.ndarray:
    """The positions at a distance; the coordinates reached are rounded up.

    They are rounded up as the floats they are, like those of the original: 8 + 4 sin π is 8, but 7 + 4 sin π is above 7. So a
    contour that runs straight along the upper or left edge turns away from it.
    """
    sines, cosines = (_SINES[int(backwards)][directions], _COSINES[int(backwards)][directions])
    y, x = coordinates(positions)
    return position(*(np.ceil(one).astype(np.intp) for one in (y + distance * sines, x + distance * cosines)))


def disc(radius: int) -> np.ndarray:
    """The pixels (y, x) within `radius` of (0, 0), as rows."""
    grid = np.mgrid[-radius : radius + 1, -radius : radius + 1].reshape(2, -1).T
    return grid[(grid**2).sum(1) <= radius**2]


def bytescale(array: np.ndarray) -> np.ndarray:
    """The values mapped linearly from their own range to 0..255, as uint8."""
    low, high = array.min(axis=(-2, -1), keepdims=True), array.max(axis=(-2, -1), keepdims=True)
    return (255.0 / (high - low) * (array - low) + 0.5).astype(np.uint8)


def _reduced(picture: np.ndarray, size: int) -> np.ndarray:
    return np.asarray(Image.fromarray(bytescale(picture)).resize((size, size), Image.Resampling.LANCZOS))


def _candidates() -> np.ndarray:
    """The pixels (y, x) on the circle of radius 3 around (0, 0), without duplicates, (C, 2)."""
    radius = LENGTH + GAP
    angles = np.arange(0, 360, 360 / (2 * pi * radius)) * pi / 180
    return np.unique(np.floor([[radius * sin(angle), radius * cos(angle)] for angle in angles]).astype(np.intp), axis=0)


def _stamp(angle: float) -> tuple[np.ndarray, np.ndarray]:
    """A segment that starts at the middle of a patch: its picture, and the pixels that it occupies."""
    centre, size = RADIUS * ANTIALIAS, 2 * RADIUS * ANTIALIAS + 1
    y, x = (ceil(centre + LENGTH * ANTIALIAS * part) for part in (sin(angle), cos(angle)))
    picture = Image.new("L", (size, size))
    ImageDraw.Draw(picture).line([(centre, centre), (x, y)], fill=255, width=round(THICKNESS * ANTIALIAS))
    line = np.asarray(picture)
    around = np.pad(line, GAP * ANTIALIAS)
    dilated = np.max([np.roll(around, shift, axis=(0, 1)) for shift in disc(GAP * ANTIALIAS)], axis=0)
    inside = slice(GAP * ANTIALIAS, GAP * ANTIALIAS + size)
    return _reduced(line, 2 * RADIUS + 1), _reduced(dilated[inside, inside], 2 * RADIUS + 1)


def _reverse(angle: float) -> float:
    return angle + pi if angle < 0 else angle - pi


def markers() -> np.ndarray:
    """The picture of a marker at every pixel (y, x) of the window, (SIDE, SIDE, SIDE, SIDE)."""
    y, x = np.ogrid[: SIDE * ANTIALIAS, : SIDE * ANTIALIAS]
    radius = MARKER_RADIUS * ANTIALIAS
    centres = ANTIALIAS * np.arange(SIDE)
    return np.stack(
        [
            np.stack([_reduced(255 * ((y - top) ** 2 + (x - left) ** 2 <= radius**2), SIDE) for left in centres])
            for top in centres
        ]
    )


_CANDIDATES = _candidates()
# By the functions of `math`: those of NumPy differ in the last bit between processors.
_STARTING = [degrees * pi / 180 for degrees in range(-180, 180)]
_ONWARDS = [atan2(y, x) for y, x in _CANDIDATES]
_ANGLES = [*_STARTING, *_ONWARDS]
_SINES, _COSINES = (np.array([[way(a) for a in _ANGLES], [way(_reverse(a)) for a in _ANGLES]]) for way in (sin, cos))
_STAMPS = [_stamp(angle) for angle in [*_STARTING, *map(_reverse, _ONWARDS)]]


def _turn(angle: float, other: float) -> float:
    difference = abs(angle - other)
    return cos(min(difference, 2 * pi - difference, pi / 2))


LINES = np.stack([line.ravel() for line, _ in _STAMPS])  # (D, P)
MASKS = np.stack([mask.ravel() for _, mask in _STAMPS])  # (D, P)
PATCH = offset(*np.mgrid[-RADIUS : RADIUS + 1, -RADIUS : RADIUS + 1].reshape(2, -1))  # (P,) from the start of a segment
CIRCLE = offset(*_CANDIDATES.T)  # (C,) from the pivot to each candidate
NEIGHBOURS = offset(*disc(GAP).T)  # (5,) from a pixel to itself and those within the gap
TURNS = np.array([[_turn(angle, other) ** 2 for other in _ONWARDS] for angle in _ANGLES])  # (D, C) large for small turns

INSIDE = np.zeros(AREA, dtype=bool)  # whether a position is in the window
window(INSIDE)[:] = True
EMPTY = np.zeros(AREA, dtype=np.uint8)  # the occupancy before anything is drawn
window(EMPTY)[:] = 255
window(EMPTY)[BORDER:-BORDER, BORDER:-BORDER] = 0
