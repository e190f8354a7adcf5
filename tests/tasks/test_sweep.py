"""Sweeps without training: their files, the states of their runs, their statistics."""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polaformer.cli.sweep_view import Pace
from polaformer.errors import DataError, SettingsError
from polaformer.recipes.registry import find
from polaformer.tasks.recipe import as_values
from polaformer.tasks.sweep import Cell, SweepRun, plan_runs, read_cells
from polaformer.tasks.sweep_results import SweepResults
from polaformer.tasks.sweep_state import RunState, read_state, read_states

RECIPE = find("digits/pola-vit-tiny")
DIGITS = Path(__file__).resolve().parents[2] / "docs" / "sweeps" / "digits.toml"
CELL = '[[cell]]\nname = "a"\nrecipe = "digits/pola-vit-tiny"\n'
WITH_SEEDS = f"seeds = [0]\n{CELL}"


def cells_of(path: Path, text: str) -> list[Cell]:
    path.write_text(text, encoding="utf-8")
    return read_cells([path], find)


def test_the_parts_of_a_sweep_load_without_pytorch() -> None:
    modules = "polaformer.tasks.sweep_results, polaformer.tasks.sweep_state, polaformer.cli.sweep_training"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_documented_sweep_has_two_cells_with_two_seeds() -> None:
    cells = read_cells([DIGITS], find)
    assert [(cell.name, cell.recipe.attention, cell.seeds) for cell in cells] == [  # type: ignore[attr-defined]
        ("pola", None, (0, 1)),
        ("softmax", "softmax", (0, 1)),
    ]


def test_a_cells_options_and_seeds_win_over_those_of_its_file(tmp_path: Path) -> None:
    text = f"seeds = [3]\n[options]\nepochs = 7\nlr = 1\n{CELL}seeds = [5, 4]\noptions = {{ epochs = 9, dims = [8] }}\n"
    [cell] = cells_of(tmp_path / "one.toml", text)
    assert cell == Cell("a", replace(RECIPE, epochs=9, lr=1.0, dims=(8,)), (5, 4))
    runs = plan_runs([cell], tmp_path / "out")
    assert [(run.seed, run.recipe.seed, run.folder) for run in runs] == [
        (5, 5, tmp_path / "out" / "a" / "5"),
        (4, 4, tmp_path / "out" / "a" / "4"),
    ]
    assert runs[0].log == tmp_path / "out" / "a" / "5.log"


def test_the_text_none_is_none_where_an_option_may_be_none(tmp_path: Path) -> None:
    [cell] = cells_of(tmp_path / "one.toml", f'{WITH_SEEDS}options = {{ clip_norm = "None", depths = "None" }}\n')
    assert cell.recipe == replace(RECIPE, clip_norm=None, depths=None)
    with pytest.raises(SettingsError, match='lr is "None"; give a number'):
        cells_of(tmp_path / "one.toml", f'{WITH_SEEDS}options = {{ lr = "None" }}\n')


