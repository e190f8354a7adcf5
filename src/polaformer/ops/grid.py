"""The size of an image of tokens."""

Grid = tuple[int, int]  # (height, width)
