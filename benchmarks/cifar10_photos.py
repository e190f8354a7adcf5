"""1,500 images of CIFAR-10 as a folder of photos, to try the photo recipes on: 150 per class to train, 100 to validate.

Usage: python benchmarks/cifar10_photos.py FOLDER_OF_MOSAICS photos

The folder of mosaics is that of benchmarks/cifar10_arrays.py. Of each class the first images are taken, in their order.
"""

import sys
from pathlib import Path

import numpy as np
from cifar10_arrays import CLASSES, images_of
from PIL import Image

PARTS = {"train": ("train", 150), "test": ("val", 100)}  # what CIFAR-10 calls it → the folder, images per class


def main(mosaics: Path, target: Path) -> None:
    """Writes the folder."""
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
