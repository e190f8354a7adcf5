"""`polaformer data DATASET SOURCE`: conversion to the prepared form, and errors before any work."""

import json
import os
import time
from pathlib import Path

import pytest

import arena
from arena import RELEASED
from commands import run
from polaformer.data.sources.lra import opening, prepared


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


@pytest.mark.parametrize("dataset", RELEASED)
def test_a_dataset_is_converted_and_described(dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = RELEASED[dataset](tmp_path / "source"), tmp_path / "new" / "out"
    code, shown, err = run(["data", dataset, source, "--out", out], capsys)
    assert code == 0
    assert f"{dataset}in{out}" in "".join(shown.split())  # the title may wrap
    assert "length, mean" in shown
    assert f"{out}/train.safetensors: 0.0 MB" in shown
    assert "reading source" in err
    wanted = opening.open_sequences(source, dataset)
    assert {name: split.digest() for name, split in prepared.load(out).items()} == {
        name: split.digest() for name, split in wanted.items()
    }
    about = prepared.read_manifest(out)["about"]
    assert about["source"] == str(source)
    assert about["files"] == sum(path.is_file() for path in source.rglob("*"))
    assert about["bytes"] == sum(path.stat().st_size for path in source.rglob("*") if path.is_file())


def test_as_json_nothing_else_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = arena.write_pairs(tmp_path / "source"), tmp_path / "out"
    code, shown, _ = run(["data", "retrieval", source, "--out", out, "--json"], capsys)
    found = json.loads(shown)
    assert (code, found["command"], found["source"], found["out"]) == (0, "data retrieval", str(source), str(out))
    assert found["splits"] == prepared.read_manifest(out)["splits"]
    assert found["splits"]["train"]["statistics"]["documents"] == 5


def test_a_finished_directory_is_left_alone_until_its_source_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = arena.write_tree(tmp_path / "source"), tmp_path / "out"
    command = ["data", "text", source, "--out", out]
    first = run(command, capsys)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    code, shown, err = run(command, capsys)
    assert (code, shown) == (0, first[1])
    assert err == f"{out} is already complete; --overwrite writes it again\n"
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    later = time.time() + 5
    os.utime(source / "test" / "pos" / "09_7.txt", (later, later))
    code, shown, err = run(command, capsys)
    assert (code, shown) == (2, "")
    assert f"{out} holds text, made in another way or from other files" in err
    assert run([*command, "--overwrite"], capsys)[0] == 0
    assert run(command, capsys)[0] == 0


def test_bad_data_give_code_65_one_line_and_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = arena.write_pairs(tmp_path / "source")
    arena.write_lines(source / "mini_pairs.test.tsv", ["1\tP00\tP01", "1\tP00"])
    code, shown, err = run(["data", "retrieval", source, "--out", tmp_path / "out"], capsys)
    assert (code, shown) == (65, "")
    assert err.splitlines()[-1].startswith(f"polaformer data retrieval: {source}/mini_pairs.test.tsv, line 2 has 2 columns")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["text", "gone", "--out", "out"], 2, "there is no file or folder gone; check the path"),
        (["text", "tree"], 2, "--out"),
        (["text", "--out", "out"], 2, "SOURCE"),
        (["text", "tree", "--out", "tree"], 2, "--out tree is inside the source tree; give a directory outside it"),
        (["text", "tree", "--out", "tree/train/out"], 2, "--out tree/train/out is inside the source tree"),
        (["text", "tree", "--out", "full"], 2, "full is not empty: it holds notes.txt; give another directory with --out"),
        (["text", "tree", "--out", "full/notes.txt"], 2, "full/notes.txt is not a directory; give another one with --out"),
        (["text", "tree", "--out", "full/notes.txt/out"], 74, "cannot write to --out full/notes.txt/out: "),
        (["text", "full", "--out", "out"], 65, "full has no reviews; give an aclImdb folder"),
        (["retrieval", "tree", "--out", "out"], 65, "tree holds the dataset 'text', not 'retrieval'"),
        (["image", "pickles", "--out", "out"], 65, "pickles holds the Python form, pickles, which are not read"),
        (["text", "done", "--out", "out"], 2, "done is already prepared; give it to --data directly"),
        (
            ["poems", "tree", "--out", "out"],
            2,
            "'poems'; choose one of: listops, pathfinder, text, retrieval, image",
        ),
    ],
)
def test_mistakes_end_the_command_before_any_work(
    arguments: list[str],
    code: int,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    arena.write_tree(Path("tree"))
    arena.write(Path("full/notes.txt"), b"mine")
    arena.write(Path("pickles/data_batch_1"), b"?")
    prepared.write(opening.open_sequences("tree", "text"), Path("done"), "text", {})
    before = sorted(Path().rglob("*"))
    found, shown, err = run(["data", *arguments], capsys)
    assert (found, shown) == (code, "")
    assert told in " ".join(err.replace("│", " ").split())
    assert "reading" not in err
    assert sorted(Path().rglob("*")) == before
