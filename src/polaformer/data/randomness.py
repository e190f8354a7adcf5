"""Random draws as functions of names and numbers: no generator state is ever stored or carried over.

The order and augmentation of the data depend on (seed, epoch, index), dropout and drop path on (seed, step, rank).
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


def derive(*parts: str | int) -> int:
    """A 63-bit seed that depends on every part; neighbouring numbers give unrelated seeds."""
    digest = hashlib.sha256(",".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def reseed(seed: int) -> None:
    """Seeds the global generators of Python, NumPy and PyTorch (all devices), which models and mixup draw from."""
    import torch  # slow to load, and the generators of data, which only derive seeds, start processes

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the global generators of Python, NumPy and PyTorch (CPU) inside the context, and restores them afterwards."""
    import torch

    before = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.random.set_rng_state(before[2])
