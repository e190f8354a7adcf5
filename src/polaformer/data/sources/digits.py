"""The 1,797 handwritten digits, 8×8 pixels, that come with scikit-learn: the default data."""

import numpy as np

from polaformer.data.sources.arrays import Arrays
from polaformer.data.sources.source import DataSplits
from polaformer.extras import require

NUM_TEST = 360
SIDE = 8  # pixels


def open_digits() -> DataSplits:
    """A fixed random split: 1,437 digits to train on, 360 to validate on."""
    require("train", "sklearn")
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    bundled = load_digits()
    images = np.round(bundled.images * (255 / 16)).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(images))
    classes = tuple(str(name) for name in bundled.target_names)
    splits = {"train": order[NUM_TEST:], "test": order[:NUM_TEST]}
    return DataSplits(*(Arrays(images[part], bundled.target[part], classes, name) for name, part in splits.items()))
