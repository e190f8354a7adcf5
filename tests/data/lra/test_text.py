"""Text: the three forms give the same reviews, and every malformed one is one error that says where."""

import gzip
import lzma
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arena
from pictures import refused
from polaformer import regular_files
from polaformer.data.sources.lra import lines, text
from polaformer.errors import MissingExtraError


def columns(split: str | None = None) -> dict[str, Any]:
    rows = [row for row in arena.review_rows() if split in (None, row["split"])]
    return {name: [row[name] for row in rows] for name in ("text", "label", *(["split"] if split is None else []))}


def write_hub(root: Path) -> Path:
    """As the hub stores `imdb`, with rows that have no label."""
    for split in ("train", "test"):
        arena.write_parquet(root / "plain_text" / f"{split}-00000-of-00001.parquet", columns(split))
    arena.write_parquet(root / "plain_text" / "unsupervised-00000-of-00001.parquet", {"text": ["?"], "label": [-1]})
    return root


def write_folders(root: Path) -> Path:
    for split in ("train", "test"):
        arena.write_parquet(root / "plain_text" / split / "0000.parquet", columns(split))
    return root


def write_two(root: Path) -> Path:
    for split in ("train", "test"):
        rows = [
            {"text": row["text"], "label": ("neg", "positive")[row["label"]]}
            for row in arena.review_rows()
            if row["split"] == split
        ]
        arena.write_lines(root / f"imdb_{split}.jsonl", rows)
    return root


