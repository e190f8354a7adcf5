"""The commands around training as a user sees them: train, resume, eval, predict, demo, alone and under torchrun."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import faults
from commands import run, run_apart
from polaformer.cli import demo
from polaformer.cli.main import main
from polaformer.cli.training_view import TrainingView
from polaformer.tasks.classification.recipe import ClassificationRecipe

OPTIONS = ["--epochs", "1", "--warmup-epochs", "0", "--depths", "1", "--dims", "16", "--num-workers", "0"]
TRAIN = ["train", "digits/pola-vit-tiny", *OPTIONS]


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on digits, through the command."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main([*TRAIN, "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def digit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from polaformer.data.sources.digits import open_digits

    path = tmp_path_factory.mktemp("digit") / "digit.png"
    open_digits().val.read(0, 1).save(path)
    return path


def test_train_shows_its_progress_prints_the_result_and_writes_the_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run([*TRAIN, "--seed", "3"], capsys)
    assert code == 0, err
    assert "epoch 1/1" in err
    assert "images/s" in err
    assert "left" in err
    assert "accuracy" in out
    [folder] = (tmp_path / "runs" / "digits" / "pola-vit-tiny").iterdir()
    assert folder.name.endswith("-3")
    names = {"config.json", "journal.jsonl", "metrics.csv", "tensorboard", "checkpoints", "report.html", "model.safetensors"}
    assert names <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "config.json").read_text())["options"]["dims"] == [16]


def test_train_as_json_prints_nothing_but_its_result(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run([*TRAIN, "--json", "--out", str(tmp_path / "run")], capsys)
    assert code == 0
    assert json.loads(out)["result"]["samples"] == 360


@pytest.mark.parametrize(
    ("cores", "processes", "wanted"), [(2, None, 2), (1, None, 1), (64, None, 4), (6, "2", 3), (1, "8", 1)]
)
def test_no_more_processes_read_data_than_there_are_cores_unless_told(
    cores: int, processes: str | None, wanted: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from polaformer.recipes.registry import find
    from polaformer.tasks.task import EvaluationOptions
    from polaformer.training.settings import workers_for_cores

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    if processes:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert workers_for_cores(4) == wanted
    assert workers_for_cores(0) == 0
    assert EvaluationOptions().num_workers == min(2, wanted)
    name = "imagenet/pola-swin-tiny"
    assert find(name).num_workers == 4
    assert main(["train", name, "--help"]) == 0
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"(default: {wanted})" in told[told.index("--num-workers") :].split("--eval-every")[0]


def test_a_dry_run_shows_the_processes_that_read_and_more_than_cores_are_honoured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2), raising=False)
    words = [
        "train",
        "imagenet/pola-deit-tiny",
        "--data",
        "digits",
        "--img-size",
        "32",
        "--batch-size",
        "8",
        "--dry-run",
        "--json",
    ]
    for more, wanted in (([], 2), (["--num-workers", "7"], 7)):
        code, out, err = run([*words, *more], capsys)
        assert code == 0, err
        assert json.loads(out)["options"]["num_workers"] == wanted


def test_resume_keeps_the_runs_own_number_of_processes_that_read(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from polaformer.tasks import map_style as jobs

    shutil.copytree(trained, tmp_path / "run")
    config = tmp_path / "run" / "config.json"
    config.write_text(config.read_text().replace('"num_workers": 0', '"num_workers": 7'))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1), raising=False)
    used, batches = [], jobs.batches
    monkeypatch.setattr(
        jobs, "batches", lambda *rest, num_workers, **more: used.append(num_workers) or batches(*rest, num_workers=0, **more)
    )
    code, _, err = run(["resume", str(tmp_path / "run")], capsys)
    assert code == 0, err
    assert set(used) == {7}


def test_a_dry_run_tells_what_it_would_need_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run([*TRAIN, "--dry-run"], capsys)
    assert code == 0
    for told in ("updates per epoch", "22", "memory of each process MB", "all settings", "warmup_epochs"):
        assert told in out
    code, out, _ = run([*TRAIN, "--dry-run", "--json"], capsys)
    needs = json.loads(out)["needs"]
    assert (needs["updates"], needs["training_images"], needs["classes"]) == (22, 1437, 10)
    assert needs["memory_of_each_process_MB"] >= 1
    assert list(tmp_path.iterdir()) == []


def test_help_lists_the_recipes_and_the_fields_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["train", "--help"], capsys)
    assert code == 0
    assert "imagenet/pola-swin-tiny-300" in out.replace("│", "").replace("\n", " ")
    code, out, _ = run(["train", "imagenet/pola-swin-tiny", "--help"], capsys)
    assert code == 0
    assert "--warmup-epochs" in out
    assert "82.6 %" in out
    assert "--needs-checkpoint" not in out


def test_eval_counts_what_training_counted(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [json.loads(line) for line in (trained / "journal.jsonl").read_text().splitlines()][-1]
    for checkpoint in (trained, trained / "model.safetensors", trained / "checkpoints" / "step-000000022"):
        code, out, err = run(["eval", "--checkpoint", str(checkpoint), "--num-workers", "0", "--json"], capsys)
        assert code == 0, err
        found = json.loads(out)["result"]
        assert {name: found[name] for name in ("samples", "correct", "correct_top5")} == {
            name: wanted[name] for name in ("samples", "correct", "correct_top5")
        }


def test_eval_squeezes_or_cuts(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On images that are not square, the two ways of resizing give different inputs."""
    draws = np.random.default_rng(0)
    for name in range(10):
        (tmp_path / "data" / str(name)).mkdir(parents=True)
        for part in range(3):
            Image.fromarray(draws.integers(0, 255, (8, 32), dtype=np.uint8)).save(tmp_path / "data" / str(name) / f"{part}.png")
    losses = {}
    for resize in ("square", "shorter"):
        arguments = ["--data", str(tmp_path / "data"), "--split", "train", "--num-workers", "0", "--resize", resize, "--json"]
        code, out, err = run(["eval", "--checkpoint", str(trained), *arguments, "--val-share", "0.2"], capsys)
        assert code == 0, err
        losses[resize] = json.loads(out)["result"]["loss"]
        assert json.loads(out)["resize"] == resize
    assert losses["square"] != losses["shorter"]


