"""Draws images of coloured shapes with annotations for detection and segmentation: data of our own, for pictures and trials.

Usage: python benchmarks/shapes.py DIRECTORY [IMAGES] [SIZE]

DIRECTORY gets COCO's layout (annotations/instances_train.json, images/train and the same for val, a fifth as many) and, for
semantic segmentation, masks/train and masks/val beside them with classes.txt: 0 is the background, 1 the first class. Since
`polaformer check` takes the directory for COCO's, name the other task: polaformer check DIRECTORY --task segmentation.
"""

import json
import random
import sys
from math import cos, pi, sin
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

CORNERS = {"circle": 40, "square": 4, "triangle": 3, "star": 10}
CLASSES = tuple(CORNERS)
COLOURS = ("#707070", "#e03030", "#3060f0", "#20b040", "#f0b000")  # of the background and the classes, in pictures
MIN_VISIBLE = 0.4  # of a shape: one that others cover more than that has no annotation; boxes and masks are of the whole shape


def outline(kind: str, x: float, y: float, radius: float, turn: float) -> list[tuple[float, float]]:
    """The corners of a shape around (x, y)."""
    number = CORNERS[kind]
    radii = [radius * (0.45 if kind == "star" and i % 2 else 1.0) for i in range(number)]
    angles = [turn + 2 * pi * i / number for i in range(number)]
    return [(round(x + r * cos(a), 1), round(y + r * sin(a), 1)) for r, a in zip(radii, angles, strict=True)]


def background(size: int, rng: random.Random) -> Image.Image:
    """Blurred coloured noise."""
    noise = np.random.default_rng(rng.randrange(2**32)).integers(60, 196, (9, 9, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((size, size), Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(2))


def filled(corners: list[tuple[float, float]], size: int) -> np.ndarray:
    """(size, size), True inside the polygon."""
    mask = Image.new("1", (size, size))
    ImageDraw.Draw(mask).polygon(corners, fill=1)
    return np.asarray(mask)


def draw(size: int, rng: random.Random) -> tuple[Image.Image, list[tuple[str, list[tuple[float, float]], np.ndarray]]]:
    """An image, and the class, corners and visible pixels of each shape on it."""
    image, shapes = background(size, rng), []
    for _ in range(rng.randint(2, 5)):
        kind, radius = rng.choice(CLASSES), rng.uniform(0.09, 0.2) * size
        corners = outline(kind, *(rng.uniform(radius, size - radius) for _ in "xy"), radius, rng.uniform(0, 2 * pi))
        ImageDraw.Draw(image).polygon(corners, fill=tuple(rng.randint(0, 255) for _ in "rgb"))
        inside = filled(corners, size)
        shapes = [(other, points, visible & ~inside) for other, points, visible in shapes]
        shapes.append((kind, corners, inside))
    return image, [one for one in shapes if one[2].sum() > MIN_VISIBLE * filled(one[1], size).sum()]


def write(root: Path, split: str, number: int, size: int) -> None:
    """A split: images, their masks, and the annotations of COCO."""
    rng, images, annotations = random.Random(split), [], []
    for folder in ("images", "masks"):
        (root / folder / split).mkdir(parents=True, exist_ok=True)
    for index in range(1, number + 1):
        name = f"{index:05d}.png"
        image, shapes = draw(size, rng)
        labels = np.zeros((size, size), np.uint8)
        for kind, corners, visible in shapes:
            labels[visible] = 1 + CLASSES.index(kind)
            (left, right), (top, bottom) = ((min(one), max(one)) for one in zip(*corners, strict=True))
            record = {"id": len(annotations) + 1, "image_id": index, "category_id": 1 + CLASSES.index(kind), "iscrowd": 0}
            record |= {"bbox": [left, top, right - left, bottom - top], "area": int(filled(corners, size).sum())}
            annotations.append(record | {"segmentation": [[one for corner in corners for one in corner]]})
        image.save(root / "images" / split / name)
        Image.fromarray(labels).save(root / "masks" / split / name)
        images.append({"id": index, "file_name": name, "height": size, "width": size})
    categories = [{"id": number, "name": name} for number, name in enumerate(CLASSES, 1)]
    found = {"images": images, "annotations": annotations, "categories": categories}
    (root / "annotations").mkdir(exist_ok=True)
    (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(found))


def main(directory: str, images: str = "400", size: str = "160") -> None:
    """Writes both splits."""
    root = Path(directory)
    write(root, "train", int(images), int(size))
    write(root, "val", int(images) // 5, int(size))
    names = zip(COLOURS, ("background", *CLASSES), strict=True)
    (root / "classes.txt").write_text("".join(f"{value} {colour} {name}\n" for value, (colour, name) in enumerate(names)))


if __name__ == "__main__":
    main(*sys.argv[1:])
