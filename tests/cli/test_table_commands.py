"""`polaformer table`: our runs of the Long Range Arena beside the paper's numbers."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import faults
import sweeps
from commands import run
from polaformer.analysis.lra_speed import SpeedRow, compare, throughput
from polaformer.analysis.timing import Timing
from polaformer.cli import table_lra_speed
from polaformer.cli.bench_tables import ratio_text
from polaformer.recipes.lra import build_recipe
from polaformer.tasks.sequence.published import ROWS, SPEED, TASKS, printed_accuracy, printed_speedup


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two seeds of pola, one of softmax with other settings, and one that was killed."""
    folder = tmp_path_factory.mktemp("lra")
    lines = [
        json.dumps({"split": split, "label": index % 2, "text": ("good " if index % 2 else "poor ") * (1 + index)})
        for split, number in (("train", 16), ("test", 6))
        for index in range(number)
    ]
    (folder / "imdb.jsonl").write_text("\n".join(lines) + "\n")
    small = {"data": str(folder / "imdb.jsonl"), "batch_size": 4, "steps": 4, "warmup_steps": 1, "eval_every_steps": 4}
    for name, row, changes in (
        ("a", "pola-a3", {}),
        ("b", "pola-a3", {"seed": 1}),
        ("c", "softmax", {"pooling": "valid"}),
        ("d", "linear", {"attention_options": None}),
    ):
        recipe = replace(build_recipe("text", row), **small | changes)
        kill = faults.Kill("update", 2) if name == "d" else None
        run_folder = folder / "runs" / name
        run_folder.parent.mkdir(exist_ok=True)
        assert faults.run(run_folder, recipe, kill=kill) == [0 if kill is None else -9], faults.errors(run_folder)
    return folder / "runs"


def test_table_lra_groups_seeds_and_marks_other_settings(runs, capsys):
    code, out, _ = run(["table", "lra", "--runs", runs, "--tasks", "text", "--rows", "pola-a3", "softmax", "linear"], capsys)
    assert code == 0
    assert re.search(r"pola-a3 \[1\] +│ 73.06 P │ [\d.]+ ± [\d.]+ \(2 seeds, 4 steps\)", out)
    assert re.search(r"softmax \[2\] +│ 61.55 \? │ +[\d.]+ \(1 seed, 4 steps\)", out)
    assert re.search(r"linear +│ 65.90 L │ +│", out)
    assert re.search(r"\[1\] warmup_steps 1, batch_size 4, eval_every_steps 4\n\[2\] .*, pooling valid\n", out)
    assert "1 run is not finished" in out
    assert "copied from the Long Range Arena's leaderboard" in out


def test_only_runs_of_the_shown_rows_count_as_unfinished(runs, capsys):
    for rows, unfinished in ((["linear"], 1), (["pola-a3"], 0)):
        code, out, _ = run(["table", "lra", "--runs", runs, "--rows", *rows, "--json"], capsys)
        assert (code, json.loads(out)["unfinished"]) == (0, unfinished)


