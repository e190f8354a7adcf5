"""The audit of sequences finds every planted problem, and none in clean data."""

from pathlib import Path

import pytest

import arena
from arena import from_documents
from polaformer.data.audit import AuditReport
from polaformer.data.sources.lra import pathfinder, retrieval, text
from polaformer.data.sources.lra.audit import audit
from polaformer.data.sources.lra.sequences import SequenceSplit

CLASSES = ("bad", "good")


def split(*samples: tuple[bytes, int], name: str = "x") -> SequenceSplit:
    documents, labels = [text for text, _ in samples], [label for _, label in samples]
    return from_documents(documents, labels, CLASSES, name)


def found(report: AuditReport) -> list[tuple[str, ...]]:
    return [tuple(problem) for problem in report.problems]


def test_nothing_is_found_in_clean_data_and_its_facts_are_right() -> None:
    counted: list[int] = []
    report = audit(
        {"train": split((b"a", 0), (b"bcd", 1), (b"ef", 1)), "test": split((b"g", 0))}, advance=lambda: counted.append(1)
    )
    assert report.problems == []
    facts = {"samples": 3, "classes": 2, "smallest_class": "bad: 1", "largest_class": "good: 2", "documents": 3, "empty": 0}
    assert report.parts["train"] == facts | {"shortest": 1, "median": 2, "longest": 3}
    assert report.parts["test"]["largest_class"] == "bad: 1"
    assert len(counted) == len(set(report.digests.values())) == 4
    assert list(report.digests)[-1] == "test/sample 0"


def test_the_same_text_in_two_splits_or_under_two_labels_is_found() -> None:
    train = split((b"a", 0), (b"b", 1), (b"b", 1), (b"a", 1), name="one")
    test = split((b"c", 0), (b"b", 1), (b"a", 1), name="two")
    assert found(audit({"train": train, "test": test})) == [
        ("train", "one, sample 3", "same content as train, one, sample 0, but labelled 'good', not 'bad'"),
        ("test", "two, sample 1", "same content as train, one, sample 1: it is in both splits"),
        ("test", "two, sample 2", "same content as train, one, sample 0, but labelled 'good', not 'bad'"),
    ]


def test_empty_documents_are_found_once_each() -> None:
    assert found(audit({"train": split((b"", 0), (b"", 1), (b"a", 0)), "val": split((b"", 0))})) == [
        ("train", "x, sample 0", "it is empty"),
        ("train", "x, sample 1", "it is empty"),
        ("val", "x, sample 0", "it is empty"),
    ]


def test_pairs_are_compared_in_either_order(tmp_path: Path) -> None:
    rows = {
        "train": ["1.0\tA\tB\tx\ty", "0.0\tA\tC\tx\t", "0.0\tA\tA\tx\tx"],
        "eval": ["1.0\tB\tA\ty\tx"],
        "test": ["0.0\tA\tD\tx\ty", "1.0\tA\tE\tx\tz"],
    }
    for name, lines in rows.items():
        arena.write_lines(tmp_path / f"new_aan_pairs.{name}.tsv", lines)
    report = audit(retrieval.load(tmp_path))
    first = f"train, {tmp_path}/new_aan_pairs.train.tsv, line 1"
    assert found(report) == [
        ("train", f"{tmp_path}/new_aan_pairs.train.tsv, line 2", "its second document is empty"),
        ("val", f"{tmp_path}/new_aan_pairs.eval.tsv, line 1", f"same content as {first}: it is in both splits"),
        (
            "test",
            f"{tmp_path}/new_aan_pairs.test.tsv, line 1",
            f"same content as {first}, but labelled 'unrelated', not 'linked'",
        ),
    ]
    assert report.parts["train"]["documents"] == 3
    assert report.digests["train/sample 0"] != report.digests["val/sample 0"]


def test_changed_missing_and_new_samples_are_found_against_a_manifest() -> None:
    known = audit({"train": split((b"a", 0), (b"b", 1), (b"c", 1))}).digests
    assert audit({"train": split((b"a", 0), (b"b", 1), (b"c", 1))}, known).problems == []
    report = audit({"train": split((b"a", 0), (b"B", 1)), "test": split((b"d", 0))}, known)
    assert [(problem[0], problem[1]) for problem in report.problems] == [
        ("test", "sample 0"),
        ("train", "sample 1"),
        ("train", "sample 2"),
    ]
    assert report.problems[0].text == "it is in the data but not in the manifest"
    assert report.problems[1].text.startswith(f"it has changed: sha256 should be {known['train/sample 1']}")
    assert report.problems[2].text == "it is in the manifest but not in the data"


def test_an_empty_image_is_a_problem_and_changes_no_other_digest(tmp_path: Path) -> None:
    arena.write_level(tmp_path, {"0": 20})
    whole = pathfinder.load(tmp_path)
    before, name = audit(whole), whole["train"].name(3)
    assert before.problems == []
    Path(name).write_bytes(b"")
    report = audit(pathfinder.load(tmp_path), before.digests)
    assert found(report) == [
        ("train", name, "it is empty and left out"),
        ("train", "sample 3", "it is in the manifest but not in the data"),
    ]
    facts = {split: (one["samples"], one["empty"]) for split, one in report.parts.items()}
    assert facts == {"train": (15, 1), "val": (2, 0), "test": (2, 0)}


def test_digests_do_not_depend_on_the_form_of_the_data(tmp_path: Path) -> None:
    one, two = arena.write_pairs(tmp_path / "a"), arena.write_release(tmp_path / "b")
    assert audit(retrieval.load(one)).digests == audit(retrieval.load(two)).digests


@pytest.mark.long
def test_imdb_has_the_duplicates_that_are_known() -> None:
    report = audit(text.load(arena.shared("imdb")))
    across = {report.digests[f"test/sample {n}"] for n in range(25_000)} & {
        report.digests[f"train/sample {n}"] for n in range(25_000)
    }
    assert (len(set(report.digests.values())), len(across)) == (49_582, 123)
