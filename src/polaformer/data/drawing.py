"""Objects drawn on an image: boxes, masks, names and scores.

# n objects, H height, W width
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image as PIL
from PIL import ImageDraw, ImageFont
from PIL.Image import Image
from torch import Tensor

from polaformer.data.colours import Colour, colour_of, darker, ink_on

Rectangle = tuple[int, int, int, int]  # left, top, right, bottom; the last two are outside

OPACITY = 0.4  # of masks
TEXT_SIZE, MIN_TEXT_SIZE = 0.028, 10  # of √(H·W); in pixels
LINE_WIDTH = 0.005  # of √(H·W)


def draw_objects(
    image: Image,
    boxes: Tensor | np.ndarray | Sequence[Sequence[float]],
    names: Sequence[str],
    scores: Tensor | np.ndarray | Sequence[float] | None = None,
    masks: Iterable[Tensor | np.ndarray] | None = None,
    colours: Mapping[str, Colour] | None = None,
) -> Image:
    """A copy of the image, in RGB, with boxes (n, 4) as corners in pixels, and their names, scores and masks (H, W) if given.

    Lines and text grow with the image. Parts outside it are cut off; labels are moved inside. masks may be an iterator that
    makes one at a time. colours: by name, such as those of `class_colours`; by default the colour depends on the name alone.
    """
    corners = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)  # (n, 4)
    texts = _labels(names, scores, len(corners))
    if not np.isfinite(corners).all():
        raise ValueError(f"draw_objects: boxes must be finite; got {corners[~np.isfinite(corners).all(axis=1)][0].tolist()}")
    paints = [(colours or {}).get(name) or colour_of(name) for name in names]
    width = max(1, round(LINE_WIDTH * scale_of(image)))
    drawn = image.convert("RGB")
    if masks is not None:
        drawn = _with_masks(drawn, masks, paints, width)
    pen = ImageDraw.Draw(drawn)
    rectangles = [_inside(corner, drawn.size) for corner in corners]
    by_size = sorted(range(len(rectangles)), key=lambda index: -_area(rectangles[index]))
    for index in by_size:
        _draw_box(pen, rectangles[index], paints[index], width)
    labels = _placed(drawn, texts, rectangles, _order(scores, by_size))
    for index in reversed(labels):  # the most important one last, on top
        _draw_label(pen, labels[index], paints[index])
    return drawn


def _labels(names: Sequence[str], scores: Any, number: int) -> list[str]:
    """The text of each label: the name, and the score in %."""
    lengths = {"boxes": number, "names": len(names)} | ({} if scores is None else {"scores": len(scores)})
    if len(set(lengths.values())) > 1:
        raise ValueError(f"draw_objects: there must be as many of each, but got {lengths}")
    lines = [one_line(name) for name in names]
    if scores is None:
        return lines
    return [f"{name} {100 * float(score):.0f} %" for name, score in zip(lines, scores, strict=True)]


def one_line(name: str) -> str:
    """A name as one line that can be drawn, whatever is in it."""
    return " ".join(name.encode("utf-8", "backslashreplace").decode().split())


def _with_masks(image: Image, masks: Iterable[Any], paints: Sequence[Colour], width: int) -> Image:
    """The image with each mask as a translucent area and a contour along its inner edge."""
    pixels = np.array(image)  # (H, W, 3)
    count = 0
    for mask in masks:
        inside = np.asarray(mask).astype(bool)
        if inside.shape != pixels.shape[:2] or count == len(paints):
            raise ValueError(
                f"draw_objects: mask {count} has shape {inside.shape}; there are {len(paints)} boxes, and masks must have the "
                f"height and width of the image, {pixels.shape[:2]}"
            )
        paint, count = np.array(paints[count], dtype=np.float32), count + 1
        rows, columns = np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))
        if not len(rows):
            continue
        place = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
        part, shape = pixels[place], inside[place]
        part[shape] = ((1 - OPACITY) * part[shape] + OPACITY * paint).round().astype(np.uint8)
        part[shape & ~_eroded(shape, _thin(width, min(shape.shape)))] = paint.astype(np.uint8)
    if count != len(paints):
        raise ValueError(f"draw_objects: there are {count} masks and {len(paints)} boxes; give one mask per box, or None")
    return PIL.fromarray(pixels)


def _eroded(mask: np.ndarray, width: int) -> np.ndarray:
    """The mask without a margin of `width` pixels."""
    padded = np.pad(mask, 1)
    for _ in range(width):
        inner = padded[1:-1, 1:-1]
        inner &= padded[:-2, 1:-1].copy() & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return padded[1:-1, 1:-1]


def _inside(corners: np.ndarray, size: tuple[int, int]) -> Rectangle:
    """The box in whole pixels, cut to an image of `size` (width, height); at least one pixel."""
    width, height = size
    left, top = min(max(round(corners[0]), 0), width - 1), min(max(round(corners[1]), 0), height - 1)
    return left, top, max(min(round(corners[2]), width), left + 1), max(min(round(corners[3]), height), top + 1)


def scale_of(image: Image) -> float:
    """The size of an image in pixels, of which lines and text have a share."""
    return math.sqrt(image.width * image.height)


def text_size_on(image: Image) -> int:
    """The size of text on an image, in pixels."""
    return max(MIN_TEXT_SIZE, round(TEXT_SIZE * scale_of(image)))


def _area(rectangle: Rectangle) -> int:
    return max(0, rectangle[2] - rectangle[0]) * max(0, rectangle[3] - rectangle[1])


def _draw_box(pen: ImageDraw.ImageDraw, box: Rectangle, paint: Colour, width: int) -> None:
    """A coloured frame with a thin dark line around it, so that it is seen on any ground."""
    left, top, right, bottom = box
    if width > 1:
        pen.rectangle((left - 1, top - 1, right, bottom), outline=darker(paint))
    pen.rectangle((left, top, right - 1, bottom - 1), outline=paint, width=_thin(width, min(right - left, bottom - top)))


def _thin(width: int, side: int) -> int:
    """The width of a line around an object, narrower if the object is small, so that the object remains visible."""
    return max(1, min(width, side // 16))


class Label(NamedTuple):
    """A text and where it stands: the rectangle of its ground, and its font."""

    text: str
    ground: Rectangle
    font: Any


def _order(scores: Any, by_size: Sequence[int]) -> list[int]:
    """The objects whose labels choose their places first: the highest score, or the smallest box."""
    smallest_first = list(reversed(by_size))
    return smallest_first if scores is None else sorted(smallest_first, key=lambda index: -float(scores[index]))


def _placed(image: Image, texts: Sequence[str], boxes: Sequence[Rectangle], order: Sequence[int]) -> dict[int, Label]:
    """The label of each object, in the given order, each where it covers the least of those before it."""
    text_size = text_size_on(image)
    padding = max(2, text_size // 5)
    font: Any = ImageFont.load_default(text_size)
    height = min(sum(font.getmetrics()) + padding // 2, image.height)
    found: dict[int, Label] = {}
    for index in order:
        text = shortened(texts[index], font, image.width - 2 * padding)
        width = min(math.ceil(font.getlength(text)) + 2 * padding, image.width)
        places = _candidates(boxes[index], width, height, image.size)
        covered = [sum(_overlap(place, other.ground) for other in found.values()) for place in places]
        found[index] = Label(text, places[covered.index(min(covered))], font)
    return found


def shortened(text: str, font: Any, width: int) -> str:
    """The text, its end replaced by … if it is wider than `width` pixels."""
    while len(text) > 2 and font.getlength(text) > width:
        text = f"{text[:-2]}…"
    return text


def _candidates(box: Rectangle, width: int, height: int, size: tuple[int, int]) -> list[Rectangle]:
    """Places of a label inside the image, the best first: above the box, in its upper corners, below it, in its lower ones."""
    left, top, right, bottom = box
    wanted = [
        (left, top - height),
        (left, top),
        (right - width, top - height),
        (right - width, top),
        (left, bottom),
        (left, bottom - height),
        (right - width, bottom),
        (right - width, bottom - height),
    ]
    if top < height:
        wanted.append(wanted.pop(0))  # would be moved into the box anyway
    moved = [(min(max(x, 0), size[0] - width), min(max(y, 0), size[1] - height)) for x, y in wanted]
    return [(x, y, x + width, y + height) for x, y in moved]


def _overlap(one: Rectangle, other: Rectangle) -> int:
    shared = (max(one[0], other[0]), max(one[1], other[1]), min(one[2], other[2]), min(one[3], other[3]))
    return _area(shared) if shared[2] > shared[0] and shared[3] > shared[1] else 0


def _draw_label(pen: ImageDraw.ImageDraw, label: Label, paint: Colour) -> None:
    """The text in black or white, whichever contrasts more, on a ground of the object's colour."""
    left, top, right, bottom = label.ground
    pen.rectangle((left, top, right - 1, bottom - 1), fill=paint, outline=darker(paint))
    pen.text(((left + right) / 2, (top + bottom) / 2), label.text, fill=ink_on(paint), font=label.font, anchor="mm")
