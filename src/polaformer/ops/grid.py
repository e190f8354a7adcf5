"""The size of an image whose pixels are tokens."""

Grid = tuple[int, int]  # (height, width)
