"""Data that are named by pairs of paths: ONE:OTHER, or two or three of these with commas between them, a pair per split."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

SPLITS = ("train", "val", "test")


def named_pairs(data: str, pattern: re.Pattern[str]) -> dict[str, tuple[Path, Path]]:
    """The pairs by split, if each part of the name matches the pattern, which has two groups; else none."""
    found = [pattern.fullmatch(one) for one in data.split(",")]
    pairs = [(Path(pair[1]), Path(pair[2])) for pair in found if pair is not None]
    return dict(zip(SPLITS, pairs, strict=False)) if len(pairs) == len(found) <= len(SPLITS) else {}


def absolute_name(data: str, pairs: Iterable[tuple[Path, Path]]) -> str:
    """The name of the same data from any working directory: of the pairs, or if there are none of a path that exists."""
    named = ",".join(f"{os.path.abspath(one)}:{os.path.abspath(other)}" for one, other in pairs)
    return named or (os.path.abspath(data) if os.path.lexists(data) else data)
