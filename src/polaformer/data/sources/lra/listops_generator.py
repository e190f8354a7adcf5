"""Generates ListOps as the Long Range Arena does: random trees of 501 to 1,999 symbols, in the release's files.

The rows of test come first, then those of val and train: with the same seed, a larger training split has the same test split.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from io import BufferedWriter
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from polaformer.data.randomness import derive
from polaformer.data.sources.lra import listops
from polaformer.data.sources.lra.generation import BeginStage, Progress, Target, ignore, in_processes, opening
from polaformer.data.sources.lra.listops import CLASSES, HEADER, OPERATORS, file_name
from polaformer.data.sources.lra.sequences import SPLITS, SequenceSplit
from polaformer.regular_files import open_regular, open_to_write

MAX_DEPTH = 10
OPERATOR_PROBABILITY = 0.25
MIN_ARGUMENTS, MAX_ARGUMENTS = 2, 10
MIN_LENGTH, MAX_LENGTH = 501, 1999  # of an expression, in symbols
CHUNK_ROWS = 200  # made from one seed; a multiple of them is lost by a kill
ORDER = ("test", "val", "train")
VERSION = 1  # changes with the rows that a seed gives


def generate(
    out: Path, sizes: Mapping[str, int], seed: int, *, num_workers: int = 1, overwrite: bool = False, stage: BeginStage = ignore
) -> dict[str, Any]:
    """Writes `sizes` rows per split, all different, to the release's files in `out`, and returns the manifest.

    Resumes after a kill; the bytes depend on sizes and seed alone. Raises SettingsError if `out` has something else.
    """
    about = {"generator": f"listops {VERSION}", "seed": seed, **{split: sizes[split] for split in SPLITS}}
    with opening(out, about, ["basic_*.tsv", "basic_*.tsv.partial"], overwrite=overwrite) as target:
        if target.manifest is not None:
            return target.manifest
        _write(target, sizes, partial(chunk, seed), num_workers, stage("generating"))
        splits = listops.load(out, stage("checking"))
        described = {split: _describe(out / file_name(split), splits[split]) for split in SPLITS}
        return target.finish({"dataset": "listops", "classes": list(CLASSES), "splits": described})


def chunk(seed: int, number: int) -> list[bytes]:
    """Chunk `number` of the rows of a seed."""
    rows = draw_rows(Random(derive("listops", VERSION, seed, number)).random)
    return [next(rows) for _ in range(CHUNK_ROWS)]


def draw_rows(random: Callable[[], float]) -> Iterator[bytes]:
    """Rows of trees with an acceptable length, without end."""
    while True:
        texts: list[str] = []
        try:
            value = draw_tree(random, texts)
        except _TooLongError:
            continue
        if MIN_LENGTH <= len(texts) <= MAX_LENGTH:
            yield f"{''.join(texts)[:-3]}\t{value}\n".encode()


class _TooLongError(Exception):
    """The tree has too many symbols; the rest of it is not drawn."""


def draw_tree(random: Callable[[], float], texts: list[str], depth: int = 1) -> int:
    """Draws a tree: adds the text of each of its symbols to `texts` and returns its value.

    The release writes an operator and its arguments as nested pairs, "( ( ( ( [MAX 2 ) 3 ) 9 ) ] )": with as many opening
    parentheses as arguments and one more, and a closing one after each argument and after the bracket.
    """
    if depth == MAX_DEPTH or random() > OPERATOR_PROBABILITY:
        digit = int(random() * len(CLASSES))
        texts.append(_DIGITS[digit])
        return digit
    num_arguments = MIN_ARGUMENTS + int(random() * (MAX_ARGUMENTS - MIN_ARGUMENTS + 1))
    operator = int(random() * len(OPERATORS))
    if len(texts) > MAX_LENGTH - num_arguments - 2:
        raise _TooLongError
    texts.append(_OPENERS[operator][num_arguments])
    arguments = [draw_tree(random, texts, depth + 1) for _ in range(num_arguments)]
    texts.append(_CLOSER)
    return listops.value(operator, arguments)


_DIGITS = [f"{digit} ) " for digit in CLASSES]
_OPENERS = [[f"{'( ' * (number + 1)}{name} " for number in range(MAX_ARGUMENTS + 1)] for name in OPERATORS]
_CLOSER = "] ) ) "


def _write(
    target: Target, sizes: Mapping[str, int], make: Callable[[int], list[bytes]], num_workers: int, advance: Progress
) -> None:
    """Writes all rows; the files get their names when they are complete."""
    with ExitStack() as stack:
        files = {split: stack.enter_context(_resume(target, split)) for split in ORDER}
        seen, written = _read_back(target.folder)
        total = sum(sizes.values())
        first = target.progress.get("chunks", 0)
        advance(sum(written.values()), total)
        if sum(written.values()) < total:
            for number, rows in enumerate(in_processes(make, count(first), num_workers), start=first):
                _add(rows, files, sizes, seen, written)
                for file in files.values():
                    file.flush()
                    os.fsync(file.fileno())
                target.save({"chunks": number + 1, "bytes": {split: file.tell() for split, file in files.items()}})
                advance(sum(written.values()), total)
                if sum(written.values()) == total:
                    break
    for split in ORDER:
        os.replace(_partial(target.folder, split), target.folder / file_name(split))


def _add(
    rows: list[bytes], files: Mapping[str, BufferedWriter], sizes: Mapping[str, int], seen: set[bytes], written: dict[str, int]
) -> None:
    """Appends rows that were not seen before to the first split that is not full."""
    for row in rows:
        split = next((split for split in ORDER if written[split] < sizes[split]), None)
        digest = _digest(row)
        if split is not None and digest not in seen:
            seen.add(digest)
            files[split].write(row)
            written[split] += 1


def _resume(target: Target, split: str) -> BufferedWriter:
    """A split's unfinished file, cut to what was saved, at its end."""
    path, final = _partial(target.folder, split), target.folder / file_name(split)
    if os.path.lexists(final) and not os.path.lexists(path):  # killed while the files got their names
        os.replace(final, path)
    file = os.fdopen(open_to_write(path), "wb")
    file.truncate(target.progress.get("bytes", {}).get(split, 0))
    if not file.seek(0, os.SEEK_END):
        file.write(HEADER + b"\n")
        file.flush()
    return file


def _read_back(folder: Path) -> tuple[set[bytes], dict[str, int]]:
    """The digests of all rows in the unfinished files, and the number of rows of each split."""
    seen: set[bytes] = set()
    written = {}
    for split in ORDER:
        with open_regular(_partial(folder, split)) as rows:
            digests = [_digest(row) for row in rows][1:]  # without the header
        seen.update(digests)
        written[split] = len(digests)
    return seen, written


def _digest(row: bytes) -> bytes:
    return hashlib.blake2b(row, digest_size=16).digest()


def _partial(folder: Path, split: str) -> Path:
    return folder / f"{file_name(split)}.partial"


def _describe(file: Path, split: SequenceSplit) -> dict[str, Any]:
    with open_regular(file) as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return {
        "samples": len(split),
        "file": file.name,
        "bytes": file.stat().st_size,
        "sha256": digest,
        "statistics": listops.statistics(split),
    }
