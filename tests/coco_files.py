"""Small datasets in the format of COCO on disk."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

NAMES = ("cat", "dog", "mouse")
IDS = (7, 3, 12)  # not in the order of the names, with gaps
WIDTH, HEIGHT = 60, 40


def categories(names: Iterable[str] = NAMES, ids: Iterable[int] = IDS) -> list[dict[str, Any]]:
    return [{"id": number, "name": name} for number, name in zip(ids, names, strict=True)]


def entry(number: int, name: str | None = None, *, width: int = WIDTH, height: int = HEIGHT) -> dict[str, Any]:
    """An image of an annotation file."""
    return {"id": number, "file_name": name or f"{number}.png", "width": width, "height": height}


def annotated(number: int, image: int, box: tuple[float, ...] = (10, 5, 20, 15), **changes: Any) -> dict[str, Any]:
    """An object whose outline is its box; changes to None remove a key."""
    left, top, width, height = box
    right, bottom = left + width, top + height
    outline = [left, top, right, top, right, bottom, left, bottom]
    found = {"id": number, "image_id": image, "category_id": 3, "bbox": list(box), "area": width * height, "iscrowd": 0}
    return {key: one for key, one in (found | {"segmentation": [outline]} | changes).items() if one is not None}


def crowd(number: int, image: int, box: tuple[int, int, int, int] = (0, 0, 30, 10), **changes: Any) -> dict[str, Any]:
    """A crowd region that fills its box, as uncompressed run lengths."""
    left, top, width, height = box
    mask = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
    mask[top : top + height, left : left + width] = 1
    return annotated(number, image, box, iscrowd=1, segmentation={"size": [HEIGHT, WIDTH], "counts": runs(mask)}) | changes


def runs(mask: np.ndarray) -> list[int]:
    """The run lengths of a mask, one pixel after the other: column by column, zeros first."""
    found, now = [0], 0
    for pixel in mask.T.reshape(-1).tolist():
        if pixel != now:
            found.append(0)
            now = pixel
        found[-1] += 1
    return found


def document(images: list[Any], annotations: list[Any], **changes: Any) -> dict[str, Any]:
    return {"images": images, "annotations": annotations, "categories": categories()} | changes


def write_json(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def write_image(path: Path, seed: int = 0, *, width: int = WIDTH, height: int = HEIGHT, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


def write_split(root: Path, file: str, folder: str, content: Mapping[str, Any], first_seed: int = 0) -> Path:
    """An annotation file, and the images that it lists."""
    write_json(root / file, content)
    for seed, one in enumerate(content["images"], first_seed):
        write_image(root / folder / one["file_name"], seed, width=one["width"], height=one["height"])
    return root


def write_coco(root: Path, number: int = 6) -> str:
    """Images of several sizes with 0, 1, 2 … objects on them, for training and half as many for validation."""
    for split, numbers in (("train", range(1, number + 1)), ("val", range(101, 101 + number // 2))):
        images = [entry(one, width=(60, 40, 50)[one % 3], height=(40, 60)[one % 2]) for one in numbers]
        objects = [
            annotated(100 * one + each, one, (3 + 2 * each, 4, 20, 9 + each), category_id=IDS[(one + each) % 3])
            for one in numbers
            for each in range(one % 4)
        ]
        write_split(root, f"annotations/instances_{split}2017.json", f"{split}2017", document(images, objects), numbers[0])
    return str(root)
