"""`polaformer sweep` as a user sees it: it trains unfinished runs, survives kills and failures, and prints one table."""

import json
import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import faults
import sweeps
from commands import run
from polaformer.training import journal

RUNS = ("pola/0", "pola/1", "softmax/0")


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a sweep of three runs, trained two at a time: its file, its `out`, and its output."""
    folder = tmp_path_factory.mktemp("swept")
    file = sweeps.write(folder / "sweep.toml", sweeps.TWO_CELLS)
    code, _, err = sweeps.run([file, "--out", folder / "out", "--jobs", "2"], folder)
    assert code == 0, err
    return folder


def last_accuracy(folder: Path) -> float:
    return float([line for line in journal.read(folder) if line["kind"] == "eval"][-1]["accuracy"])


def test_the_table_has_mean_and_spread_of_what_the_journals_say(swept: Path) -> None:
    results = json.loads((swept / "out" / "results.json").read_text())
    values = [last_accuracy(swept / "out" / name) for name in RUNS]
    pola, softmax = results["cells"]
    assert (pola["mean"], pola["standard_deviation"]) == (statistics.mean(values[:2]), statistics.stdev(values[:2]))
    assert (softmax["mean"], softmax["standard_deviation"], softmax["seeds"]) == (values[2], None, 1)
    out = (swept / "stdout").read_text()
    assert f"{statistics.mean(values[:2]):.2f} │ {statistics.stdev(values[:2]):.2f} │     2" in out
    assert "accuracy on val, %" in out
    rows = (swept / "out" / "results.csv").read_text().splitlines()
    assert len(rows) == 3
    assert rows[1].startswith("pola,digits/pola-vit-tiny,val,accuracy,%,2,2,0,")


def test_every_run_is_an_ordinary_one_with_a_log_beside_it(swept: Path) -> None:
    for name in RUNS:
        names = {"config.json", "journal.jsonl", "metrics.csv", "tensorboard", "checkpoints", "model.safetensors"}
        assert names <= {path.name for path in (swept / "out" / name).iterdir()}
        assert "epoch 1/1" in (swept / "out" / f"{name}.log").read_text()
    assert json.loads((swept / "out/softmax/0/config.json").read_text())["options"]["attention"] == "softmax"
    assert json.loads((swept / "out/pola/1/config.json").read_text())["options"]["seed"] == 1


def test_without_a_terminal_each_finished_run_is_a_line_with_the_time_left(swept: Path) -> None:
    lines = (swept / "stderr").read_text().splitlines()
    assert len(lines) == 3
    for number, line in enumerate(lines, start=1):
        assert f"; {number} of 3 runs, 0:" in line
        assert line.endswith(" left")
        assert ": accuracy " in line


def test_two_jobs_train_at_the_same_time_and_first_seeds_come_first(swept: Path) -> None:
    begun = {name: (swept / "out" / name / "config.json").stat().st_mtime for name in RUNS}
    ended = {name: (swept / "out" / name / "model.safetensors").stat().st_mtime for name in RUNS}
    assert max(begun["pola/0"], begun["softmax/0"]) < min(ended["pola/0"], ended["softmax/0"])
    assert begun["pola/1"] > min(ended["pola/0"], ended["softmax/0"])


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("results."))
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_what_is_finished_is_not_trained_again(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, results = contents(swept / "out"), (swept / "out" / "results.json").read_bytes()
    code, out, err = run(["sweep", swept / "sweep.toml", "--out", swept / "out"], capsys)
    assert (code, err) == (0, "")
    assert out == (swept / "stdout").read_text()
    assert contents(swept / "out") == before
    assert (swept / "out" / "results.json").read_bytes() == results


def wait_until(condition: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_after_a_kill_the_same_command_goes_on_bit_for_bit(swept: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [swept / "sweep.toml", "--out", out, "--jobs", "2"]
    process = sweeps.start(words, tmp_path)
    wait_until(lambda: list(out.glob("*/*/checkpoints/step-*")), 60)
    process.kill()
    process.join(10)
    assert not all((out / name / "model.safetensors").exists() for name in RUNS)
    code, _, err = sweeps.run(words, tmp_path)
    assert code == 0, err
    assert "resumed from" in "".join(log.read_text() for log in out.glob("*/*.log"))
    for name in RUNS:
        assert faults.outcome(out / name) == faults.outcome(swept / "out" / name)
    wanted = json.loads((swept / "out" / "results.json").read_text())["cells"]
    assert json.loads((out / "results.json").read_text())["cells"] == wanted


def test_after_a_kill_no_process_is_left_and_what_was_begun_is_saved(tmp_path: Path) -> None:
    file = sweeps.write(tmp_path / "sweep.toml", sweeps.ONE_CELL.replace("epochs = 1", "epochs = 500"))
    process = sweeps.start([file, "--out", tmp_path / "out"], tmp_path)
    wait_until(lambda: list(tmp_path.glob("out/*/*/checkpoints/step-*")), 60)
    [training] = psutil.Process(process.pid).children()
    process.kill()
    process.join(10)
    try:
        wait_until(lambda: not training.is_running(), 20)
    finally:
        if training.is_running():
            training.kill()
    assert "SIGTERM: saved at step" in (tmp_path / "out" / "pola" / "0.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_what_was_begun_and_says_how_to_go_on(number: signal.Signals, tmp_path: Path) -> None:
    file = sweeps.write(tmp_path / "sweep.toml", sweeps.ONE_CELL.replace("epochs = 1", "epochs = 500"))
    process = sweeps.start([file, "--out", tmp_path / "out"], tmp_path)
    wait_until(lambda: list(tmp_path.glob("out/*/*/checkpoints/step-*")), 60)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    err = (tmp_path / "stderr").read_text()
    assert process.exitcode == 128 + number
    assert "1 run is being saved" in err
    assert f"polaformer sweep: {number.name}: all started runs are saved; resume with the same command" in err
    assert "saved at step" in (tmp_path / "out" / "pola" / "0.log").read_text()


def test_a_run_that_diverges_is_reported_and_the_others_finish(tmp_path: Path) -> None:
    shared, cell = sweeps.ONE_CELL.split("[[cell]]")
    wild = cell.replace('"pola"', '"wild"') + "options = { lr = 1e30 }\n"
    file = sweeps.write(tmp_path / "sweep.toml", f"{shared}[[cell]]{wild}[[cell]]{cell}")
    code, out, err = sweeps.run([file, "--out", tmp_path / "out"], tmp_path)
    assert code == 1
    log = tmp_path / "out" / "wild" / "0.log"
    for printed in (out, err):
        assert "wild, seed 0" in printed
        assert "failed: at step" in printed
        assert f"(log: {log})" in printed
    assert "at step" in log.read_text()
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(one["cell"], one["state"]) for one in results["runs"]] == [("wild", "failed"), ("pola", "finished")]
    assert [(one["cell"], one["seeds"], one["failed"]) for one in results["cells"]] == [("wild", 0, 1), ("pola", 1, 0)]


@pytest.mark.long
def test_the_programs_that_a_sweep_starts_train_to_the_same_last_bit(
    swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One real run: a separate program in which nothing is loaded yet."""
    file = sweeps.write(tmp_path / "sweep.toml", sweeps.ONE_CELL)
    code, out, err = run(["sweep", file, "--out", tmp_path / "out", "--threads", "1", "--json"], capsys)
    assert code == 0, err
    assert json.loads(out)["runs"][0]["state"] == "finished"
    assert (tmp_path / "out/pola/0/report.html").is_file()
    assert faults.outcome(tmp_path / "out/pola/0") == faults.outcome(swept / "out/pola/0")