FORMS: dict[str, Callable[[Path], Path]] = {
    "tree": lambda root: arena.write_tree(root),
    "tree, the folder above": lambda root: arena.write_tree(root / "aclImdb").parent,
    "JSON lines": lambda root: arena.write_lines(root / "x.jsonl", arena.review_rows()),
    "JSON lines, gz": lambda root: arena.write_lines(root / "x.jsonl.gz", arena.review_rows()),
    "JSON lines, xz": lambda root: arena.write_lines(root / "x.jsonl.xz", arena.review_rows()),
    "JSON lines, the folder": lambda root: arena.write_lines(root / "x.jsonl.xz", arena.review_rows()).parent,
    "JSON lines, two files": write_two,
    "Parquet": lambda root: arena.write_parquet(root / "x.parquet", columns(), compression="zstd"),
    "Parquet, the hub's folder": write_hub,
    "Parquet, folders of splits": write_folders,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_reviews(form: str, tmp_path: Path) -> None:
    path = FORMS[form](tmp_path / "imdb")
    counted: list[tuple[int, int]] = []
    assert text.holds(path)
    found = text.load(path, lambda done, total: counted.append((done, total)))
    assert list(found) == ["train", "test"]
    for split, sequences in found.items():
        assert arena.found_reviews(sequences) == arena.reviews_of(split)
        assert sequences.classes == text.CLASSES == ("negative", "positive")
    assert [done for done, _ in counted] == sorted(done for done, _ in counted)
    assert counted[-1][0] <= counted[-1][1] == counted[0][1]
    assert counted[-1][0] >= 0.9 * counted[-1][1]


def test_samples_are_named_by_file_and_line(tmp_path: Path) -> None:
    found = text.load(arena.write_lines(tmp_path / "x.jsonl", arena.review_rows()))
    assert found["test"].name(1) == f"{tmp_path}/x.jsonl, line 8"
    assert text.load(arena.write_tree(tmp_path / "tree"))["test"].name(1) == "test/neg/07_7.txt"
    assert text.load(write_two(tmp_path / "two"))["test"].name(-1) == f"{tmp_path}/two/imdb_test.jsonl, line 6"
    assert text.load(FORMS["Parquet"](tmp_path))["train"].name(0) == f"{tmp_path}/x.parquet, row 1"
    assert list(found["train"].names or ())[:2] == [f"{tmp_path}/x.jsonl, line {n}" for n in (1, 2)]


def test_rows_without_a_split_are_for_training(tmp_path: Path) -> None:
    found = text.load(arena.write_lines(tmp_path / "reviews.jsonl", [{"text": "a", "label": 1}, {"text": "", "label": 0}]))
    assert {name: arena.found_reviews(split) for name, split in found.items()} == {"train": [(b"a", 1), (b"", 0)]}


def test_files_that_are_no_reviews_are_passed_over(tmp_path: Path) -> None:
    for name in ("._00_7.txt", "notes.md", "urls_neg.csv"):
        arena.write(arena.write_tree(tmp_path) / "train" / "neg" / name, b"?")
    assert arena.found_reviews(text.load(tmp_path)["train"]) == arena.reviews_of("train")


def test_bytes_that_are_no_text_are_kept_as_they_are(tmp_path: Path) -> None:
    every = bytes(range(256))
    arena.write(arena.write_tree(tmp_path) / "train" / "neg" / "00_7.txt", every)
    assert text.load(tmp_path)["train"].read(0).tobytes() == every


def test_statistics_hold_the_share_that_is_read_to_the_end(tmp_path: Path) -> None:
    rows = [{"text": "x" * length, "label": length % 2} for length in (1, 4000, 4001, 5000)]
    found = text.statistics(text.load(arena.write_lines(tmp_path / "x.jsonl", rows))["train"])
    assert (found["samples"], found["read_whole"], found["length"]["longest"]) == (4, 0.5, 5000)


def test_imdb_as_it_lies_beside_the_checkout() -> None:
    found = text.load(arena.shared("imdb"))
    assert {name: len(split.symbols) for name, split in found.items()} == {"train": 33_132_823, "test": 32_350_685}
    for split in found.values():
        assert np.bincount(split.labels).tolist() == [12_500, 12_500]


LINES: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "line 2 is not JSON: Expecting property name"),
    "an empty line": ("", "line 2 is not JSON: the line is empty; write one object per line"),
    "a list": ("[1]", "line 2 is JSON but not an object"),
    "no UTF-8": (b'{"text": "\xff", "label": 1}', "line 2 is not JSON: 'utf-8' codec can't decode"),
    "deeply nested": ("[" * 200_000, "line 2 is not JSON: "),
    "no text": ({"label": 1}, "line 2: text is missing; give a string"),
    "a number as text": ({"text": 5, "label": 1}, "line 2: text is 5; give a string"),
    "no label": ({"text": "a"}, "line 2: label is missing; give 0 or 'neg', 1 or 'pos'"),
    "a label without a class": ({"text": "a", "label": 2}, "line 2: label is 2; give 0 or 'neg', 1 or 'pos'"),
    "a true label": ({"text": "a", "label": True}, "line 2: label is True; give 0"),
    "a fraction as label": ({"text": "a", "label": 0.5}, "line 2: label is 0.5; give 0"),
    "a list as label": ({"text": "a", "label": [1]}, "line 2: label is [1]; give 0"),
    "a long label": ({"text": "a", "label": "x" * 10**6}, f"line 2: label is '{'x' * 39}…; give 0"),
    "an unlabelled row": ({"text": "a", "label": -1}, "line 2: label is -1; give 0"),
    "another split": ({"text": "a", "label": 1, "split": "dev"}, "line 2: split is 'dev'; give 'train' or 'test'"),
    "a number as split": ({"text": "a", "label": 1, "split": [0]}, "line 2: split is [0]; give 'train' or 'test'"),
    "half a character": ('{"text": "ab\\ud800", "label": 1}', "line 2: text has a lone surrogate at character 2"),
    "a number of many digits": ('{"text": "a", "label": ' + "9" * 5000 + "}", "line 2 is not JSON: "),
}


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.xz"])
@pytest.mark.parametrize("kind", LINES)
def test_a_malformed_line_is_one_error_that_names_file_and_line(kind: str, ending: str, tmp_path: Path) -> None:
    line, told = LINES[kind]
    path = arena.write_lines(tmp_path / f"x{ending}", [{"text": "a", "label": 0}, line, {"text": "b", "label": 1}])
    with refused(f"{path}, {told}"):
        text.load(path)


def replace_end(path: Path, removed: int, added: bytes = b"") -> None:
    path.write_bytes(path.read_bytes()[:-removed] + added)


PACKED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "xz, cut": (".xz", lambda path: replace_end(path, 30), "cannot be read: the file ends inside the compressed data"),
    "gz, cut": (".gz", lambda path: replace_end(path, 30), "cannot be read: Compressed file ended"),
    "xz, damaged": (
        ".xz",
        lambda path: path.write_bytes(path.read_bytes()[:40] + b"?" * 30 + path.read_bytes()[70:]),
        "cannot be read: Corrupt input data",
    ),
    "gz, damaged": (
        ".gz",
        lambda path: path.write_bytes(path.read_bytes()[:20] + b"\xff" * 90 + path.read_bytes()[110:]),
        "cannot be read: ",
    ),
    "xz, not compressed": (".xz", lambda path: path.write_text("{}\n" * 20), "cannot be read: Input format not supported"),
    "gz, not compressed": (".gz", lambda path: path.write_text("{}\n" * 20), "cannot be read: Not a gzipped file"),
    "xz, more behind it": (".xz", lambda path: replace_end(path, 1, path.read_bytes()[-1:] + b"more"), "cannot be read: "),
    "xz, a checksum": (".xz", lambda path: replace_end(path, 40, bytes(40)), "cannot be read: "),
    "empty": ("", lambda path: path.write_bytes(b""), "has no reviews; give an aclImdb folder"),
}


