"""The 1,797 real handwritten digits, 8×8 pixels, that scikit-learn carries: data where none is given."""

import numpy as np

from polaformer.data.sources.arrays import Arrays
from polaformer.data.sources.opening import Data
from polaformer.extras import require

NUM_TEST = 360
SIDE = 8  # pixels


def open_digits() -> Data:
    """A fixed split: 360 digits to test on, drawn once and for all, and 1,437 to train on."""
    require("train", "sklearn")
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found = load_digits()
    images = np.round(found.images * (255 / 16)).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(images))
    classes = tuple(str(name) for name in found.target_names)
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return Data(
        Arrays(images[train], found.target[train], classes, "train"), Arrays(images[test], found.target[test], classes, "test")
    )