def test_predict_names_classes_best_first(trained: Path, digit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["predict", str(digit), str(digit), "--checkpoint", str(trained), "--top", "3"], capsys)
    assert code == 0
    assert out.count("%") >= 3
    code, out, _ = run(["predict", str(digit), "--checkpoint", str(trained), "--json"], capsys)
    [image] = json.loads(out)["images"]
    probabilities = [guess["probability"] for guess in image["classes"]]
    assert probabilities == sorted(probabilities, reverse=True)
    assert len(probabilities) == 5
    assert {guess["name"] for guess in image["classes"]} <= set("0123456789")


def test_names_with_markup_are_shown_as_they_are(
    trained: Path, digit: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["x[b].png", "z[bold].png", ":smile:.png"]
    for name in names:
        (tmp_path / name).write_bytes(digit.read_bytes())
    code, out, _ = run(["predict", *names, "--checkpoint", str(trained), "--top", "1"], capsys)
    assert code == 0
    assert all(name in out for name in names)


def test_training_without_data_says_that_it_takes_the_digits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["train", "cifar10/pola-pvt-nano", "--dry-run"], capsys)
    assert code == 0
    assert "no --data given: training on the 1,797 bundled handwritten digits" in err
    assert "1,437" in out


def test_a_run_can_be_started_from_another(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run([*TRAIN, "--checkpoint", str(trained), "--dry-run"], capsys)
    assert code == 0, err


def test_a_killed_command_is_resumed_by_the_command(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One real run: a separate process, SIGKILL, and `polaformer resume`."""
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "polaformer", *TRAIN, "--save-every", "4", "--out", str(killed)]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # as in the other run
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=environment, **nowhere)
    deadline = time.monotonic() + 90
    while not list(killed.glob("checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (killed / "model.safetensors").exists()
    code, _, err = run(["resume", killed], capsys)
    assert code == 0, err
    assert "resumed from" in err
    assert faults.outcome(killed) == faults.outcome(trained)


def test_of_two_processes_that_train_one_tells(tmp_path: Path) -> None:
    told = run_apart([*TRAIN, "--out", tmp_path / "run"], tmp_path, processes=2)
    assert [code for code, _, _ in told] == [0, 0], told
    check_what_two_processes_told("".join(out for _, out, _ in told), "".join(err for _, _, err in told), tmp_path / "run")


@pytest.mark.long
def test_torchrun_trains_in_two_processes_and_one_of_them_tells(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(faults.free_port())]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    arguments = [*command, "-m", "polaformer", *TRAIN, "--out", str(tmp_path / "run")]
    done = subprocess.run(arguments, check=False, capture_output=True, text=True, env=environment, timeout=180)
    assert done.returncode == 0, done.stderr
    check_what_two_processes_told(done.stdout, done.stderr, tmp_path / "run")


def check_what_two_processes_told(out: str, err: str, folder: Path) -> None:
    assert out.count("weights: ") == 1
    assert err.count("epoch 1/1") == 1
    assert "Warning" not in err
    last = json.loads((folder / "journal.jsonl").read_text().splitlines()[-1])
    assert last["samples"] == 360


def test_a_second_command_on_a_run_leaves_it_alone(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in trained.iterdir())
    code, _, err = run([*TRAIN, "--out", str(trained)], capsys)
    assert code == 2
    assert f"polaformer resume {trained}" in err
    assert sorted(path.name for path in trained.iterdir()) == before


def test_the_demo_trains_both_twins_and_writes_one_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"dims": (16,), "num_heads": (2,), "depths": (1,), "num_workers": 0}
    monkeypatch.setattr(demo, "POLA_VIT_TINY", replace(demo.POLA_VIT_TINY, **small))
    code, out, err = run(["demo", "--epochs", "1"], capsys)
    assert code == 0, err
    assert "PolaFormer" in out
    assert "softmax twin" in out
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    for told in ("softmax twin", "onfusion", "ntropy", "earning", "redict"):
        assert told in page
    links = Links()
    links.feed(page)
    assert links.found
    assert all(link.startswith(("data:", "#")) for link in links.found)
    results = json.loads((tmp_path / "demo" / "results.json").read_text())["results"]
    assert [one["samples"] for one in results] == [360, 360]
    assert all(0 < one["entropy"] < np.log(17) for one in results)
    code, _, err = run(["demo", "--epochs", "1", "--json"], capsys)
    assert code == 0, err


class Links(HTMLParser):
    """All links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]


def test_a_view_without_a_terminal_writes_a_line_an_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingView("name", ClassificationRecipe(batch_size=8, epochs=4)) as view:
        for step in range(1, 9):
            view("update", {"step": step, "loss": 1.0 / step, "lr": 0.1, "total": 16})
        view("eval", {"step": 8, "accuracy": 50.0})
        view("note", {"text": "something to know"})
    err = capsys.readouterr().err
    assert "name, epoch 2/4:" in err
    assert "accuracy 50.00 %" in err
    assert "something to know" in err
