"""Random draws as functions of names and numbers: no state of a generator is ever stored or carried on.

Order and augmentation of data follow from (seed, epoch, index), dropout and drop path from (seed, step, rank).
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(*parts: str | int) -> int:
    """A seed of 63 bits that depends on every part; neighbouring numbers give unrelated seeds."""
    digest = hashlib.sha256(",".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def reseed(seed: int) -> None:
    """Sets the generators of Python, NumPy and PyTorch (of every device), from which models and mixup draw."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The generators of Python, NumPy and PyTorch (on the CPU) start from `seed` inside, and are as before afterwards."""
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