@pytest.mark.parametrize("kind", PACKED)
def test_a_damaged_file_is_one_error(kind: str, tmp_path: Path) -> None:
    ending, damage, told = PACKED[kind]
    path = arena.write_lines(tmp_path / f"x.jsonl{ending}", arena.review_rows() * 20)
    damage(path)
    with refused(f"{path} {told}"):
        text.load(path)


def test_an_xz_of_several_padded_streams_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "CHUNK", 64)  # so that the padding is longer than what is read at a time
    path = tmp_path / "x.txt.xz"
    path.write_bytes(lzma.compress(b"one\r\ntw") + bytes(400) + lzma.compress(b"o\n\nthree") + bytes(8))
    assert list(lines.read_lines(path)) == [b"one", b"two", b"", b"three"]


@pytest.mark.parametrize("ending", [".jsonl.xz", ".jsonl.gz", ".jsonl"])
@pytest.mark.parametrize("kind", ["one line", "many lines"])
def test_a_file_that_unpacks_to_far_more_than_it_holds_is_one_error(
    kind: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regular_files, "MAX_UNPACKED", 2**22)
    monkeypatch.setattr(lines, "MAX_LINE", 2**21)
    path = tmp_path / f"x{ending}"
    if ending == ".jsonl":
        path.touch()
        os.truncate(path, 2**40)  # sparse: takes no disk space, and is one line
    else:
        line = b'{"text": "a", "label": 1, "split": "train"}\n'
        arena.write(path, bytes(2**24) if kind == "one line" else line * (2**24 // len(line)))
        assert path.stat().st_size < 2**17
    too_long = kind == "one line" or ending == ".jsonl"
    with refused(
        str(path), "line 1 has more than the 2,097,152 bytes" if too_long else "holds more than the 4,194,304 bytes allowed"
    ):
        text.load(path)


def test_an_xz_that_asks_for_gigabytes_to_unpack_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_DICTIONARY", 2**20)
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 2**24}]
    path = tmp_path / "x.jsonl.xz"
    path.write_bytes(lzma.compress(b"{}\n", filters=filters))
    with refused("x.jsonl.xz cannot be read: Memory usage limit exceeded"):
        text.load(path)


# The tree


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def sparse(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.touch()
    os.truncate(path, 2**40)


def link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("gone")


OBSTACLES = {
    "a FIFO": (fifo, "cannot be read: it is not a regular file"),
    "a folder": (folder, "cannot be read: it is not a regular file"),
    "a dangling link": (link, "cannot be read: No such file or directory"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", OBSTACLES)
@pytest.mark.parametrize(
    "name", ["tree/train/neg/01_7.txt", "set/plain_text/train-00000-of-00001.parquet", "x.jsonl", "x.jsonl.xz"]
)
def test_what_stands_in_place_of_a_file_is_one_error(name: str, kind: str, tmp_path: Path) -> None:
    obstruct, told = OBSTACLES[kind]
    path = tmp_path / name
    root = {"tree": arena.write_tree, "set": write_hub}.get(name.split("/")[0], lambda root: root)(
        tmp_path / name.split("/")[0]
    )
    obstruct(path)
    if kind == "a folder" and name.startswith("x."):
        told = "has no reviews"  # a folder of nothing
    if kind == "a dangling link" and name.startswith("x."):
        told = "has no reviews"
    with refused(str(path) if "reviews" not in told else str(root), told):
        text.load(root)


def test_sparse_reviews_are_one_error(tmp_path: Path) -> None:
    sparse(arena.write_tree(tmp_path) / "test" / "pos" / "09_7.txt")
    with refused(f"the reviews in {tmp_path} have 1,099,511,", "more than the 268,435,456 allowed; check the files"):
        text.load(tmp_path)


def test_a_review_that_is_too_long_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MAX_REVIEW", 10)
    with refused("train/neg/00_7.txt cannot be read: it has 18 bytes, more than the 10 allowed; check it, or remove it"):
        text.load(arena.write_tree(tmp_path))


def test_a_tree_without_one_of_its_classes_is_one_error(tmp_path: Path) -> None:
    for file in (arena.write_tree(tmp_path) / "test" / "pos").iterdir():
        file.unlink()
    with refused(f"{tmp_path}/test/pos has no reviews; put them there as .txt files"):
        text.load(tmp_path)
    (tmp_path / "test" / "pos").rmdir()
    with refused(f"there is no folder {tmp_path}/test/pos; a split needs reviews of both classes, in neg and pos"):
        text.load(tmp_path)


# Parquet


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"review": ["a"], "label": [0]}, "x.parquet has the columns review, label; 'text' and 'label' are needed"),
        ({"text": ["a", "b"], "label": [0, 2]}, "x.parquet, row 2: label is 2; give 0 or 'neg', 1 or 'pos'"),
        ({"text": ["a", None], "label": [0, 1]}, "x.parquet, row 2: text is missing; give a string"),
        ({"text": ["a", "b"], "label": [0, None]}, "x.parquet, row 2: label is missing"),
        ({"text": [1, 2], "label": [0, 1]}, "x.parquet, row 1: text is 1; give a string"),
        ({"text": ["a"], "label": [0], "split": ["dev"]}, "x.parquet, row 1: split is 'dev'; give 'train' or 'test'"),
        ({"text": ["a"], "label": [0.5]}, "x.parquet, row 1: label is 0.5"),
        ({"text": [], "label": []}, "x.parquet has no reviews"),
    ],
)
def test_a_malformed_parquet_file_is_one_error(columns: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = arena.write_parquet(tmp_path / "x.parquet", columns)
    with refused(told):
        text.load(path)


@pytest.mark.parametrize("kind", ["cut", "a page", "nothing"])
def test_a_damaged_parquet_file_is_one_error(kind: str, tmp_path: Path) -> None:
    rows = {"text": [os.urandom(20).hex() for _ in range(3000)], "label": [0] * 3000}
    path = arena.write_parquet(tmp_path / "x.parquet", rows, compression="zstd", use_dictionary=False)
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[:-50], "a page": whole[:200] + bytes(20_000) + whole[20_200:], "nothing": b""}[kind])
    with refused(f"{path} is not a complete Parquet file ("):
        text.load(path)


