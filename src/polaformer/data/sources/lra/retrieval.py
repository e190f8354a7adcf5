"""Retrieval: pairs of papers, and whether a citation links them (AAN). The symbols are the first bytes of each paper.

Two forms are read, each with one file per split (train, eval, test) and without header or quoting:
- the release: new_aan_pairs.SPLIT.tsv, with label, id 1, id 2, text 1 and text 2 in every row;
- pairs and documents: NAME_pairs.SPLIT.tsv with label, id 1 and id 2; docs.jsonl (.gz, .xz) with "id" and "text".
A label is 0 or 1, possibly with decimals ("1.0"). A document is stored once per split, however many pairs it is in.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polaformer.data.sources.lra.builder import SampleLocations, SplitBuilder
from polaformer.data.sources.lra.datasets import DATASETS
from polaformer.data.sources.lra.lines import JSON_LINES, Meter, ReportBytes, at_line, read_lines, read_objects, size_on_disk
from polaformer.data.sources.lra.sequences import SequenceSplit
from polaformer.errors import DataError
from polaformer.regular_files import reason

CLASSES = DATASETS["retrieval"].classes
SPLITS = {"train": "train", "eval": "val", "test": "test"}  # in file names → ours
MAX_TEXT_BYTES = 10_000  # of a document that are encoded, as in the release's own reader
KEPT = DATASETS["retrieval"].kept  # bytes of those that the published models read
FOLDERS = ("", "tsv_data", "lra_release/tsv_data", "lra_release/lra_release/tsv_data")  # where the release may be unpacked
COLUMNS = ("label", "id 1", "id 2", "text 1", "text 2")
FORMS = "a folder with new_aan_pairs.{train,eval,test}.tsv, or with NAME_pairs.{train,eval,test}.tsv and docs.jsonl (.gz, .xz)"


class Files(NamedTuple):
    """The files of one folder: pairs by split, and the documents if they are separate."""

    pairs: dict[str, Path]
    documents: Path | None


def holds(path: Path) -> bool:
    """Whether the path has one of the two forms."""
    with suppress(OSError, ValueError):
        return _find(path) is not None
    return False


def load(path: Path, advance: Callable[[int, int], object] = lambda done, total: None) -> dict[str, SequenceSplit]:
    """The splits that are there; raises DataError. advance: called with the number of bytes read, and of all bytes."""
    try:
        found = _find(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}; check it and its permissions") from error
    if found is None:
        raise DataError(f"{path} has no pairs of papers; give {FORMS}")
    paths = [*found.pairs.values(), *([] if found.documents is None else [found.documents])]
    report = Meter(size_on_disk(*paths), advance)
    texts = None if found.documents is None else _read_documents(found.documents, report)
    return {split: _load_split(file, texts, found.documents, report) for split, file in found.pairs.items()}


def statistics(split: SequenceSplit) -> dict[str, Any]:
    """The common statistics, plus the number of distinct documents and the share that the published models read to the end.

    Lengths count the bytes that are encoded.
    """
    whole = round(float(np.mean(split.lengths() <= KEPT)), 4)
    return split.statistics() | {"documents": len(split.offsets) - 1, "read_whole": whole}


def _find(path: Path) -> Files | None:
    """The files at a path, or in the folders of the release below it."""
    for folder in (path / below for below in FOLDERS):
        if not folder.is_dir():
            continue
        names = sorted(file.name for file in folder.iterdir())
        documents = [name for name in names if name in [f"docs{ending}" for ending in JSON_LINES]]
        if len(documents) > 1:
            raise DataError(f"{folder} holds {' and '.join(documents)}, which is ambiguous; remove one of them")
        prefix = _prefix(folder, names) if documents else "new_aan"
        pairs = {split: folder / name for word, split in SPLITS.items() if (name := f"{prefix}_pairs.{word}.tsv") in names}
        if pairs:
            return Files(pairs, folder / documents[0] if documents else None)
    return None


def _prefix(folder: Path, names: list[str]) -> str:
    """The prefix of the file names before `_pairs`."""
    endings = tuple(f"_pairs.{word}.tsv" for word in SPLITS)
    found = sorted({name[: -len(ending)] for name in names for ending in endings if name.endswith(ending)})
    if len(found) > 1:
        raise DataError(f"{folder} holds pairs of {' and of '.join(found)}, which is ambiguous; move one of them")
    return "".join(found)


def _read_documents(path: Path, report: ReportBytes) -> dict[str, bytes]:
    """The first bytes of each document by id."""
    texts: dict[str, bytes] = {}
    for number, found in read_objects(path, report):
        name, text, where = found.get("id"), found.get("text"), at_line(path, number)
        if not isinstance(name, str) or not name or not isinstance(text, str):
            raise DataError(f'{where}: "id" or "text" is missing or not a string; each object needs both')
        if name in texts:
            raise DataError(f"{where}: duplicate id {name!r}; give each document an id of its own")
        try:
            texts[name] = text[:MAX_TEXT_BYTES].encode()[:MAX_TEXT_BYTES]
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: text has a lone surrogate at character {error.start}; remove it") from error
    return texts


def _load_split(path: Path, texts: Mapping[str, bytes] | None, documents: Path | None, report: ReportBytes) -> SequenceSplit:
    """One split. texts: the documents by id, or None if the rows contain them."""
    builder, places = SplitBuilder(CLASSES, str(path)), SampleLocations()
    stored: dict[tuple[bytes, bytes], int] = {}  # id and digest of the text → number of the document
    for number, line in enumerate(read_lines(path, report), start=1):
        where = at_line(path, number)
        label, names, pair = _row(line, where, texts is None)
        if texts is not None:
            pair = [_text(name, texts, documents, where) for name in names]
        # Digests, since the texts as keys would be a second copy of all of them.
        keys = [(name, hashlib.blake2b(text, digest_size=16).digest()) for name, text in zip(names, pair, strict=True)]
        for key, text in zip(keys, pair, strict=True):
            if key not in stored:
                stored[key] = builder.add_document(text)
        builder.add_sample(label, *(stored[key] for key in keys))
        places.add(path, number)
    if not len(builder):
        raise DataError(f"{path} has no pairs; fetch it again, or remove it")
    return builder.finish(places)


def _row(line: bytes, where: str, with_texts: bool) -> tuple[int, list[bytes], list[bytes]]:
    """Label, both ids, and both texts (none without texts in the row); raises DataError."""
    wanted = COLUMNS if with_texts else COLUMNS[:3]
    label, *rest = line.split(b"\t")
    if 1 + len(rest) != len(wanted):
        raise DataError(f"{where} has {1 + len(rest)} columns; give {', '.join(wanted)}, separated by tabs")
    if not rest[0] or not rest[1]:
        raise DataError(f"{where}: {'id 1' if not rest[0] else 'id 2'} is empty; give the id of a paper")
    return _label(label, where), rest[:2], [text[:MAX_TEXT_BYTES] for text in rest[2:]]


def _label(text: bytes, where: str) -> int:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if found not in (0.0, 1.0):
        shown = text[:40].decode("utf-8", "backslashreplace")
        raise DataError(f"{where}: label is {shown!r}; give 0.0 or 1.0")
    return int(found)


def _text(name: bytes, texts: Mapping[str, bytes], documents: Path | None, where: str) -> bytes:
    known = texts.get(name.decode("utf-8", "backslashreplace"))
    if known is None:
        shown = name[:40].decode("utf-8", "backslashreplace")
        raise DataError(f"{where}: there is no document {shown!r} in {documents}; add it, or remove the pair")
    return known
