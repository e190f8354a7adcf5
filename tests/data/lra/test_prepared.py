"""The prepared form: it comes back as it was written, and nothing in a damaged or hostile one is believed."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import arena
from arena import RELEASED, from_documents
from pictures import refused
from polaformer.data.sources.lra import prepared, retrieval
from polaformer.data.sources.lra.opening import find_dataset
from polaformer.data.sources.lra.sequences import SequenceSplit
from polaformer.errors import SettingsError

ABOUT = {"source": "/data/aan", "files": 4}


@pytest.fixture
def splits(tmp_path: Path) -> dict[str, SequenceSplit]:
    return retrieval.load(arena.write_pairs(tmp_path / "aan"))


@pytest.fixture
def out(splits: dict[str, SequenceSplit], tmp_path: Path) -> Path:
    prepared.write(splits, tmp_path / "out", "retrieval", ABOUT, statistics=retrieval.statistics)
    return tmp_path / "out"


def same(one: SequenceSplit, two: SequenceSplit) -> bool:
    names = ("symbols", "offsets", "documents", "labels")
    arrays = [(getattr(one, name), getattr(two, name)) for name in names]
    return one.classes == two.classes and all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in arrays)


@pytest.mark.parametrize("dataset", RELEASED)
def test_every_dataset_comes_back_as_it_was(dataset: str, tmp_path: Path) -> None:
    found = find_dataset(dataset).load(RELEASED[dataset](tmp_path / "source"))
    prepared.write(found, tmp_path / "out", dataset, ABOUT)
    again = prepared.load(tmp_path / "out")
    assert list(again) == list(found)
    for name, split in found.items():
        assert same(split, again[name])
        assert split.digest() == again[name].digest()
    assert again["train"].name(1) == f"{tmp_path}/out/train.safetensors, sample 1"


def test_the_manifest_says_what_is_there_and_how_it_was_made(splits: dict[str, SequenceSplit], out: Path) -> None:
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["format"], manifest["dataset"], manifest["about"]) == ("polaformer-sequences-1", "retrieval", ABOUT)
    assert manifest["classes"] == ["unrelated", "linked"]
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", *sorted(f"{name}.safetensors" for name in splits)]
    for name, split in splits.items():
        about, content = manifest["splits"][name], (out / f"{name}.safetensors").read_bytes()
        assert (about["samples"], about["file"]) == (len(split), f"{name}.safetensors")
        assert (about["bytes"], about["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
        assert about["statistics"] == retrieval.statistics(split)
    assert prepared.read_manifest(out) == manifest


def test_documents_that_no_sample_uses_are_left_out(splits: dict[str, SequenceSplit], tmp_path: Path) -> None:
    chosen = splits["train"].subset([3, 1])
    prepared.write({"train": chosen}, tmp_path / "few", "retrieval", {})
    found = prepared.load(tmp_path / "few")["train"]
    assert arena.documents(found) == arena.documents(chosen)
    assert found.documents.tolist() == [[0, 1], [2, 3]]
    assert len(found.symbols) == sum(len(one) for pair in arena.documents(chosen) for one in pair)


def test_empty_documents_come_back(tmp_path: Path) -> None:
    given = from_documents([b"", b"", b""], [0, 1, 0], ("a", "b"), "x")
    prepared.write({"val": given}, tmp_path, "text", {})
    assert same(prepared.load(tmp_path)["val"], given)


# Writing again


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_a_finished_directory_of_the_same_origin_is_left_alone(splits: dict[str, SequenceSplit], out: Path) -> None:
    before = state(out)
    assert prepared.write(splits, out, "retrieval", dict(ABOUT)) == json.loads(before["manifest.json"][0])
    assert state(out) == before


@pytest.mark.parametrize("kind", ["about", "dataset"])
def test_a_finished_directory_of_another_origin_is_refused_unless_it_is_to_be_replaced(
    kind: str, splits: dict[str, SequenceSplit], out: Path
) -> None:
    dataset, about = ("text", ABOUT) if kind == "dataset" else ("retrieval", {"source": "/other"})
    before = state(out)
    with pytest.raises(SettingsError, match=r"holds retrieval, made in another way or from other files; give another"):
        prepared.write(splits, out, dataset, about)
    assert state(out) == before
    prepared.write({"train": splits["train"]}, out, dataset, about, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "train.safetensors"]
    assert prepared.read_manifest(out)["about"] == about


def test_a_directory_of_other_files_is_never_written_to(splits: dict[str, SequenceSplit], tmp_path: Path) -> None:
    for name in ("notes.txt", "train.safetensors", "manifest.json"):
        folder = tmp_path / name.split(".")[0]
        arena.write(folder / name, b"mine")
        for overwrite in (False, True):
            with pytest.raises(SettingsError, match=rf"is not empty: it holds {name}; give another directory with --out"):
                prepared.write(splits, folder, "retrieval", ABOUT, overwrite=overwrite)
        assert [path.read_bytes() for path in folder.iterdir()] == [b"mine"]
    with pytest.raises(SettingsError, match=r"notes.txt is not a directory; give another one with --out"):
        prepared.write(splits, tmp_path / "notes" / "notes.txt", "retrieval", ABOUT)


def test_a_directory_that_lost_a_file_is_written_again(splits: dict[str, SequenceSplit], out: Path) -> None:
    (out / "val.safetensors").unlink()
    prepared.write(splits, out, "retrieval", ABOUT)
    assert same(prepared.load(out)["val"], splits["val"])


def test_what_a_kill_left_behind_does_not_stop_the_next_attempt(splits: dict[str, SequenceSplit], tmp_path: Path) -> None:
    arena.write(tmp_path / "out" / ".train.safetensors.tmp", b"half")
    os.mkfifo(tmp_path / "out" / ".val.safetensors.tmp")
    (tmp_path / "out" / ".manifest.json.tmp").symlink_to(tmp_path / "elsewhere")
    prepared.write(splits, tmp_path / "out", "retrieval", ABOUT)
    assert same(prepared.load(tmp_path / "out")["train"], splits["train"])
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_a_directory_has_a_manifest_only_when_it_is_complete(
    failing: int, splits: dict[str, SequenceSplit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at each rename: no manifest, and the next attempt succeeds."""
    calls, replace = [], os.replace

    def stop(*paths: Any) -> None:
        calls.append(paths)
        if len(calls) == failing:
            raise KeyboardInterrupt
        replace(*paths)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        prepared.write(splits, tmp_path / "out", "retrieval", ABOUT)
    monkeypatch.undo()
    assert not prepared.holds(tmp_path / "out")
    prepared.write(splits, tmp_path / "out", "retrieval", ABOUT)
    assert same(prepared.load(tmp_path / "out")["test"], splits["test"])


