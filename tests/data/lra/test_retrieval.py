"""Retrieval: both forms give the same pairs, a document is stored once, and malformed rows are one error each."""

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arena
from pictures import refused
from polaformer.data.sources.lra import lines, retrieval
from polaformer.data.sources.lra.sequences import SequenceSplit

OURS = {"train": "train", "eval": "val", "test": "test"}


def found_pairs(split: SequenceSplit) -> list[tuple[tuple[bytes, ...], int]]:
    return [(pair, int(label)) for pair, label in zip(arena.documents(split), split.labels, strict=True)]


@pytest.mark.parametrize("form", ["release", "release, the folder above", ".jsonl", ".jsonl.gz", ".jsonl.xz"])
def test_both_forms_give_the_same_pairs(form: str, tmp_path: Path) -> None:
    path = tmp_path / "aan"
    if form.startswith("."):
        arena.write_pairs(path, form)
    else:
        arena.write_release(path / "lra_release/lra_release/tsv_data" if "above" in form else path)
    assert retrieval.holds(path)
    counted: list[tuple[int, int]] = []
    found = retrieval.load(path, lambda done, total: counted.append((done, total)))
    assert list(found) == ["train", "val", "test"]
    for name, ours in OURS.items():
        assert found_pairs(found[ours]) == arena.pairs_of(name)
        assert found[ours].classes == retrieval.CLASSES
        assert found[ours].num_documents == 2
    assert counted[-1][0] == counted[-1][1]


def test_both_forms_have_the_same_digest(tmp_path: Path) -> None:
    one, two = (retrieval.load(path) for path in (arena.write_release(tmp_path / "a"), arena.write_pairs(tmp_path / "b")))
    assert [split.digest() for split in one.values()] == [split.digest() for split in two.values()]


def test_a_document_is_stored_once_per_split(tmp_path: Path) -> None:
    found = retrieval.load(arena.write_release(tmp_path))["train"]
    assert len(found.offsets) - 1 == 5
    assert found.documents.tolist() == [[0, 1], [2, 0], [1, 0], [3, 4]]
    assert len(found.symbols) == sum(len(arena.PAPERS[f"P0{n}"].encode()) for n in range(5))


def test_the_same_id_with_another_text_is_another_document(tmp_path: Path) -> None:
    path = arena.write_lines(tmp_path / "new_aan_pairs.train.tsv", ["1.0\tA\tB\tx\ty", "0.0\tA\tC\tz\ty"])
    assert arena.documents(retrieval.load(path.parent)["train"]) == [(b"x", b"y"), (b"z", b"y")]


def test_the_first_10000_bytes_of_a_text_are_kept(tmp_path: Path) -> None:
    """Bytes, not characters: a character may be cut."""
    texts = dict(arena.PAPERS, P00="é" * 9000, P01="x" + "é" * 9000)
    arena.write_release(tmp_path / "a", texts)
    arena.write_pairs(tmp_path / "b")
    arena.write_lines(tmp_path / "b/docs.jsonl.xz", [{"id": name, "text": text} for name, text in texts.items()])
    for form in ("a", "b"):
        found = retrieval.load(tmp_path / form)["train"]
        assert found.read(0, 0).tobytes() == ("é" * 5000).encode()
        assert found.read(0, 1).tobytes() == ("x" + "é" * 5000).encode()[:10_000]


def test_quotes_and_the_ends_of_lines_are_data_except_the_line_feed(tmp_path: Path) -> None:
    rows = [b'1.0\tA\tB\t"\tb\x85\xe2\x80\xa8\r', b'0\tC\tD\t\xff"\t']
    (tmp_path / "new_aan_pairs.test.tsv").write_bytes(b"\n".join(rows))
    found = retrieval.load(tmp_path)
    assert found_pairs(found["test"]) == [((b'"', b"b\x85\xe2\x80\xa8"), 1), ((b'\xff"', b""), 0)]


def test_pairs_are_named_by_file_and_line_and_statistics_count_documents(tmp_path: Path) -> None:
    found = retrieval.load(arena.write_pairs(tmp_path))["train"]
    assert found.name(2) == f"{tmp_path}/mini_pairs.train.tsv, line 3"
    facts = retrieval.statistics(found)
    assert (facts["samples"], facts["documents"], facts["read_whole"]) == (4, 5, 1.0)
    assert facts["classes"] == {"unrelated": 0.5, "linked": 0.5}


def test_the_symbols_are_held_once_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "CHUNK", 2**16)
    size, number = 10_000, 400
    draw = np.random.default_rng(0)
    with open(tmp_path / "new_aan_pairs.train.tsv", "wb") as file:
        for n in range(number):
            one, two = (bytes(draw.integers(97, 123, size, dtype=np.uint8)) for _ in range(2))
            file.write(b"\t".join((b"1.0", b"A%d" % n, b"B%d" % n, one, two)) + b"\n")
    tracemalloc.start()
    found = retrieval.load(tmp_path)["train"]
    used, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found.symbols) == 2 * number * size
    assert used < 1.2 * len(found.symbols)
    assert peak < 1.5 * len(found.symbols)


def test_the_pairs_beside_the_checkout() -> None:
    found = retrieval.load(arena.shared("aan-mini"))
    assert {name: len(split) for name, split in found.items()} == {"train": 9644, "val": 1206, "test": 1206}
    assert max(len(split.offsets) - 1 for split in found.values()) <= 1008
    assert max(int(split.lengths().max()) for split in found.values()) == 10_000


