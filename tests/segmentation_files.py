"""Small datasets of images and masks on disk, which a small segmenter can learn something of."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

NAMES = ("sky", "grass", "house")
COLOURS = ("#6080c0", "#30a040", "#c03020")
SIZES = ((40, 60), (50, 44), (64, 64))  # (height, width)


def scene(number: int) -> tuple[np.ndarray, np.ndarray]:
    """An image and its mask: sky over grass with a house, whose colours show noisily; 0 is ignored, 1 to 3 are classes."""
    random = np.random.default_rng(number)
    height, width = SIZES[number % len(SIZES)]
    mask = np.full((height, width), 1, dtype=np.uint8)
    horizon = int(random.integers(height // 3, 2 * height // 3))
    mask[horizon:] = 2
    left = int(random.integers(4, width - 20))
    mask[horizon - 8 : horizon + 8, left : left + 14] = 3
    colours = np.array([[0, 0, 0], *([int(one[place : place + 2], 16) for place in (1, 3, 5)] for one in COLOURS)])
    image = colours[mask] + random.normal(0, 25, (height, width, 3))
    mask[:2] = 0
    return image.clip(0, 255).astype(np.uint8), mask


def write_pair(images: Path, masks: Path, number: int, name: str | None = None) -> Path:
    """A scene as two files; returns the image's."""
    image, mask = scene(number)
    for folder, pixels in ((images, image), (masks, mask)):
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{name or number}.png")
    return images / f"{name or number}.png"


def write_classes(root: Path, names: Sequence[str] = NAMES) -> None:
    """The file that says what the values of masks mean."""
    lines = ["0 -", *(f"{value} {colour} {name}" for value, (name, colour) in enumerate(zip(names, COLOURS, strict=True), 1))]
    (root / "classes.txt").write_text("\n".join(lines) + "\n")


def write_scenes(root: Path, number: int, names: Sequence[str] = NAMES) -> str:
    """`number` training images in ADE20K's layout, half as many for validation, and two for testing."""
    for split, first, last in (("training", 0, number), ("validation", 100, 100 + number // 2), ("test", 200, 202)):
        for index in range(first, last):
            write_pair(root / "images" / split, root / "annotations" / split, index)
    write_classes(root, names)
    return str(root)