def test_a_parquet_file_that_grows_in_memory_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular_files, "MAX_UNPACKED", 2**20)
    path = arena.write_parquet(tmp_path / "x.parquet", {"text": ["a" * 10_000] * 1000, "label": [0] * 1000})
    with refused(f"{path} would take ", "more than the 1,048,576 allowed; split it into several files"):
        text.load(path)


def test_parquet_without_pyarrow_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = FORMS["Parquet"](tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert not text.holds(path)
    with pytest.raises(MissingExtraError, match=r'pyarrow not installed; run: pip install "polaformer\[data\]"'):
        text.load(path)


# Paths that are something else


def test_a_folder_of_both_kinds_of_rows_is_one_error(tmp_path: Path) -> None:
    arena.write_parquet(tmp_path / "x.parquet", columns())
    arena.write_lines(tmp_path / "x.jsonl", arena.review_rows())
    with refused(f"{tmp_path} holds x.parquet and x.jsonl, which is ambiguous; give one of them"):
        text.load(tmp_path)
    assert not text.holds(tmp_path)


@pytest.mark.parametrize("name", ["validation.jsonl", "dev/0000.parquet", "imdb-eval.jsonl.gz"])
def test_a_file_named_after_a_split_that_the_data_do_not_have_is_one_error(name: str, tmp_path: Path) -> None:
    rows = arena.review_rows()
    arena.write_parquet(tmp_path / name, columns()) if "parquet" in name else arena.write_lines(tmp_path / name, rows)
    with refused(str(tmp_path / name), "is named after a split ", "the splits are train and test: rename or remove it"):
        text.load(tmp_path)


@pytest.mark.parametrize("kind", ["nothing", "a folder", "images", "text", "no permission"])
def test_what_is_not_recognised_is_refused_with_the_forms_that_are(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if kind == "a folder":
        path.mkdir()
    elif kind == "images":
        arena.write(path / "train" / "neg" / "1.png", b"?")
    elif kind == "text":
        path.write_text("text")
    elif kind == "no permission":
        path.mkdir(mode=0)
    assert not text.holds(path)
    with refused(f"{path} "):
        text.load(path)


def test_json_lines_of_something_else_are_not_recognised(tmp_path: Path) -> None:
    assert not text.holds(arena.write_lines(tmp_path / "docs.jsonl", [{"id": "a", "text": "b"}]))
    assert not text.holds(arena.write(tmp_path / "x.jsonl.gz", gzip.compress(b"?")))
    assert not text.holds(arena.write_parquet(tmp_path / "x.parquet", {"image": [b"?"], "label": [0]}))