# Damage


def change(**keys: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest.update(keys)


def change_split(**keys: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["splits"]["val"].update(keys)


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no dataset": (lambda one: one.pop("dataset"), "dataset is missing or not of type str"),
    "a number as dataset": (change(dataset=5), "dataset is missing or not of type str"),
    "no classes": (change(classes=[]), "classes are not two or more different names"),
    "one class twice": (change(classes=["a", "a"]), "classes are not two or more different names"),
    "numbers as classes": (change(classes=[1, 2]), "classes are not two or more different names"),
    "no splits": (change(splits={}), "its splits are none, not some of train, val, test"),
    "another split": (
        lambda one: one["splits"].update(dev={}),
        "its splits are train, val, test, dev, not some of train, val, test",
    ),
    "a split that is a list": (lambda one: one["splits"].update(val=[]), "its entry for val is not an object"),
    "a file elsewhere": (change_split(file="../val.safetensors"), "val: file is '../val.safetensors', not 'val.safetensors'"),
    "a file of another split": (
        change_split(file="train.safetensors"),
        "val: file is 'train.safetensors', not 'val.safetensors'",
    ),
    "true samples": (change_split(samples=True), "val: samples is missing or not of type int"),
    "no samples": (change_split(samples=0), "val: samples is 0, not an integer ≥ 1"),
    "a fraction of bytes": (change_split(bytes=1.5), "val: bytes is missing or not of type int"),
    "no statistics": (change_split(statistics=None), "val: statistics is missing or not of type dict"),
    "no about": (change(about="x"), "about is missing or not of type dict"),
    "another version": (change(format="polaformer-sequences-12"), "its format is not 'polaformer-sequences-1'"),
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_wrong_manifest_is_one_error(kind: str, out: Path) -> None:
    edit, told = MANIFESTS[kind]
    manifest = json.loads((out / "manifest.json").read_text())
    edit(manifest)
    (out / "manifest.json").write_text(json.dumps(manifest))
    with refused(f"{out}/manifest.json is not a manifest of sequences: {told}; write it again with `polaformer data`"):
        prepared.load(out)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": "other"}'])
def test_a_file_that_is_no_manifest_is_one_error(content: bytes, out: Path) -> None:
    (out / "manifest.json").write_bytes(content)
    with refused(f"{out}/manifest.json is not a manifest of sequences: "):
        prepared.load(out)
    assert not prepared.holds(out)


def test_a_damaged_manifest_is_replaced_only_if_asked_for(splits: dict[str, SequenceSplit], out: Path) -> None:
    (out / "manifest.json").write_text('{"format": "polaformer-sequences-1", ')
    assert prepared.holds(out)
    with refused("is not a manifest of sequences: ", "write it again with `polaformer data` and --overwrite"):
        prepared.write(splits, out, "retrieval", ABOUT)
    prepared.write(splits, out, "retrieval", ABOUT, overwrite=True)
    assert same(prepared.load(out)["train"], splits["train"])


def rewrite(out: Path, edit: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Change the tensors of val and let the manifest agree with them."""
    path = out / "val.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: np.ascontiguousarray(one) for name, one in tensors.items()}, path)
    manifest = json.loads((out / "manifest.json").read_text())
    content = path.read_bytes()
    manifest["splits"]["val"].update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (out / "manifest.json").write_text(json.dumps(manifest))


def put(name: str, value: Any) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda tensors: tensors.__setitem__(name, value if isinstance(value, np.ndarray) else np.array(value))


TENSORS: dict[str, tuple[Callable[[dict[str, np.ndarray]], object], str]] = {
    "a missing tensor": (lambda one: one.pop("labels"), "it holds documents, offsets, symbols, not symbols, offsets"),
    "another tensor": (put("more", [1]), "it holds documents, labels, more, offsets, symbols, not"),
    "labels of another type": (put("labels", np.array([1.0])), "labels is float64 with 1 dimensions"),
    "symbols of another type": (put("symbols", np.zeros(4, np.int8)), "symbols is int8 with 1 dimensions"),
    "documents of one dimension": (put("documents", [0]), "documents is int64 with 1 dimensions"),
    "more labels": (put("labels", [0, 1]), "labels have shape (2,) and documents (1, 2), for 1 samples"),
    "more documents": (put("documents", [[0, 1], [0, 1]]), "labels have shape (1,) and documents (2, 2), for 1 samples"),
    "samples of no documents": (put("documents", np.zeros((1, 0), np.int64)), "labels have shape (1,) and documents (1, 0)"),
    "a label without a class": (put("labels", [2]), "a label is not a number from 0 to 1"),
    "a negative label": (put("labels", [-1]), "a label is not a number from 0 to 1"),
    "a document that is not there": (put("documents", [[0, 2]]), "a sample has a document that is not one of the 2"),
    "a negative document": (put("documents", [[-1, 0]]), "a sample has a document that is not one of the 2"),
    "no offsets": (put("offsets", np.zeros(0, np.int64)), "offsets do not rise from 0 to"),
    "offsets that fall": (put("offsets", [0, 50, 10]), "offsets do not rise from 0 to"),
    "offsets that begin later": (lambda one: one["offsets"].__setitem__(0, 1), "offsets do not rise from 0 to"),
    "offsets beyond the end": (lambda one: one["offsets"].__setitem__(2, 2**62), "offsets do not rise from 0 to"),
    "offsets that wrap around": (lambda one: one["offsets"].__setitem__(1, -(2**63)), "offsets do not rise from 0 to"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_numbers_that_refer_to_nothing_are_one_error(kind: str, out: Path) -> None:
    edit, told = TENSORS[kind]
    rewrite(out, edit)
    with refused(f"{out}/val.safetensors is damaged: {told}"):
        prepared.load(out)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (flip, "sha256 should be "),
    "cut": (lambda path: os.truncate(path, 100), "but has 100"),
    "longer": (lambda path: os.truncate(path, 2**40), "but has 1,099,511,627,776"),
    "missing": (lambda path: path.unlink(), "No such file or directory"),
    "a FIFO": (fifo, "it is not a regular file"),
    "a folder": (folder, "it is not a regular file"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_one_error(kind: str, out: Path) -> None:
    damage, told = FILES[kind]
    damage(out / "val.safetensors")
    with refused(f"{out}/val.safetensors is damaged: ", told):
        prepared.load(out)


@pytest.mark.parametrize("content", [b"", b"?", bytes(100), b"\x00\x00\x00\x00\x00\x00\x00\x40" + b"{}" * 40])
def test_a_file_that_is_no_safetensors_is_one_error(content: bytes, out: Path) -> None:
    """Though the manifest agrees with it."""
    (out / "val.safetensors").write_bytes(content)
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["splits"]["val"].update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (out / "manifest.json").write_text(json.dumps(manifest))
    with refused(f"{out}/val.safetensors is damaged: "):
        prepared.load(out)


def test_a_sparse_file_is_one_error_before_it_is_read(out: Path) -> None:
    os.truncate(out / "val.safetensors", 2**40)
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["splits"]["val"].update(bytes=2**40)
    (out / "manifest.json").write_text(json.dumps(manifest))
    with refused("val.safetensors is damaged: it has 1,099,511,627,776 bytes, more than the 268,435,456 allowed"):
        prepared.load(out)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("obstruct", [fifo, folder])
def test_what_stands_in_place_of_the_manifest_is_one_error(obstruct: Callable[[Path], None], out: Path) -> None:
    obstruct(out / "manifest.json")
    assert not prepared.holds(out)
    with refused(f"{out}/manifest.json is not a manifest of sequences: it is not a regular file"):
        prepared.load(out)
