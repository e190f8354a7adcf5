"""The generator of ListOps: the grammar, and files that depend on the seed alone, also after a kill."""

import json
import subprocess
import sys
from collections import Counter
from math import sqrt
from pathlib import Path
from random import Random

import pytest

from polaformer.data.sources.lra import listops, listops_generator
from polaformer.data.sources.lra.listops_generator import generate
from polaformer.errors import DataError, SettingsError

SIZES = {"train": 500, "val": 60, "test": 40}
FILES = ("basic_train.tsv", "basic_val.tsv", "basic_test.tsv", "manifest.json")


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A folder made without interruption, by one process."""
    folder = tmp_path_factory.mktemp("listops") / "whole"
    generate(folder, SIZES, seed=3)
    return folder


def test_three_draws_of_four_are_digits_and_eight_percent_of_trees_have_the_right_length():
    random = Random(0).random
    number, outcomes = 6000, Counter()
    for _ in range(number):
        texts: list[str] = []
        try:
            listops_generator.draw_tree(random, texts)
            is_right = listops_generator.MIN_LENGTH <= len(texts) <= listops_generator.MAX_LENGTH
            outcomes["digit" if len(texts) == 1 else "right" if is_right else "short or long"] += 1
        except listops_generator._TooLongError:
            outcomes["short or long"] += 1
    for outcome, share in (("digit", 0.75), ("right", 0.081)):
        assert abs(outcomes[outcome] / number - share) < 3 * sqrt(share * (1 - share) / number)


def test_operators_and_numbers_of_arguments_are_uniform():
    openers = Counter()
    for row in listops_generator.chunk(0, 0):
        words = row.decode().split("\t")[0].split()
        parentheses = 0
        for word in words:
            if word.startswith("["):
                openers[word, parentheses - 1] += 1
            parentheses = parentheses + 1 if word == "(" else 0
    operators, arguments = Counter(), Counter()
    for (word, number), times in openers.items():
        operators[word] += times
        arguments[number] += times
    total = sum(operators.values())
    assert set(operators) == set(listops.OPERATORS)
    assert all(abs(times / total - 1 / 4) < 0.02 for times in operators.values())
    assert set(arguments) == set(range(2, 11))


def test_rows_are_written_as_in_the_release(whole):
    for split, size in SIZES.items():
        lines = (whole / f"basic_{split}.tsv").read_text(encoding="ascii").splitlines()
        assert lines[0] == "Source\tTarget"
        assert len(lines) == size + 1
        for line in lines[1:]:
            text, label = line.split("\t")
            assert 500 < sum(word not in ("(", ")") for word in text.split()) < 2000
            assert label in listops.CLASSES
            pairs = 0
            for word in text.split():
                pairs += {"(": 1, ")": -1}.get(word, 0)
                assert pairs > 0 or word == ")"
            assert pairs == 0


def test_no_expression_occurs_twice_in_any_split(whole):
    lines = [line for split in SIZES for line in (whole / f"basic_{split}.tsv").read_text().splitlines()[1:]]
    assert len(set(lines)) == len(lines) == sum(SIZES.values())


def test_duplicates_are_dropped_across_splits_and_chunks(tmp_path, monkeypatch):
    rows = [b"[MAX %d %d ]\t9\n" % divmod(number, 10) for number in range(100)]
    chunks = {0: [rows[0], rows[0], rows[1]], 1: rows[:5], 2: rows[3:100]}
    monkeypatch.setattr(listops_generator, "chunk", lambda seed, number: chunks[number])
    generate(tmp_path / "out", {"train": 4, "val": 1, "test": 2}, seed=0)
    written = {split: (tmp_path / f"out/basic_{split}.tsv").read_bytes().splitlines(keepends=True)[1:] for split in SIZES}
    assert written == {"test": rows[:2], "val": rows[2:3], "train": rows[3:7]}


def test_the_files_do_not_depend_on_the_number_of_workers(whole, tmp_path):
    generate(tmp_path / "out", SIZES, seed=3, num_workers=2)
    assert content(tmp_path / "out") == content(whole)


def test_another_seed_gives_other_rows_and_more_training_rows_the_same_others(whole, tmp_path):
    generate(tmp_path / "more", SIZES | {"train": 520}, seed=3)
    generate(tmp_path / "other", SIZES, seed=4)
    first, more, other = content(whole), content(tmp_path / "more"), content(tmp_path / "other")
    assert first["basic_test.tsv"] == more["basic_test.tsv"] != other["basic_test.tsv"]
    assert first["basic_val.tsv"] == more["basic_val.tsv"]
    assert more["basic_train.tsv"].startswith(first["basic_train.tsv"])


def test_the_manifest_describes_the_files(whole):
    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest["dataset"] == "listops"
    assert manifest["about"] == {"generator": "listops 1", "seed": 3, **SIZES}
    for split, size in SIZES.items():
        about = manifest["splits"][split]
        assert about["samples"] == about["statistics"]["samples"] == size
        assert about["bytes"] == (whole / about["file"]).stat().st_size
    assert sorted(path.name for path in whole.iterdir()) == [".lock", *sorted(FILES)]


KILLED = """
import os, signal
from pathlib import Path
from polaformer.data.sources.lra import generation, listops_generator

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

