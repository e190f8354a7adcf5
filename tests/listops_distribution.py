"""The exact distribution of ListOps expressions: of length and value, by generating functions.

# L lengths up to 1,999, F frequencies of the sums of up to ten lengths, V the ten values
"""

from math import comb

import numpy as np

# As in the facts sheet, section 2.1, and not imported from the generator, which this tests.
MAX_DEPTH, MIN_ARGUMENTS, MAX_ARGUMENTS, MIN_LENGTH, MAX_LENGTH = 10, 2, 10, 501, 1999
OPERATOR_PROBABILITY = 0.25
NUM_FREQUENCIES = 20_480  # more than MAX_ARGUMENTS * MAX_LENGTH + 2, so that sums of lengths do not wrap around
COUNTS = range(MIN_ARGUMENTS, MAX_ARGUMENTS + 1)


def accepted() -> np.ndarray:
    """P(root operator, value, length) of a drawn tree, with the lengths that are kept; (4, V, L). Its sum is the share kept."""
    leaf = np.zeros((10, MAX_LENGTH + 1))
    leaf[:, 1] = 0.1
    tree = leaf
    for _ in range(MAX_DEPTH - 2):
        tree = (1 - OPERATOR_PROBABILITY) * leaf + OPERATOR_PROBABILITY * _operators(tree).mean(axis=0)
    roots = OPERATOR_PROBABILITY * _operators(tree) / 4
    roots[..., :MIN_LENGTH] = 0.0
    return roots


def _operators(argument: np.ndarray) -> np.ndarray:
    """P(value, length | operator) for MIN, MAX, MED and SM of arguments with the given P(value, length); (4, V, L)."""
    value = np.fft.rfft(argument, NUM_FREQUENCIES)  # (V, F)
    at_most = np.cumsum(value, axis=0)
    above = at_most[-1] - at_most
    low, high = _powers(at_most), _powers(above)
    at_least = _powers(above + value)
    sums = np.fft.fft(value, axis=0)
    by_count = [
        [-np.diff(at_least[k], axis=0, append=0), np.diff(low[k], axis=0, prepend=0), _median(low, high, k), _sum(sums, k)]
        for k in COUNTS
    ]
    found = np.fft.irfft(np.mean(by_count, axis=0), NUM_FREQUENCIES)[..., : MAX_LENGTH - 1]
    return np.pad(found.clip(min=0), ((0, 0), (0, 0), (2, 0)))  # the operator and its closing bracket


def _powers(of: np.ndarray) -> list[np.ndarray]:
    return [of**k for k in range(MAX_ARGUMENTS + 1)]


def _sum(transformed: np.ndarray, k: int) -> np.ndarray:
    return np.fft.ifft(transformed**k, axis=0)


def _median(low: list[np.ndarray], high: list[np.ndarray], k: int) -> np.ndarray:
    """Of k arguments: the middle one, or the mean of the two middle ones, rounded down."""
    half = (k + 1) // 2
    lower = sum(comb(k, j) * low[j] * high[k - j] for j in range(half, k + 1))  # P(the lower middle one ≤ value)
    lower = np.diff(lower, axis=0, prepend=0)
    if k % 2:
        return lower
    found = np.zeros_like(lower)
    for one in range(10):
        # P(the lower one is `one`, the upper one is above `other`): half of all are at most `one`, half above `other`.
        first = low[half][one] - (low[half][one - 1] if one else 0)
        beyond = [lower[one], *(comb(k, half) * first * high[half][other] for other in range(one, 10))]
        for other, probability in enumerate(-np.diff(beyond, axis=0), start=one):
            found[(one + other) // 2] += probability
    return found