ROWS: dict[str, tuple[bytes, str]] = {
    "an empty row": (b"", "line 2 has 1 columns; give label, id 1, id 2, text 1, text 2, separated by tabs"),
    "four columns": (b"1.0\tA\tB\tx", "line 2 has 4 columns"),
    "six columns": (b"1.0\tA\tB\tx\ty\tz", "line 2 has 6 columns"),
    "commas": (b"1.0,A,B,x,y", "line 2 has 1 columns"),
    "a header": (b"label\tid1\tid2\ttext1\ttext2", "line 2: label is 'label'; give 0.0 or 1.0"),
    "a label of 2": (b"2.0\tA\tB\tx\ty", "line 2: label is '2.0'; give 0.0 or 1.0"),
    "no number": (b"nan\tA\tB\tx\ty", "line 2: label is 'nan'; give 0.0 or 1.0"),
    "an empty label": (b"\tA\tB\tx\ty", "line 2: label is ''; give 0.0 or 1.0"),
    "a label that is no text": (b"\xff\x1b\tA\tB\tx\ty", "line 2: label is "),
    "no first id": (b"1.0\t\tB\tx\ty", "line 2: id 1 is empty; give the id of a paper"),
    "no second id": (b"1.0\tA\t\tx\ty", "line 2: id 2 is empty; give the id of a paper"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_malformed_row_of_the_release_is_one_error_that_names_file_and_line(kind: str, tmp_path: Path) -> None:
    row, told = ROWS[kind]
    path = arena.write_lines(tmp_path / "new_aan_pairs.eval.tsv", [b"0.0\tA\tB\tx\ty", row, b"0.0\tA\tB\tx\ty"])
    with refused(f"{path}, {told}"):
        retrieval.load(tmp_path)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("1\tP00", "line 2 has 2 columns; give label, id 1, id 2, separated by tabs"),
        ("1\tP00\tP01\tx\ty", "line 2 has 5 columns; give label, id 1, id 2, separated by tabs"),
        ("1\tP00\tGONE", "line 2: there is no document 'GONE' in "),
        ("yes\tP00\tP01", "line 2: label is 'yes'; give 0.0 or 1.0"),
    ],
)
def test_a_malformed_pair_is_one_error_that_names_file_and_line(row: str, told: str, tmp_path: Path) -> None:
    arena.write_pairs(tmp_path)
    path = arena.write_lines(tmp_path / "mini_pairs.test.tsv", ["1\tP00\tP01", row])
    with refused(f"{path}, {told}"):
        retrieval.load(tmp_path)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"id": "X"}, 'line 2: "id" or "text" is missing or not a string; each object needs both'),
        ({"id": 5, "text": "x"}, 'line 2: "id" or "text" is missing or not a string'),
        ({"id": "P00", "text": "x"}, "line 2: duplicate id 'P00'; give each document an id of its own"),
        ("{'id': 1}", "line 2 is not JSON: "),
        ('{"id": "X", "text": "\\udc00"}', "line 2: text has a lone surrogate at character 0"),
    ],
)
def test_a_malformed_document_is_one_error_that_names_file_and_line(row: Any, told: str, tmp_path: Path) -> None:
    path = arena.write_lines(arena.write_pairs(tmp_path) / "docs.jsonl.xz", [{"id": "P00", "text": "x"}, row])
    with refused(f"{path}, {told}"):
        retrieval.load(tmp_path)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["mini_pairs.train.tsv", "docs.jsonl.xz"])
@pytest.mark.parametrize("obstruct", [fifo, folder])
def test_what_stands_in_place_of_a_file_is_one_error(obstruct: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    obstruct(arena.write_pairs(tmp_path) / name)
    with refused(f"{tmp_path}/{name} cannot be read: it is not a regular file"):
        retrieval.load(tmp_path)


def test_a_file_without_pairs_is_one_error(tmp_path: Path) -> None:
    empty(arena.write_release(tmp_path) / "new_aan_pairs.test.tsv")
    with refused(f"{tmp_path}/new_aan_pairs.test.tsv has no pairs; fetch it again, or remove it"):
        retrieval.load(tmp_path)


def test_files_that_leave_a_choice_are_one_error(tmp_path: Path) -> None:
    arena.write_pairs(tmp_path)
    arena.write_lines(tmp_path / "other_pairs.train.tsv", ["1\tP00\tP01"])
    with refused(f"{tmp_path} holds pairs of mini and of other, which is ambiguous; move one of them"):
        retrieval.load(tmp_path)
    arena.write_lines(tmp_path / "docs.jsonl", [])
    with refused(f"{tmp_path} holds docs.jsonl and docs.jsonl.xz, which is ambiguous"):
        retrieval.load(tmp_path)
    assert not retrieval.holds(tmp_path)


@pytest.mark.parametrize("kind", ["nothing", "a file", "a folder", "documents alone", "pairs alone"])
def test_what_is_not_recognised_is_refused_with_the_forms_that_are(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "aan"
    if kind == "a file":
        path.touch()
    elif kind == "a folder":
        path.mkdir()
    elif kind == "documents alone":
        arena.write_lines(path / "docs.jsonl", [{"id": "A", "text": "x"}])
    elif kind == "pairs alone":
        arena.write_lines(path / "mini_pairs.train.tsv", ["1\tA\tB"])
    assert not retrieval.holds(path)
    with refused(f"{path} has no pairs of papers; give a folder with new_aan_pairs.{{train,eval,test}}.tsv, or"):
        retrieval.load(path)
