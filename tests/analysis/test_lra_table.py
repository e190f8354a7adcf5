"""Finished runs of the Long Range Arena as cells of the table: which belong together, beside which row, with which notes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands import run
from polaformer.analysis.lra_table import TableCell, collect, find_runs, nearest_row
from polaformer.recipes.lra import build_recipe
from polaformer.tasks.recipe import as_values


def write_run(folder: Path, row: str, accuracy: float, digests: dict[str, str] | None = None, **changes: Any) -> None:
    """Writes the files of a finished run that its cell is made from."""
    recipe = replace(build_recipe("text", row), data="imdb", **changes)
    folder.mkdir(parents=True)
    names = digests or {"train": "1" * 64, "val": "2" * 64, "test": "3" * 64}
    config = {"version": 1, "recipe": recipe.name, "task": recipe.task, "options": as_values(recipe), "data": {"names": names}}
    (folder / "config.json").write_text(json.dumps(config))
    record = {"step": recipe.steps, "epoch": recipe.steps / 700, "accuracy": accuracy, "wall": {"seconds": 1.0}}
    splits = [{"kind": "final", "split": split} for split in ("val", "test") if split in names]
    lines = [json.dumps(record | kind) + "\n" for kind in ({"kind": "eval"}, *splits)]
    (folder / "journal.jsonl").write_text("".join(lines))
    (folder / "model.safetensors").touch()


def cells_in(folder: Path) -> list[TableCell]:
    return collect(find_runs([folder]))


def test_runs_with_other_numbers_of_steps_have_their_own_lines(tmp_path, capsys):
    for steps, accuracy in ((5000, 61.0), (50_000, 62.0), (10_000, 63.0)):
        write_run(tmp_path / str(steps), "linear", accuracy, steps=steps)
    assert [(one.steps, one.mean) for one in cells_in(tmp_path)] == [(5000, 61.0), (10_000, 63.0), (50_000, 62.0)]
    code, out, _ = run(["table", "lra", "--runs", tmp_path, "--tasks", "text", "--rows", "linear"], capsys)
    assert code == 0
    lines = [line.split("│")[2:4] for line in out.splitlines() if "linear" in line]
    assert [(paper.strip(), ours.split(" (")[0].strip()) for paper, ours in lines] == [
        ("65.90 L", "61.00"),
        ("65.90 L", "63.00"),
        ("65.90 L", "62.00"),
    ]


def test_other_options_are_a_note_beside_the_papers_number(tmp_path, capsys):
    write_run(tmp_path / "a", "softmax", 66.0, attention_options=("dropout=0",))
    write_run(tmp_path / "b", "pola-a3", 63.0, attention_options=("alpha=3", "conv=None"))
    write_run(tmp_path / "c", "softmax", 70.0, attention_options=("gate=linear", "conv=depthwise"))
    found = {(one.row, one.setup): one.as_record()["paper"] for one in cells_in(tmp_path)}
    assert found == {
        ("softmax", "attention_options dropout=0"): 61.55,
        ("softmax", "attention_options conv=depthwise gate=linear without dropout=0.1"): 61.55,
        ("pola-a3", "attention_options conv=None"): 73.06,
    }
    code, out, _ = run(["table", "lra", "--runs", tmp_path, "--tasks", "text", "--rows", "pola-a3"], capsys)
    assert code == 0
    assert "63.00" in next(line for line in out.splitlines() if "pola-a3 [1] │ 73.06 P │" in " ".join(line.split()))
    assert "[1] attention_options conv=None\n" in out
    assert "softmax" not in out


def test_order_and_spelling_of_options_do_not_matter(tmp_path):
    spellings = [("alpha=3", "conv=None", "gate_init=ones"), ("gate_init=ones", "conv=none", "alpha=3.0")]
    for seed, options in enumerate(spellings):
        write_run(tmp_path / str(seed), "pola-a3", 63.0, attention_options=options, seed=seed)
    [cell] = cells_in(tmp_path)
    assert (cell.row, cell.setup, cell.seeds) == ("pola-a3", "attention_options conv=None gate_init=ones", (0, 1))


@pytest.mark.parametrize(
    ("attention", "options", "row"),
    [
        ("pola", {"alpha": 5.0, "conv": None}, "pola-a5"),
        ("pola", {"alpha": 4}, None),  # of several rows, none has anything in common
        ("pola", {}, None),
        ("softmax", {}, "softmax"),
        ("linear", {"conv": "depthwise"}, "linear"),
        ("another", {}, None),
    ],
)
def test_a_run_belongs_to_the_row_with_the_most_options_in_common(attention, options, row):
    assert nearest_row(attention, options) == row


def test_a_run_without_a_row_is_called_by_its_options(tmp_path):
    write_run(tmp_path / "a", "pola-a3", 60.0, attention_options=("conv=None", "alpha=4.0"))
    [cell] = cells_in(tmp_path)
    assert (cell.row, cell.setup, cell.as_record()["paper"]) == ("pola alpha=4 conv=None", "", None)


def test_runs_are_tested_on_other_data_only_if_their_test_splits_differ(tmp_path):
    same = {"train": "1" * 64, "val": "2" * 64, "test": "3" * 64}
    write_run(tmp_path / "a", "linear", 61.0, same)
    write_run(tmp_path / "b", "linear", 63.0, same | {"train": "4" * 64, "val": "5" * 64}, seed=1)
    [cell] = cells_in(tmp_path)
    assert (cell.setup, cell.seeds) == ("", (0, 1))
    write_run(tmp_path / "c", "linear", 65.0, same | {"test": "6" * 64})
    assert [one.setup for one in cells_in(tmp_path)] == ["data 33333333", "data 66666666"]


def test_without_a_test_split_the_validation_splits_are_compared(tmp_path):
    for name, digit in (("a", "2"), ("b", "5")):
        write_run(tmp_path / name, "linear", 61.0, {"train": "1" * 64, "val": digit * 64})
    assert [one.setup for one in cells_in(tmp_path)] == ["data 22222222", "data 55555555"]


def test_documents_that_are_read_otherwise_are_not_other_data(tmp_path):
    """Documents are sorted by the length that is read, and the digest depends on their order."""
    for name, digit, changes in (("a", "2", {}), ("b", "5", {"kept": 1000})):
        write_run(tmp_path / name, "linear", 61.0, {"val": "1" * 64, "test": digit * 64}, **changes)
    assert [one.setup for one in cells_in(tmp_path)] == ["", "kept 1000"]
