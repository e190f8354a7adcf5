"""Sizes of images of tokens."""

from collections.abc import Sequence

Grid = tuple[int, int]  # (height, width)
Sizes = Sequence[Grid] | None  # of each image at the top left of a common grid; None: all fill it