calls = 0
save = generation.Target.save
def counted(self, progress):
    global calls
    calls += 1
    if {point!r} == "before a save" and calls == 3:
        kill()
    save(self, progress)
    if {point!r} == "after a save" and calls == 3:
        kill()
generation.Target.save = counted

replace, renamed = os.replace, 0
def rename(source, target):
    global renamed
    replace(source, target)
    renamed += Path(target).suffix == ".tsv"
    if {point!r} == "between two renames" and renamed == 2:
        kill()
os.replace = rename

def stage(name):
    if {point!r} == "before the manifest" and name == "checking":
        kill()
    return lambda done, total: None

if __name__ == "__main__":
    listops_generator.generate(Path({out!r}), {sizes!r}, 3, num_workers={workers}, stage=stage)
"""
POINTS = ["before a save", "after a save", "between two renames", "before the manifest"]


@pytest.mark.parametrize("point", POINTS)
def test_resume_after_a_kill_gives_the_same_bytes(point, whole, tmp_path):
    out, script = tmp_path / "out", tmp_path / "killed.py"
    script.write_text(KILLED.format(point=point, out=str(out), sizes=SIZES, workers=2 if point == "after a save" else 1))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -9, done.stderr
    assert not (out / "manifest.json").exists()
    drawn = []
    generate(out, SIZES, seed=3, stage=lambda name: lambda done, total: drawn.append((name, done)))
    assert content(out) == content(whole)
    assert sorted(path.name for path in out.iterdir()) == [".lock", *sorted(FILES)]
    assert drawn[0] == ("generating", {"before a save": 200, "after a save": 400}.get(point, 600))


def test_a_half_written_row_is_cut_off(whole, tmp_path):
    out, script = tmp_path / "out", tmp_path / "killed.py"
    script.write_text(KILLED.format(point="after a save", out=str(out), sizes=SIZES, workers=1))
    subprocess.run([sys.executable, script], capture_output=True, timeout=120, check=False)
    with open(out / "basic_train.tsv.partial", "ab") as file:
        file.write(b"( ( [MA")
    generate(out, SIZES, seed=3)
    assert content(out) == content(whole)


def test_a_finished_folder_is_left_alone_and_other_options_are_refused(whole, monkeypatch):
    before = content(whole)
    monkeypatch.setattr(listops_generator, "chunk", None)
    assert generate(whole, SIZES, seed=3) == json.loads(before["manifest.json"])
    with pytest.raises(SettingsError, match=r"has other data \(seed 3, train 500\); give the same options to resume"):
        generate(whole, SIZES | {"train": 501}, seed=4)
    assert content(whole) == before


def test_overwrite_replaces_generated_data_and_nothing_else(whole, tmp_path):
    small = {"train": 3, "val": 2, "test": 1}
    generate(tmp_path / "out", small, seed=9)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    generate(tmp_path / "out", SIZES, seed=3, overwrite=True)
    assert content(tmp_path / "out") == content(whole)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(SettingsError, match="is not empty, and was not generated; give another directory"):
        generate(tmp_path / "full", small, seed=9, overwrite=True)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"about": 3}', '{"about": {}, "format": "other"}'])
def test_a_damaged_manifest_is_refused(text, tmp_path):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json is damaged: .*; give another directory"):
        generate(tmp_path, SIZES, seed=3)
