"""Writes CIFAR-10 as an array file for `polaformer train --data`, from lossless mosaics of 25×40 images each.

Usage: python benchmarks/cifar10_arrays.py FOLDER_OF_MOSAICS cifar10.npz

The folder contains train_00.webp … train_49.webp and test_00.webp … test_09.webp, each with 1,000 images of 32×32 pixels row by
row, and labels.npz with y_train and y_test.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ROWS, COLUMNS, SIDE = 25, 40, 32


def images_of(mosaic: Path) -> np.ndarray:
    """The images of one mosaic, (1000, 32, 32, 3) uint8."""
    with Image.open(mosaic) as image:
        pixels = np.asarray(image.convert("RGB"))
    tiles = pixels.reshape(ROWS, SIDE, COLUMNS, SIDE, 3).swapaxes(1, 2)  # (rows, columns, height, width, 3)
    return tiles.reshape(ROWS * COLUMNS, SIDE, SIDE, 3)


def main(folder: Path, target: Path) -> None:
    """Writes the array file."""
    with np.load(folder / "labels.npz", allow_pickle=False) as file:
        labels = {part: file[f"y_{part}"].astype(np.int64) for part in ("train", "test")}
    arrays: dict[str, np.ndarray] = {"classes": np.array(CLASSES)}
    for part, part_labels in labels.items():
        mosaics = sorted(folder.glob(f"{part}_*.webp"))
        arrays[f"x_{part}"] = np.concatenate([images_of(mosaic) for mosaic in mosaics])
        arrays[f"y_{part}"] = part_labels
        print(f"{part}: {len(arrays[f'x_{part}']):,} images from {len(mosaics)} mosaics")
    np.savez(target, allow_pickle=False, **arrays)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