def test_changed_options_are_refused_before_anything_starts(
    swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(swept / "out")
    file = sweeps.write(tmp_path / "sweep.toml", sweeps.TWO_CELLS.replace("dims = [16]", "dims = [32]"))
    for more in ([], ["--collect"], ["--dry-run"]):
        code, out, err = run(["sweep", file, "--out", swept / "out", *more], capsys)
        assert (code, out) == (2, "")
        assert err.count("was started with dims = [16], not [32]; give another --out, or rename the cell") == 3
    assert contents(swept / "out") == before


def test_a_dry_run_and_a_collection_tell_what_is_there_and_train_nothing(
    swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(swept / "out", tmp_path / "out")
    (tmp_path / "out/pola/1/model.safetensors").unlink()
    shutil.rmtree(tmp_path / "out/softmax/0")
    before = contents(tmp_path / "out")
    words = ["sweep", swept / "sweep.toml", "--out", tmp_path / "out"]
    code, out, _ = run([*words, "--dry-run"], capsys)
    assert code == 0
    for told in ("finished", "begun, at step 22 of 22", "missing", "Nothing was trained"):
        assert told in out
    code, out, _ = run([*words, "--collect"], capsys)
    assert code == 0
    assert "1 of 2" in out
    assert "2 of 3 runs are not finished" in out
    code, out, _ = run([*words, "--collect", "--json"], capsys)
    assert [one["state"] for one in json.loads(out)["runs"]] == ["finished", "begun", "missing"]
    assert json.loads(out)["cells"][1]["mean"] is None
    assert contents(tmp_path / "out") == before


def test_a_sweep_that_another_process_trains_is_left_alone(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from polaformer.training.run import Run

    with Run(swept / "out").lock():
        code, _, err = run(["sweep", swept / "sweep.toml", "--out", swept / "out"], capsys)
    assert code == 2
    assert "is being trained by another process" in err


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ([], 2, "no file given; name a file that describes a sweep"),
        (["sweep.toml", "--jobs", "0"], 2, "--jobs is 0; give an integer ≥ 1"),
        (["sweep.toml", "--threads", "-1"], 2, "--threads is -1; give an integer ≥ 1"),
        (["sweep.toml", "--dry-run", "--collect"], 2, "--dry-run and --collect are both given; give only one"),
        (["nothing.toml"], 65, "nothing.toml cannot be read: No such file or directory"),
        ([".", "--dry-run"], 65, ". cannot be read: it is not a regular file"),
        (["wrong.toml"], 65, "wrong.toml is not valid TOML: Invalid value (at line 1"),
        (["empty.toml"], 2, "empty.toml: there is no cell"),
        (["sweep.toml", "--out", "empty.toml/out"], 74, "cannot write to --out empty.toml/out"),
    ],
)
def test_a_mistake_is_told_before_anything_is_written(
    words: list[str], code: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("sweep.toml", sweeps.ONE_CELL), ("wrong.toml", "a = = 1"), ("empty.toml", "")):
        sweeps.write(tmp_path / name, text)
    before = sorted(tmp_path.rglob("*"))
    found, out, err = run(["sweep", *words], capsys)
    assert (found, out) == (code, "")
    assert err.startswith("polaformer sweep: ")
    assert told in err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_sweep_is_not_started_by_torchrun(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run(["sweep", "sweep.toml"], capsys)
    assert code == 2
    assert "without torchrun" in err
