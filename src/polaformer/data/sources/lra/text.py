"""Text: movie reviews and their sentiment (IMDb). The symbols are the bytes of a review, unchanged.

Three forms are read:
- the aclImdb tree: train/neg/*.txt, train/pos/*.txt, test/neg/*.txt, test/pos/*.txt;
- Parquet files with columns `text` and `label`, as in the Hugging Face dataset `imdb`;
- JSON lines (.jsonl, .jsonl.gz, .jsonl.xz): objects with "text" and "label".
A column or key `split` ("train" or "test") says which split a row belongs to. Without it, the name of the file or of a folder
around it does, as in train-00000-of-00001.parquet; else it is train. The data have no validation split.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polaformer.data.sources import parquet
from polaformer.data.sources.lra.builder import SampleLocations, SplitBuilder
from polaformer.data.sources.lra.datasets import DATASETS
from polaformer.data.sources.lra.lines import JSON_LINES, Meter, ReportBytes, at_line, first_object, read_objects, size_on_disk
from polaformer.data.sources.lra.sequences import SequenceSplit
from polaformer.errors import DataError
from polaformer.extras import require
from polaformer.regular_files import open_regular, read_regular, reason, unpacked_limit

CLASSES, KEPT = DATASETS["text"].classes, DATASETS["text"].kept  # bytes of a review that the published models read
FOLDERS = ("neg", "pos")  # of the tree, in the order of the classes
SPLITS = ("train", "test")
UNLABELLED, VALIDATION = ("unsupervised", "unsup"), ("validation", "valid", "val", "dev", "eval")  # other names of splits
LABELS: Mapping[int | str, int] = {0: 0, "neg": 0, "negative": 0, 1: 1, "pos": 1, "positive": 1}
MAX_REVIEW = 2**20  # bytes; the longest of IMDb has 13,704
ROWS = 1024  # of a Parquet file that are unpacked at a time
PARQUET = ("*.parquet", "*/*.parquet", "*/train/*.parquet", "*/test/*.parquet")  # where a dataset of the hub has them
FORMS = (
    "an aclImdb folder (train/neg/*.txt and so on), a folder of Parquet files with columns text and label, or JSON lines "
    '(.jsonl, .jsonl.gz, .jsonl.xz) with "text" and "label"'
)


class ReviewRow(NamedTuple):
    """A row of a file before it is checked: its number from 1, and the values under text, label and split."""

    number: int
    text: Any
    label: Any
    split: Any


def holds(path: Path) -> bool:
    """Whether the path has one of the three forms."""
    with suppress(OSError, ValueError):
        if _tree(path) is not None:
            return True
        files = _row_files(path)
        return bool(files) and (_has_columns(files[0]) if files[0].suffix == ".parquet" else _has_keys(files[0]))
    return False


def load(path: Path, advance: Callable[[int, int], object] = lambda done, total: None) -> dict[str, SequenceSplit]:
    """The splits train and test, or one of them; raises DataError. advance: called with the bytes read, and all of them."""
    try:
        tree = _tree(path)
        splits = _load_rows(path, _row_files(path), advance) if tree is None else _load_tree(tree, advance)
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {reason(error)}; check it and its permissions") from error
    if not splits:
        raise DataError(f"{path} has no reviews; give {FORMS}")
    return splits


def statistics(split: SequenceSplit) -> dict[str, Any]:
    """The common statistics, plus the share of reviews that the published models read to the end."""
    return split.statistics() | {"read_whole": round(float(np.mean(split.lengths() <= KEPT)), 4)}


# The aclImdb tree


def _tree(path: Path) -> Path | None:
    """The folder that holds train or test with the folders of the classes: the path, or aclImdb in it."""
    for root in (path, path / "aclImdb"):
        if any(_has_reviews(root / split / name) for split in SPLITS for name in FOLDERS):
            return root
    return None


def _has_reviews(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    with os.scandir(folder) as entries:
        return any(_is_review(entry) for entry in entries)


def _is_review(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(".txt") and not entry.name.startswith(".")


def _load_tree(root: Path, advance: Callable[[int, int], object]) -> dict[str, SequenceSplit]:
    folders = {split: [root / split / name for name in FOLDERS] for split in SPLITS if (root / split).is_dir()}
    missing = [folder for both in folders.values() for folder in both if not folder.is_dir()]
    if missing:
        raise DataError(f"there is no folder {missing[0]}; a split needs reviews of both classes, in {' and '.join(FOLDERS)}")
    files = {folder: _reviews(folder) for both in folders.values() for folder in both}
    report = Meter(_checked_size(root, files), advance)
    return {split: _read_reviews(both, files, report) for split, both in folders.items()}


def _reviews(folder: Path) -> list[os.DirEntry[str]]:
    """In the order of their names: file systems list them in arbitrary order."""
    with os.scandir(folder) as entries:
        found = sorted((entry for entry in entries if _is_review(entry)), key=lambda entry: entry.name)
    if not found:
        raise DataError(f"{folder} has no reviews; put them there as .txt files")
    return found


def _checked_size(root: Path, files: Mapping[Path, list[os.DirEntry[str]]]) -> int:
    """The bytes of all reviews; raises DataError if sparse files claim more than memory may hold."""
    statuses = [entry.stat() for entries in files.values() for entry in entries]
    total, most = sum(status.st_size for status in statuses), unpacked_limit(*statuses)
    if total > most:
        raise DataError(f"the reviews in {root} have {total:,} bytes, more than the {most:,} allowed; check the files")
    return total


def _read_reviews(folders: list[Path], files: Mapping[Path, list[os.DirEntry[str]]], report: ReportBytes) -> SequenceSplit:
    """One split. folders: those of its classes."""
    builder, names = SplitBuilder(CLASSES, str(folders[0].parent)), []
    for label, folder in enumerate(folders):
        for entry in files[folder]:
            try:
                content = read_regular(entry.path, MAX_REVIEW)
            except OSError as error:
                raise DataError(f"{entry.path} cannot be read: {reason(error)}; check it, or remove it") from error
            builder.add_sample(label, builder.add_document(content))
            names.append(f"{folder.parent.name}/{folder.name}/{entry.name}")
            report(len(content))
    return builder.finish(names)


# Files of rows


def _row_files(path: Path) -> list[Path]:
    """The Parquet files or the files of JSON lines at a path, in the order of their names; none for any other path."""
    if not path.is_dir():
        return [path] if path.exists() and (path.suffix == ".parquet" or path.name.endswith(JSON_LINES)) else []
    stored = sorted(file for pattern in PARQUET for file in path.glob(pattern))
    lines = sorted(file for file in path.iterdir() if file.name.endswith(JSON_LINES))
    if stored and lines:
        raise DataError(f"{path} holds {stored[0].name} and {lines[0].name}, which is ambiguous; give one of them")
    return stored or lines


def _load_rows(root: Path, files: list[Path], advance: Callable[[int, int], object]) -> dict[str, SequenceSplit]:
    is_parquet = any(file.suffix == ".parquet" for file in files)
    noun, rows_of = ("row", _parquet_rows) if is_parquet else ("line", _json_rows)
    builders = {split: SplitBuilder(CLASSES, str(root)) for split in SPLITS}
    places = {split: SampleLocations(noun) for split in SPLITS}
    named_after = {file: _split_of_name(file, root) for file in files}
    labelled = [file for file in files if named_after[file] not in UNLABELLED]
    report = Meter(size_on_disk(*labelled), advance)
    for file in labelled:
        for row in rows_of(file, report):
            split, label, text = _checked(row, named_after[file], at_line(file, row.number, noun))
            builders[split].add_sample(label, builders[split].add_document(text))
            places[split].add(file, row.number)
    return {split: builder.finish(places[split]) for split, builder in builders.items() if len(builder)}


def _split_of_name(file: Path, root: Path) -> str:
    """The split that a file, or a folder between it and the root, is named after; "train" if there is none."""
    parts = file.relative_to(root).parts if file != root else (file.name,)
    words = [word for part in reversed(parts) for word in re.split(r"[^a-z]+", part.lower())]
    found = next((word for word in words if word in (*SPLITS, *UNLABELLED, *VALIDATION)), "train")
    if found in VALIDATION:
        raise DataError(f"{file} is named after a split {found!r}; the splits are {' and '.join(SPLITS)}: rename or remove it")
    return found


def _checked(row: ReviewRow, named: str, where: str) -> tuple[str, int, bytes]:
    """Split, label and text of a row; raises DataError."""
    split = named if row.split is None else row.split
    if split not in SPLITS:
        raise DataError(f"{where}: split is {_shown(split)}; give {' or '.join(map(repr, SPLITS))}, or remove the row")
    is_label = isinstance(row.label, int | str) and not isinstance(row.label, bool) and row.label in LABELS
    if not is_label:
        raise DataError(f"{where}: label is {_shown(row.label)}; give 0 or 'neg', 1 or 'pos'")
    if not isinstance(row.text, str | bytes):
        raise DataError(f"{where}: text is {_shown(row.text)}; give a string")
    try:
        return split, LABELS[row.label], row.text if isinstance(row.text, bytes) else row.text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: text has a lone surrogate at character {error.start}; remove it") from error


def _shown(value: Any) -> str:
    """A value in a message: short, whatever it is."""
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _json_rows(path: Path, report: ReportBytes) -> Iterator[ReviewRow]:
    for number, found in read_objects(path, report):
        yield ReviewRow(number, found.get("text"), found.get("label"), found.get("split"))


def _has_keys(path: Path) -> bool:
    return {"text", "label"} <= first_object(path).keys()


def _parquet_rows(path: Path, report: ReportBytes) -> Iterator[ReviewRow]:
    require("data", "pyarrow")
    try:
        opened = open_regular(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}; check the path, or remove it") from error
    with opened as file:
        if problem := parquet.problem(path, "split it into several files"):
            raise DataError(f"{path} {problem}")
        try:
            yield from _rows(path, file, report)
        except (DataError, GeneratorExit):
            raise
        except Exception as error:
            # A damaged file can raise nearly anything inside pyarrow; it all means the same.
            what = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{path} is not a complete Parquet file ({what}); fetch it again") from error


def _rows(path: Path, file: Any, report: ReportBytes) -> Iterator[ReviewRow]:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as opened:
        names, count = opened.schema_arrow.names, 0
        if not {"text", "label"} <= set(names):
            raise DataError(f"{path} has the columns {', '.join(names[:10])}; 'text' and 'label' are needed: rename them")
        for batch in opened.iter_batches(ROWS, columns=[name for name in ("text", "label", "split") if name in names]):
            text, label = batch.column("text"), batch.column("label").to_pylist()
            # As bytes: decoding and encoding them again would refuse text that is not UTF-8.
            text = text.cast(pa.binary()) if pa.types.is_string(text.type) else text
            split = batch.column("split").to_pylist() if "split" in batch.schema.names else [None] * len(label)
            for one in zip(text.to_pylist(), label, split, strict=True):
                count += 1
                yield ReviewRow(count, *one)
            report(size_on_disk(path) * len(label) // opened.metadata.num_rows)


def _has_columns(path: Path) -> bool:
    if find_spec("pyarrow") is None:
        return False  # `load` says how to install it
    from pyarrow.parquet import read_schema

    try:
        with open_regular(path) as file:
            return {"text", "label"} <= set(read_schema(file).names)
    except Exception:
        return False  # as in _parquet_rows