def test_several_files_are_one_sweep_and_each_has_its_own_seeds(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(WITH_SEEDS)
    (tmp_path / "two.toml").write_text(WITH_SEEDS.replace('"a"', '"b"').replace("[0]", "[1, 2]"))
    cells = read_cells([tmp_path / "one.toml", tmp_path / "two.toml"], find)
    assert [(cell.name, cell.seeds) for cell in cells] == [("a", (0,)), ("b", (1, 2))]
    with pytest.raises(SettingsError, match=r"one.toml, cell 'a': .*one.toml, cell 'a' already has that name"):
        read_cells([tmp_path / "one.toml", tmp_path / "one.toml"], find)


BAD = {
    "empty": ("", "bad.toml: there is no cell; begin one with [[cell]]"),
    "only seeds": ("seeds = [0]", "there is no cell"),
    "unknown key": (f"sedes = [0]\n{WITH_SEEDS}", "unknown key 'sedes'; did you mean 'seeds'?"),
    "unknown key of a cell": (f"{WITH_SEEDS}recipes = 1\n", "cell 'a': unknown key 'recipes'; did you mean 'recipe'?"),
    "cell that is no list": (
        'seeds = [0]\n[cell]\nname = "a"\n',
        "cell is not an array of tables; begin each cell with [[cell]]",
    ),
    "cells of numbers": ("seeds = [0]\ncell = [1]\n", "cell is not an array of tables"),
    "no name": (
        'seeds = [0]\n[[cell]]\nrecipe = "digits/pola-vit-tiny"\n',
        "cell 1 has no name; give a valid directory name",
    ),
    "name that is a number": (WITH_SEEDS.replace('"a"', "3"), "cell 1 is called 3; give a valid directory name"),
    "name with a slash": (WITH_SEEDS.replace('"a"', '"../a"'), "is called '../a'; give a valid directory name"),
    "hidden name": (WITH_SEEDS.replace('"a"', '".a"'), "is called '.a'"),
    "empty name": (WITH_SEEDS.replace('"a"', '""'), "is called ''"),
    "name with a line end": (WITH_SEEDS.replace('"a"', '"a\\n"'), "give a valid directory name"),
    "name with an escape": (WITH_SEEDS.replace('"a"', '"\\u001b[31m"'), "give a valid directory name"),
    "name of a result": (WITH_SEEDS.replace('"a"', '"Results.json"'), "give a valid directory name"),
    "same name": (WITH_SEEDS + CELL, "cell 'a' already has that name; give each cell its own"),
    "same name in capitals": (WITH_SEEDS + CELL.replace('"a"', '"A"'), "cell 'a' already has that name"),
    "no recipe": ('seeds = [0]\n[[cell]]\nname = "a"\n', "there is no recipe; name one, such as"),
    "recipe that is a list": ('seeds = [0]\n[[cell]]\nname = "a"\nrecipe = []\n', "recipe is []; name one"),
    "unknown recipe": (WITH_SEEDS.replace("pola-vit", "pola-vti"), "did you mean 'digits/pola-vit-tiny'?"),
    "no seeds": (CELL, "neither the cell nor its file has seeds; give a list"),
    "empty seeds": (f"seeds = []\n{CELL}", "seeds is []; give a list of distinct integers from 0"),
    "one seed": (f"seeds = 3\n{CELL}", "seeds is 3; give a list"),
    "seed that is a text": (f'seeds = ["0"]\n{CELL}', "seeds is ['0']; give a list"),
    "seed that is true": (f"seeds = [true]\n{CELL}", "seeds is [True]; give a list"),
    "negative seed": (f"seeds = [-1]\n{CELL}", "seeds is [-1]; give a list"),
    "huge seed": (f"seeds = [{2**63}]\n{CELL}", "give a list of distinct integers from 0 to 9223372036854775807"),
    "seed twice": (f"seeds = [1, 1]\n{CELL}", "seeds is [1, 1], with a duplicate"),
    "seed among the options": (f"{WITH_SEEDS}options = {{ seed = 1 }}\n", "seed is among the options; give seeds ="),
    "seeds below the options": (f"seeds = [0]\n[options]\nseeds = [1]\n{CELL}", "seeds is among the options"),
    "options that are a number": (f"{WITH_SEEDS}options = 1\n", "options is 1; give a table of recipe options"),
    "unknown option": (f"{WITH_SEEDS}options = {{ epoch = 1 }}\n", "there is no field 'epoch'; did you mean 'epochs'?"),
    "option of a wrong kind": (f'{WITH_SEEDS}options = {{ epochs = "5" }}\n', "cell 'a': epochs is \"5\"; give an integer"),
    "option that is a date": (f"{WITH_SEEDS}options = {{ lr = 2026-01-01 }}\n", "lr is"),
    "option that is not a number": (f"{WITH_SEEDS}options = {{ lr = nan }}\n", "lr is nan; give a number > 0"),
    "option that is a table": (f"{WITH_SEEDS}options = {{ lr = {{ a = 1 }} }}\n", "give a number"),
    "value that is not allowed": (
        f"{WITH_SEEDS}options = {{ epochs = 0 }}\n",
        "epochs is 0; give an integer ≥ 1",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_sweep_is_one_clear_error(name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    with pytest.raises(SettingsError) as caught:
        cells_of(tmp_path / "bad.toml", text)
    [problem] = caught.value.problems
    assert message in problem
    assert str(tmp_path / "bad.toml") in problem


UNREADABLE = {
    "no TOML": (b"seeds = [0]\nname = = 1\n", "is not valid TOML: Invalid value (at line 2, column 8)"),
    "a key twice": (b"seeds = [0]\nseeds = [1]\n", "is not valid TOML: Cannot overwrite a value (at line 2"),
    "no UTF-8": (b"\xff\xfe", "is not valid UTF-8 (at byte 0)"),
    "deep": (b"a = " + b"[" * 100_000, "nested too deeply"),
    "a number of many digits": (b"a = " + b"9" * 10_000, "is not valid TOML"),
    "large": (b"#" * (2**20 + 1), "more than the 1,048,576 allowed"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_is_no_toml_is_one_clear_error(name: str, tmp_path: Path) -> None:
    content, message = UNREADABLE[name]
    (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_cells([tmp_path / "bad.toml"], find)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_fifo_a_folder_and_nothing_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DataError) as caught:
        read_cells([tmp_path / "fifo", tmp_path, tmp_path / "nothing"], find)
    assert [line.split(": ")[1].split(";")[0] for line in str(caught.value).splitlines()] == [
        "it is not a regular file",
        "it is not a regular file",
        "No such file or directory",
    ]


def test_all_mistakes_of_all_cells_of_all_files_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(f"{WITH_SEEDS}options = {{ epochs = 0, lrr = 1 }}\n")
    (tmp_path / "two.toml").write_text(CELL + '[[cell]]\nname = "c"\nseeds = [-1]\n')
    with pytest.raises(SettingsError) as caught:
        read_cells([tmp_path / "one.toml", tmp_path / "two.toml"], find)
    wanted = [
        ("one.toml, cell 'a': ", "there is no field 'lrr'"),
        ("one.toml, cell 'a': ", "epochs is 0"),
        ("two.toml, cell 'a': ", "already has that name"),
        ("two.toml, cell 'a': ", "neither the cell nor its file has seeds"),
        ("two.toml, cell 'c': ", "seeds is [-1]"),
        ("two.toml, cell 'c': ", "there is no recipe"),
    ]
    assert len(caught.value.problems) == len(wanted)
    for problem, (where, what) in zip(caught.value.problems, wanted, strict=True):
        assert problem.startswith(f"{tmp_path}/{where}")
        assert what in problem


def make_run(
    run: SweepRun, journal: list[dict[str, Any]], *, shipped: bool, steps: tuple[int, ...] = (), **options: Any
) -> None:
    """Writes the files of a run that determine its state."""
    for step in steps:
        (run.folder / "checkpoints" / f"step-{step:09d}").mkdir(parents=True)
    run.folder.mkdir(parents=True, exist_ok=True)
    values = as_values(run.recipe) | options
    config = {"version": 1, "recipe": run.recipe.name, "task": run.recipe.task, "options": values, "data": {}}
    (run.folder / "config.json").write_text(json.dumps(config))
    lines = [json.dumps({"epoch": one["step"] / 10, "wall": {"seconds": 1.5}} | one) + "\n" for one in journal]
    (run.folder / "journal.jsonl").write_text("".join(lines))
    if shipped:
        (run.folder / "model.safetensors").touch()


@pytest.fixture
def run(tmp_path: Path) -> SweepRun:
    """A run with ten updates per epoch in the journals below."""
    return plan_runs([Cell("a", replace(RECIPE, epochs=2, warmup_epochs=0), (0,))], tmp_path)[0]


def test_a_run_is_finished_with_its_last_evaluation_and_its_weights(run: SweepRun) -> None:
    assert read_state(run) == RunState("missing")
    last = {"kind": "eval", "step": 20, "accuracy": 90.0}
    make_run(run, [{"kind": "eval", "step": 10, "accuracy": 80.0}, last], shipped=False, steps=(10, 15))
    assert read_state(run) == RunState("begun", 15, 20, seconds=1.5)
    (run.folder / "model.safetensors").touch()
    record = {"step": 20, "epoch": 2.0, "accuracy": 90.0}
    assert read_state(run) == RunState("finished", 20, 20, {"val": record}, 1.5)


def test_weights_without_the_last_evaluation_are_of_a_run_that_was_begun(run: SweepRun) -> None:
    make_run(run, [{"kind": "eval", "step": 10, "accuracy": 80.0}], shipped=True)
    assert read_state(run).text == "begun, at step 0 of 20"


def test_a_budget_in_updates_is_known_before_the_run_begins(run: SweepRun, tmp_path: Path) -> None:
    in_updates = plan_runs([Cell("a", replace(RECIPE, steps=33), (0,))], tmp_path)[0]
    assert read_state(in_updates) == RunState("missing", total=33)
    make_run(in_updates, [{"kind": "eval", "step": 33, "accuracy": 1.0}], shipped=True)
    assert read_state(in_updates).kind == "finished"


def test_the_weights_that_were_shipped_are_the_ones_that_count(run: SweepRun) -> None:
    best, test = (
        {"kind": "final", "split": split, "step": 20, "accuracy": value} for split, value in (("val", 95.0), ("test", 7.0))
    )
    make_run(run, [{"kind": "eval", "step": 20, "accuracy": 90.0}, best, test], shipped=True)
    results = SweepResults({run: read_state(run)}, {})
    assert [(table.split, table.rows[0].mean) for table in results.tables()] == [("val", 95.0), ("test", 7.0)]


def test_a_damaged_journal_is_a_data_error(run: SweepRun) -> None:
    make_run(run, [], shipped=False)
    for text in ('{"kind": "eval"}\n', "[]\n", '{"step": 1, "epoch": 0, "wall": {"seconds": 1}, "kind": "eval"}\n'):
        (run.folder / "journal.jsonl").write_text(text)
        with pytest.raises(DataError, match="is damaged"):
            read_state(run)


def test_other_options_than_a_run_was_begun_with_are_refused_all_at_once(run: SweepRun) -> None:
    make_run(run, [], shipped=False, epochs=3, lr=0.5)
    with pytest.raises(SettingsError) as caught:
        read_states([run])
    assert caught.value.problems == [
        f"a, seed 0: {run.folder} was started with epochs = 3, not 2; give another --out, or rename the cell",
        f"a, seed 0: {run.folder} was started with lr = 0.5, not 0.003; give another --out, or rename the cell",
    ]


def test_workers_and_the_place_of_the_data_may_change(run: SweepRun) -> None:
    make_run(run, [], shipped=False, num_workers=7, data="/somewhere/else")
    assert read_states([run])[run].kind == "begun"


def test_other_data_than_a_finished_run_had_are_refused(run: SweepRun) -> None:
    finished = [{"kind": "eval", "step": 20, "accuracy": 1.0}]
    make_run(run, finished, shipped=True, data="/moved/digits")
    assert read_states([run])[run].kind == "finished"
    make_run(run, finished, shipped=True, data="/moved/letters")
    with pytest.raises(SettingsError, match='started with data = "/moved/letters", not "digits"'):
        read_states([run])


def test_a_folder_that_is_no_run_is_left_alone_but_half_a_configuration_is_not_one(run: SweepRun) -> None:
    run.folder.mkdir(parents=True)
    (run.folder / ".config.json.tmp").touch()
    assert read_states([run])[run].kind == "missing"
    (run.folder / "thesis.tex").touch()
    with pytest.raises(SettingsError, match=r"is not a run directory, but contains thesis.tex; move it"):
        read_states([run])


def finished(value: float | None) -> RunState:
    return RunState("finished", 20, 20, {"val": {"accuracy": value}}, 1.0)


def test_mean_and_spread_are_those_of_the_statistics_module_over_finished_runs(tmp_path: Path) -> None:
    runs = plan_runs([Cell("many", RECIPE, (0, 1, 2, 3)), Cell("one", RECIPE, (0,)), Cell("none", RECIPE, (0, 1))], tmp_path)
    values = [91.25, 90.0, 97.5]
    ends = [*map(finished, values), RunState("begun", 3, 20), finished(50.0), RunState("missing"), finished(None)]
    results = SweepResults(dict(zip(runs, ends, strict=True)), {runs[3]: "it diverged"})
    [table] = results.tables()
    many, one, none = table.rows
    assert (many.mean, many.standard_deviation) == (statistics.mean(values), statistics.stdev(values))
    assert (many.seeds, many.planned, many.failed, many.best, many.worst) == (3, 4, 1, 97.5, 90.0)
    assert (one.mean, one.standard_deviation, one.seeds) == (50.0, None, 1)
    assert (none.mean, none.standard_deviation, none.seeds, none.best) == (None, None, 0, None)
    record = results.record()
    assert [run["state"] for run in record["runs"]] == ["finished"] * 3 + ["failed", "finished", "missing", "finished"]
    assert record["runs"][3]["reason"] == "it diverged"
    assert results.csv().splitlines()[2] == "one,digits/pola-vit-tiny,val,accuracy,%,1,1,0,50.0,,50.0,50.0"


def test_cells_with_other_metrics_get_tables_of_their_own(tmp_path: Path) -> None:
    from polaformer.tasks.classification.recipe import ClassificationRecipe
    from polaformer.training.metric import Metric, TaskTerms

    class Regression(ClassificationRecipe):
        terms = TaskTerms(Metric("error", higher_is_better=False, digits=4))

    runs = plan_runs([Cell("a", RECIPE, (0,)), Cell("b", Regression(name="b"), (0, 1))], tmp_path)
    ends = [finished(1.0), *(RunState("finished", 1, 1, {"val": {"error": error}}) for error in (0.5, 0.25))]
    accuracy, error = SweepResults(dict(zip(runs, ends, strict=True)), {}).tables()
    assert [row.cell for row in accuracy.rows] == ["a"]
    assert [(row.cell, row.best, row.worst) for row in error.rows] == [("b", 0.25, 0.5)]


def test_the_time_left_counts_runs_that_have_not_begun_by_others_of_their_cell(tmp_path: Path) -> None:
    quick, slow = Cell("quick", RECIPE, (0, 1)), Cell("slow", RECIPE, (0, 1))
    runs = plan_runs([quick, slow], tmp_path)
    now = 0.0
    pace = Pace({run: RunState("missing") for run in runs}, jobs=2, clock=lambda: now)
    assert pace.seconds_left() is None
    assert pace.share() == 0.0
    pace.start(runs[0])
    pace.start(runs[2])
    now = 4.0  # seconds to load PyTorch and the data
    pace.update(runs[0], 1, 100)
    pace.update(runs[2], 1, 50)
    assert pace.seconds_left() is None
    now = 13.9
    pace.update(runs[0], 100, 100)  # 0.1 s per update
    now = 14.0
    pace.update(runs[2], 11, 50)  # 1 s per update
    assert pace.updates_per_second() == pytest.approx(99 / 10 + 10 / 10)
    pace.end(runs[0])
    assert pace.updates_per_second() == pytest.approx(1.0)
    assert pace.num_over == 1
    # 100 updates of the second quick run, 39 of the slow one, 50 of the second slow one, and two loads: two at a time.
    assert pace.seconds_left() == pytest.approx((100 * 10 / 99 + 39 * 1.0 + 50 * 1.0 + 2 * 4.0) / 2)
    assert pace.share() == pytest.approx(111 / 300)


def test_the_time_left_does_not_count_what_a_resumed_run_had_made_before(tmp_path: Path) -> None:
    [run] = plan_runs([Cell("a", RECIPE, (0,))], tmp_path)
    now = 0.0
    pace = Pace({run: RunState("begun", 80, 100)}, jobs=1, clock=lambda: now)
    pace.start(run)
    pace.resume(run, 60, 100)
    pace.update(run, 61, 100)
    now = 4.5
    pace.update(run, 70, 100)
    assert pace.seconds_left() == pytest.approx(30 * 0.5)
    pace.end(run)
    assert pace.seconds_left() == 0.0
