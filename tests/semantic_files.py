"""Small datasets of images with a class per pixel, on disk in several layouts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from polaformer.data.sources.label_sets import LabelSet
from polaformer.data.sources.semantic import SemanticSource
from polaformer.data.sources.semantic_folders import Folders

HEIGHT, WIDTH = 24, 32
CLASSES = ("cat", "dog", "mouse")
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
LINES = "0 #ff0000 cat\n1 #00ff00 dog\n2 #0000ff mouse\n9 #ffffff -\n"
# The same as LINES.
ANIMALS = LabelSet(CLASSES, (RED, GREEN, BLUE), {0: 0, 1: 1, 2: 2, 9: 255}, {RED: 0, GREEN: 1, BLUE: 2, WHITE: 255})


def picture(seed: int = 0, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def mask(seed: int = 0, height: int = HEIGHT, width: int = WIDTH, values: Sequence[int] = (0, 1, 2, 9)) -> np.ndarray:
    """Blocks of values, so that they survive a resize."""
    blocks = np.random.default_rng(seed).choice(np.array(values, dtype=np.uint8), (-(-height // 4), -(-width // 4)))
    return blocks.repeat(4, axis=0).repeat(4, axis=1)[:height, :width]


def save(path: Path, pixels: np.ndarray | Image.Image, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(path, **options)
    return path


def write_pairs(images: Path, masks: Path, names: Sequence[str], *, first_seed: int = 0, **size: int) -> None:
    for seed, name in enumerate(names, first_seed):
        save(images / f"{name}.png", picture(seed, **size))
        save(masks / f"{name}.png", mask(seed, **size))


def write_semantic(root: Path, number: int = 6) -> str:
    """ADE20K's layout with a list of classes, for training and half as many images for validation."""
    for split, names in (("training", range(1, number + 1)), ("validation", range(101, 101 + number // 2))):
        write_pairs(root / "images" / split, root / "annotations" / split, list(map(str, names)), first_seed=names[0])
    (root / "classes.txt").write_text(LINES)
    return str(root)


def source_of(root: Path, label_set: LabelSet = ANIMALS) -> SemanticSource:
    """The images and masks in two folders of that name."""
    return SemanticSource(Folders(root / "images", root / "masks"), label_set)
