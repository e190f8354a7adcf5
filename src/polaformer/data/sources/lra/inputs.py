"""Inputs of `polaformer predict`, as symbols: text, a ListOps expression, an image."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from polaformer.data.images import read_image
from polaformer.data.sources.lra import image, listops
from polaformer.data.sources.lra.datasets import SIDE
from polaformer.errors import DataError, printable
from polaformer.regular_files import read_regular, reason

MAX_BYTES = 2**24  # of a document in a file
MAX_SHOWN = 60  # characters of a document in messages


def read_input(dataset: str, given: str) -> np.ndarray:
    """The symbols of a document, (N,) uint8; raises DataError.

    given: the path of a file; for texts and expressions also the document itself.
    """
    return READERS[dataset](given)


def shortened(given: str) -> str:
    """A document, or the path of its file, in one short line."""
    return printable(given if len(given) <= MAX_SHOWN else f"{given[: MAX_SHOWN - 1]}…")


def _text(given: str) -> np.ndarray:
    """The bytes of a file of that name if there is one, otherwise those of the string itself."""
    return np.frombuffer(_content(given), dtype=np.uint8)


def _expression(given: str) -> np.ndarray:
    where = f"{given}: the expression" if os.path.exists(given) else f"the expression {shortened(given)!r}"
    try:
        return listops.parse(_content(given).decode(), where)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{shortened(given)} is not text (at byte {error.start}); give a ListOps expression, or a file with one"
        ) from error


def _content(given: str) -> bytes:
    try:
        if not given.strip():
            raise DataError("an input is empty; give a document, or a file with one")
        if not os.path.exists(given):
            if len(given.split()) == 1 and (os.sep in given or Path(given).suffix):
                raise DataError(f"there is no file {given}; check the path, or give a document with more than one word")
            return given.encode("utf-8", "surrogateescape")
        return read_regular(given, MAX_BYTES)
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"{given} cannot be read: {reason(error)}; give a file, or the document itself") from error


def _colour(given: str) -> np.ndarray:
    """The grey levels of an image, resized if it has another size, as those of CIFAR-10 are computed."""
    pixels = np.asarray(read_image(given, channels=3).resize((SIDE, SIDE)))
    red, green, blue = (np.ascontiguousarray(pixels[..., channel]) for channel in range(3))
    return image.to_grey(red, green, blue).reshape(-1)


def _grey(given: str) -> np.ndarray:
    """The pixels of an image of dashed contours, which would not survive resizing."""
    found = read_image(given, channels=1)
    if found.size != (SIDE, SIDE):
        width, height = found.size
        raise DataError(f"{given} has {width}×{height} pixels; give an image of {SIDE}×{SIDE}, as in the dataset")
    return np.asarray(found).reshape(-1)


READERS: dict[str, Callable[[str], np.ndarray]] = {
    "text": _text,
    "retrieval": _text,
    "listops": _expression,
    "image": _colour,
    "pathfinder": _grey,
}
