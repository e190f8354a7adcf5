"""Classes of pixels as pictures: over an image with a legend, as plain colours, and as a file of indices.

# H, W height and width of an image
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image as PIL
from PIL import ImageDraw, ImageFont
from PIL.Image import Image

from polaformer.data.colours import Colour, darker
from polaformer.data.drawing import one_line, scale_of, shortened, text_size_on
from polaformer.data.sources.label_sets import IGNORED

CONTOUR = 0.0015  # width of contours, of √(H·W)
INK, PAPER = (30, 30, 30), (255, 255, 255)  # of a legend, where ignored pixels have no colour
IGNORED_NAME = "ignored"


def index_png(label_map: np.ndarray, colours: Sequence[Colour]) -> Image:
    """An image of mode P whose indices are the labels (H, W), to be saved as a PNG; IGNORED is black."""
    if label_map.ndim != 2 or label_map.dtype != np.uint8:
        raise ValueError(f"a label map has shape {label_map.shape} and dtype {label_map.dtype}; give (height, width) of uint8")
    _check_labels(label_map, len(colours))
    image = PIL.frombytes("P", label_map.shape[::-1], label_map.tobytes())
    palette = np.zeros((256, 3), dtype=np.uint8)
    palette[: len(colours)] = np.array(colours, dtype=np.uint8).reshape(-1, 3)
    image.putpalette(palette.tobytes())
    return image


def colour_map(label_map: np.ndarray, colours: Sequence[Colour]) -> Image:
    """An RGB image of the colours of the labels (H, W) uint8; IGNORED is black."""
    return index_png(label_map, colours).convert("RGB")


def draw_classes(
    image: Image,
    label_map: np.ndarray,
    classes: Sequence[str],
    colours: Sequence[Colour],
    *,
    legend: bool = True,
    opacity: float = 0.55,
) -> Image:
    """The image, in RGB, under the translucent colours of its labels (H, W) uint8, with contours between the classes.

    Ignored pixels remain as they are. legend: names the classes that are there, with their share of the pixels, largest first,
    below the image or beside it.
    """
    if image.size != label_map.shape[::-1] or len(classes) != len(colours) or not 0 <= opacity <= 1:
        raise ValueError(
            f"draw_classes: the image has {image.width}×{image.height} pixels and the label map shape {label_map.shape}; there "
            f"are {len(classes)} classes, {len(colours)} colours, and opacity is {opacity}; give equal sizes and numbers, and "
            "an opacity in [0, 1]"
        )
    drawn, paint = image.convert("RGB"), colour_map(label_map, colours)
    counts = PIL.fromarray(label_map).histogram()
    blended = PIL.blend(drawn, paint, opacity)
    blended.paste(paint, mask=PIL.fromarray(_contours(label_map, max(1, round(CONTOUR * scale_of(image))))))
    drawn.paste(blended, mask=PIL.fromarray(label_map != IGNORED))
    entries = _entries(counts, classes, colours) if legend else []
    return _with_legend(drawn, entries) if entries else drawn


class LegendEntry(NamedTuple):
    """A line of a legend."""

    text: str
    colour: Colour


class Layout(NamedTuple):
    """How a legend is laid out: beside the image or below it, and the number of its rows and columns; its (width, height)."""

    beside: bool
    rows: int
    columns: int
    size: tuple[int, int]


def _check_labels(label_map: np.ndarray, number: int) -> None:
    unknown = sorted(set(np.flatnonzero(PIL.fromarray(label_map).histogram()).tolist()) - {*range(number), IGNORED})
    if unknown:
        raise ValueError(f"a label map has label {unknown[0]}, and there are {number} colours; give labels below, or {IGNORED}")


def _contours(label_map: np.ndarray, width: int) -> np.ndarray:
    """Where a pixel at that distance has another label, (H, W) bool."""
    found = np.zeros(label_map.shape, dtype=bool)
    for labels, edge in ((label_map, found), (label_map.T, found.T)):
        differs = labels[width:] != labels[:-width]
        edge[width:] |= differs
        edge[: len(edge) - width] |= differs
    return found


def _entries(counts: Sequence[int], classes: Sequence[str], colours: Sequence[Colour]) -> list[LegendEntry]:
    """The legend of the classes that have pixels, the largest first, and of ignored pixels."""
    total = sum(counts)
    order = sorted((label for label in range(len(classes)) if counts[label]), key=lambda label: -counts[label])
    found = [LegendEntry(f"{one_line(classes[label])} {_percent(counts[label] / total)}", colours[label]) for label in order]
    ignored = [LegendEntry(f"{IGNORED_NAME} {_percent(counts[IGNORED] / total)}", PAPER)] if counts[IGNORED] else []
    return found + ignored if found else []


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "< 1 %"


def _with_legend(image: Image, entries: Sequence[LegendEntry]) -> Image:
    """The image with a legend beside or below it."""
    size = text_size_on(image)
    font: Any = ImageFont.load_default(size)
    line, gap = round(1.5 * size), round(0.75 * size)
    widest = max(math.ceil(font.getlength(one.text)) for one in entries)
    column = line + min(widest, max(image.width, 12 * size)) + gap
    layout = _layout(image, len(entries), line, gap, column)
    width, height = layout.size
    canvas = PIL.new("RGB", (width, height), PAPER)
    canvas.paste(image)
    pen = ImageDraw.Draw(canvas)
    left, top = (image.width + gap, gap) if layout.beside else (gap, image.height + gap)
    for index, one in enumerate(entries):
        x, y = left + column * (index // layout.rows), top + line * (index % layout.rows)
        pen.rectangle((x, y, x + size, y + size), fill=one.colour, outline=darker(one.colour))
        text = shortened(one.text, font, column - line - gap)
        pen.text((x + line, y + size / 2), text, fill=INK, font=font, anchor="lm")
    return canvas


def _layout(image: Image, number: int, line: int, gap: int, column: int) -> Layout:
    """The layout of a legend with that many entries that makes the squarer picture."""
    rows = max(1, min((image.height - gap) // line, number))
    columns = -(-number // rows)
    beside = (image.width + gap + columns * column, max(image.height, rows * line + gap))
    across = max(1, (image.width - gap) // column)
    down = -(-number // across)
    below = (max(image.width, gap + across * column), image.height + down * line + gap)
    if max(below) <= max(beside):
        return Layout(False, down, across, below)
    return Layout(True, rows, columns, beside)
