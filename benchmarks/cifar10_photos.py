"""Writes images of CIFAR-10 as an image folder for the photo recipes: per class 150 for training and 100 for validation.

Usage: python benchmarks/cifar10_photos.py FOLDER_OF_MOSAICS photos

The folder of mosaics is the one of benchmarks/cifar10_arrays.py. The first images of each class are used, in order.
"""

import sys
from pathlib import Path

import numpy as np
from cifar10_arrays import CLASSES, images_of
from PIL import Image

PARTS = {"train": ("train", 150), "test": ("val", 100)}  # name in CIFAR-10 → (folder, images per class)


def main(mosaics: Path, target: Path) -> None:
    """Writes the image folder."""
    labels = np.load(mosaics / "labels.npz", allow_pickle=False)
    for source, (part, number) in PARTS.items():
        images = np.concatenate([images_of(path) for path in sorted(mosaics.glob(f"{source}_*.webp"))[:3]])
        for label, name in enumerate(CLASSES):
            folder = target / part / name
            folder.mkdir(parents=True)
            places = np.flatnonzero(labels[f"y_{source}"].reshape(-1)[: len(images)] == label)[:number]
            for place, index in enumerate(places):
                Image.fromarray(images[index]).save(folder / f"{place:04d}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