def test_table_lra_as_json(runs, capsys):
    code, out, _ = run(["table", "lra", "--runs", runs, "--json"], capsys)
    assert code == 0
    found = json.loads(out)
    assert found["unfinished"] == 1
    pola = next(cell for cell in found["cells"] if cell["row"] == "pola-a3")
    assert (pola["task"], pola["steps"], pola["seeds"], pola["paper"], pola["paper_source"]) == ("text", 4, [0, 1], 73.06, "P")
    assert pola["mean"] == pytest.approx(sum(pola["accuracies"]) / 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which `table lra --run` has trained two seeds on 40 short reviews."""
    folder = tmp_path_factory.mktemp("trained")
    lines = [
        json.dumps({"split": split, "label": index % 2, "text": f"{index} " + ("good " if index % 2 else "poor ") * 3})
        for split, number in (("train", 40), ("test", 40))
        for index in range(number)
    ]
    (folder / "imdb.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def table_lra_run(folder: Path, *options: str) -> tuple[int, str, str]:
    words = ["--run", "--runs", folder / "runs", "--tasks", "text", "--rows", "linear", "--data", f"text={folder}/imdb.jsonl"]
    return sweeps.run([*words, "--seeds", "3", "5", "--threads", "1", *options], folder, ("table", "lra"))


def test_table_lra_run_trains_what_is_missing_once(trained):
    options = ["--steps", "2", "--accumulation", "2", "--lr", "0.01", "--selection", "held-out", "--json"]
    code, out, err = table_lra_run(trained, *options)
    # 36 reviews remain of the 40 in training: one batch of 32.
    assert code == 0, err
    [cell] = json.loads(out)["cells"]
    folders = [trained / "runs" / "text-linear" / str(seed) for seed in (3, 5)]
    assert cell["folders"] == [str(one) for one in folders]
    assert (cell["row"], cell["seeds"], cell["steps"], cell["paper"]) == ("linear", [3, 5], 2, 65.90)
    written = {}
    for seed, one in zip((3, 5), folders, strict=True):
        found = json.loads((one / "config.json").read_text())["options"]
        assert (found["steps"], found["warmup_steps"], found["accumulation"], found["seed"]) == (2, 1, 2, seed)
        assert (found["lr"], found["selection"], found["batch_size"]) == (0.01, "held-out", 32)
        assert (found["warmup_lr"], found["min_lr"]) == (4e-4, 4e-8)
        assert (one / "model.safetensors").is_file()
        written |= {path: path.stat().st_mtime_ns for path in one.rglob("*") if path.is_file()}
    code, again, err = table_lra_run(trained, *options)
    assert (code, again) == (0, out), err
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert {path for one in folders for path in one.rglob("*") if path.is_file()} == set(written)
    code, _, err = table_lra_run(trained, *options[2:], "--steps", "5000")
    assert code == 2
    assert "was started with steps = 2, not 5000; give another --runs, or the --steps, --lr," in err
    assert "was started with warmup_steps = 1, not 8;" in err
    assert "--out" not in err
    assert "cell" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "pola-a4"], "--rows has 'pola-a4'; did you mean 'pola-a"),
        (["--run"], "--run trains the rows of --rows; give some"),
        (["--run", "--rows", "softmax", "--tasks", "text"], "--run needs the data of text; give --data text=DIR"),
        (["--data", "texts=x"], "--data has 'texts'; did you mean 'text'?"),
        (["--run", "--rows", "softmax", "--jobs", "0"], "--jobs is 0; give an integer ≥ 1"),
        (
            ["--run", "--rows", "softmax", "--tasks", "text", "--data", "text"],
            "--data has 'text', which names no directory; give text=DIR",
        ),
        (["--run", "--rows", "softmax", "--tasks", "text", "--data", "text="], "--data has 'text=', which names no directory"),
        (["--data", "text=one", "text=two"], "--data has 'text' twice; give it once"),
        (["--tasks", "text", "text"], "--tasks has 'text' twice"),
        (["--rows", "softmax", "softmax"], "--rows has 'softmax' twice"),
        (["--run", "--rows", "softmax", "--seeds", "1", "1"], "--seeds has 1 twice"),
        (["--run", "--rows", "softmax", "--seeds", "-1"], "--seeds is -1; give integers from 0"),
        (["--run", "--rows", "softmax", "--lr", "0"], "--lr is 0; give a number > 0"),
        (["--run", "--rows", "softmax", "--tasks", "image", "--selection", "held-out"], "--selection is for text"),
    ],
)
def test_mistakes_are_reported_before_any_work(arguments, message, capsys):
    code, out, err = run(["table", "lra", *arguments], capsys)
    assert (code, out) == (2, "")
    assert message in err


def test_the_printed_table_is_the_papers():
    averages = {"softmax": 58.14, "local": 46.06, "skyformer": 59.39, "hedgehog": 59.66, "pola-a3": 60.72, "pola-a7": 60.57}
    for row, average in averages.items():
        assert sum(ROWS[row].accuracies) / 5 == pytest.approx(average, abs=0.006)
    assert printed_accuracy("pola-a5", "listops") == 38.76
    assert printed_accuracy("hydra", "text") is None


def test_throughput_is_batch_times_length_per_millisecond():
    """The paper's numbers follow from its batch sizes: 131,072 tokens of Text in 520 ms."""
    assert throughput(32 * 4096, 0.520) == pytest.approx(252.06, abs=0.01)
    row = SpeedRow(32 * 4096, Timing((0.5, 0.52, 0.6), 1.0), None, None, None)
    assert row.tokens_per_millisecond == pytest.approx(252.06, abs=0.01)
    assert printed_speedup("pola-a3", "text") == pytest.approx(3.48, abs=0.01)
    assert printed_speedup("pola-a3", "listops") == pytest.approx(2.36, abs=0.01)
    assert all(len(one) == len(TASKS) for row in SPEED.values() for one in row)


def test_table_lra_speed_times_all_rows_with_the_same_batch(capsys):
    command = ["table", "lra-speed", "--tasks", "image", "--rows", "pola-a3", "--batch", "2", "--micro-batch", "1"]
    code, out, err = run([*command, "--rounds", "1", "--seconds", "5", "--json"], capsys)
    assert code == 0, err
    found = json.loads(out)
    assert (found["batch"], found["micro_batch"]) == (2, 1)
    assert set(found["tasks"]["image"]) == {"softmax", "pola-a3"}
    for row in found["tasks"]["image"].values():
        assert row["tokens_per_millisecond"] == pytest.approx(2 * 1024 / (1e3 * row["time"]["median"]))
        assert row["peak_bytes"] > 0
        assert row["speedup_over_materialised"] is row["memory_ratio_to_materialised"] is None


def test_the_papers_ratios_stand_beside_ours_to_materialised_softmax():
    """The paper's softmax is materialised: 1.82 times as fast and 0.47 of the memory on Image are relative to that."""
    steps = compare("image", ["softmax", "softmax-materialised", "pola-a3"], batch=1, micro_batch=1, rounds=1, seconds=9)
    pola, maps = steps["pola-a3"], steps["softmax-materialised"]
    assert pola.as_record()["speedup_over_materialised"] == maps.timing.median / pola.timing.median
    assert pola.as_record()["speedup"] == steps["softmax"].timing.median / pola.timing.median
    assert pola.memory_ratio_to_materialised == pola.peak_bytes / maps.peak_bytes < 0.5 < pola.memory_ratio
    table = table_lra_speed._table("image", steps, "batch 1")
    titles = [" ".join(str(column.header).split()) for column in table.columns]
    cells = {
        str(row[0]): dict(zip(titles, row, strict=True)) for row in zip(*(one.cells for one in table.columns), strict=True)
    }
    assert titles[3:6] == ["× softmax", "× materialised", "paper, × materialised"]
    assert titles[7:] == ["of softmax", "of materialised", "paper, of materialised"]
    assert cells["pola-a3"]["× materialised"] == ratio_text(pola.speedup_over_materialised)
    assert (cells["pola-a3"]["paper, × materialised"], cells["pola-a3"]["paper, of materialised"]) == ("1.82", "0.47")
    # The paper's softmax is the materialised one.
    assert [cells[name]["paper, × materialised"] for name in ("softmax", "softmax-materialised")] == ["", "1.00"]
    del steps["softmax-materialised"]
    assert "× materialised" not in [str(one.header) for one in table_lra_speed._table("image", steps, "batch 1").columns]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "polar"], "--rows has 'polar'; did you mean 'pola-a"),
        (["--batch", "0"], "--batch is 0; give an integer ≥ 1"),
        (["--batch", "3", "--micro-batch", "2"], "--batch is 3, which is not a multiple of --micro-batch 2"),
        (["--seconds", "0"], "--seconds is 0; give a number > 0"),
    ],
)
def test_mistakes_of_lra_speed_are_reported_before_any_work(arguments, message, capsys):
    code, out, err = run(["table", "lra-speed", *arguments], capsys)
    assert (code, out) == (2, "")
    assert message in err
