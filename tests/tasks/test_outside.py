"""A task from another package: the one that docs/add-a-task.md builds, installed and used with every command."""

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file

import faults
from commands import run_apart
from faults import Kill

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "add-a-task.md"
NUM_TRAIN, NUM_HELD_OUT, STEPS_PER_EPOCH, EPOCHS = 160, 41, 10, 3
OPTIONS = ["--epochs", str(EPOCHS), "--batch-size", "16", "--dropout", "0.1", "--num-workers", "0", "--save-every", "4"]
BROKEN = "raise ImportError('it needs a package that is not there')\n"


def files_of_the_page() -> dict[str, str]:
    """The contents of each file, as given on the page."""
    return dict(re.findall(r"^\*\*(\S+)\*\*\n\n```\w+\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S))


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that pip installed the package into."""
    source, target = tmp_path_factory.mktemp("polaformer-ink"), tmp_path_factory.mktemp("site")
    write(source, files_of_the_page())
    alone = ["--no-index", "--no-deps", "--no-build-isolation", "--no-compile", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *alone, "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(scope="module", autouse=True)
def _installed(package: Path) -> Iterator[None]:
    """Lets processes that the tests start find the installed package; removes it from this process afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        patch.setattr(sys, "path", [str(package), *sys.path])
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "ink_task"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return faults.write_data(tmp_path_factory.mktemp("data") / "digits.npz", NUM_TRAIN, NUM_HELD_OUT)


def run_command(arguments: list[Any], folder: Path, *, processes: int = 1, code: int = 0) -> tuple[str, str]:
    """The stdout and stderr of the command in the first process; all processes must end with the exit code."""
    done = run_apart(arguments, Path(tempfile.mkdtemp(dir=folder)), processes=processes)
    assert [one[0] for one in done] == [code] * processes, done
    return done[0][1:]


@pytest.fixture(scope="module")
def trained(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory written by `polaformer train`."""
    folder = tmp_path_factory.mktemp("trained")
    out, err = run_command(["train", "ink/tiny", *OPTIONS, "--data", data, "--out", folder / "run"], folder)
    for words in ("ink/tiny on 21 pictures (val)", "ink/tiny on 20 pictures (test)", "error", "within 1 %"):
        assert words in out
    assert re.search(r"pictures/s, loss \S+, error \d+\.\d\d %", err)
    return folder / "run"


def recipe_of(run: Path) -> Any:
    """The recipe of a run, in this process."""
    from ink_task.recipe import TINY

    from polaformer.tasks.options import with_values

    return with_values(TINY, json.loads((run / "config.json").read_text())["options"])


@pytest.fixture(scope="module")
def digit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from polaformer.data.sources.digits import open_digits

    path = tmp_path_factory.mktemp("digit") / "digit.png"
    open_digits().val.read(0, 1).save(path)
    return path


def test_the_page_names_every_file_in_its_table() -> None:
    files = files_of_the_page()
    assert sorted(files) == sorted(re.findall(r"^\| `(\S+)` \|", PAGE.read_text(), flags=re.M))
    assert len(files) == 8


def test_the_code_of_the_page_is_in_our_style(tmp_path: Path) -> None:
    write(tmp_path, files_of_the_page())
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", "."]
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, *config], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_the_code_of_the_page_has_the_types_that_the_library_asks_for(package: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "ink_task"]
    environment = {"MYPYPATH": f"{package}:{ROOT / 'src'}", "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=package, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_help_lists_the_recipe_and_loads_no_pytorch(package: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(package)!r})
from polaformer.cli.main import main
assert main(["train", "--help"]) == 0
assert "ink_task" in sys.modules, "not asked"
assert "torch" not in sys.modules, "PyTorch was loaded"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ink/tiny" in done.stdout


def test_a_run_says_of_which_task_it_is_and_names_data_so_that_it_holds_from_anywhere(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ink_task.recipe import TINY

    config = json.loads((trained / "config.json").read_text())
    assert (config["task"], config["recipe"]) == ("ink", "ink/tiny")
    assert config["data"]["pictures"] == {"train": 160, "val": 21, "test": 20}
    assert TINY.values_with_absolute_paths()["data"] == "digits"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    assert replace(TINY, data="photos").values_with_absolute_paths()["data"] == str(tmp_path / "photos")
    assert replace(TINY, data="wiki:en").values_with_absolute_paths()["data"] == "wiki:en"


def test_the_report_shows_the_figures_of_the_task(trained: Path) -> None:
    page = (trained / "report.html").read_text()
    assert "<h2>Worst answers</h2>" in page
    assert page.count("test/") == 5  # the names of the pictures
    assert re.search(r"On 20 pictures that were kept apart, the mean error is \d+\.\d\d %", page)


def test_resume_after_a_kill_is_bitwise_equal(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert faults.run(run, recipe_of(trained), Kill("update", 14)) == [-signal.SIGKILL]
    assert faults.saved_steps(run)[-1] == 12
    run_command(["resume", run], tmp_path)
    assert faults.outcome(run) == faults.outcome(trained)


def test_no_result_depends_on_the_process_that_reads(trained: Path, tmp_path: Path) -> None:
    assert faults.run(tmp_path / "run", replace(recipe_of(trained), num_workers=1)) == [0]
    assert faults.outcome(tmp_path / "run") == faults.outcome(trained)


@pytest.mark.long
def test_two_processes_resume_bit_for_bit(trained: Path, tmp_path: Path) -> None:
    recipe, port = recipe_of(trained), faults.free_port()
    assert faults.run(tmp_path / "whole", recipe, processes=2, port=port) == [0, 0]
    codes = faults.run(tmp_path / "run", recipe, Kill("update", 14), processes=2, port=faults.free_port())
    assert codes[0] == -signal.SIGKILL
    assert faults.run(tmp_path / "run", recipe, processes=2, port=faults.free_port()) == [0, 0]
    assert faults.outcome(tmp_path / "run") == faults.outcome(tmp_path / "whole")


def errors_of(run: Path) -> dict[int, float]:
    """The error of each evaluation during training, by step."""
    lines = map(json.loads, (run / "journal.jsonl").read_text().splitlines())
    return {line["step"]: line["error"] for line in lines if line["kind"] == "eval"}


def test_the_weights_of_the_lowest_error_are_shipped_also_after_a_kill(trained: Path, tmp_path: Path) -> None:
    # The run starts from trained weights, and weight decay shrinks them more and more.
    decay = {"lr": 1e-4, "warmup_lr": 1e-4, "min_lr": 1e-4, "warmup_epochs": 0, "weight_decay": 200.0}
    recipe = replace(recipe_of(trained), ship="best", checkpoint=str(trained / "model.safetensors"), **decay)
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert faults.run(whole, recipe) == [0]
    errors = errors_of(whole)
    best = min(errors, key=lambda step: errors[step])
    assert list(errors.values()) == sorted(errors.values()), errors
    assert best == STEPS_PER_EPOCH
    last = json.loads((whole / "journal.jsonl").read_text().splitlines()[-2])
    assert (last["kind"], last["split"], last["best_step"], last["error"]) == ("final", "val", best, errors[best])
    assert faults.run(run, recipe, Kill("update", best + 3)) == [-signal.SIGKILL]
    run_command(["resume", run], tmp_path)
    assert faults.outcome(run) == faults.outcome(whole)


@pytest.mark.parametrize("split", ["val", "test"])
def test_two_processes_count_what_one_counts(split: str, trained: Path, tmp_path: Path) -> None:
    words = ["eval", "--checkpoint", trained, "--split", split, "--batch-size", "4", "--num-workers", "0", "--json"]
    one, two = (json.loads(run_command(words, tmp_path, processes=number)[0]) for number in (1, 2))
    assert one["result"].pop("error") == pytest.approx(two["result"].pop("error"), rel=1e-5)
    assert one == two
    assert one["result"]["samples"] == {"val": 21, "test": 20}[split]


def test_eval_has_an_option_of_the_task(trained: Path, tmp_path: Path) -> None:
    words = ["eval", "--checkpoint", trained, "--num-workers", "0", "--tolerance"]
    strict, lax = (json.loads(run_command([*words, text, "--json"], tmp_path)[0]) for text in ("0", "100"))
    assert (strict["tolerance"], strict["result"]["close"]) == (0.0, 0)
    assert lax["result"]["close"] == lax["result"]["samples"]
    assert strict["result"]["error"] == lax["result"]["error"]


def test_a_weights_file_alone_predicts(trained: Path, digit: Path, tmp_path: Path) -> None:
    weights = shutil.copy(trained / "model.safetensors", tmp_path / "ink.safetensors")
    Image.new("L", (30, 20)).save(tmp_path / "blank.png")
    words = ["predict", digit, tmp_path / "blank.png", "--checkpoint", weights, "--decimals", "3"]
    found = json.loads(run_command([*words, "--json"], tmp_path)[0])
    assert [one["picture"] for one in found["pictures"]] == [str(digit), str(tmp_path / "blank.png")]
    ink, blank = (one["ink"] for one in found["pictures"])
    assert blank == 0
    assert 5 < ink < 60
    out, _ = run_command(words, tmp_path)
    assert f"{ink:.3f} %" in out
    (tmp_path / "broken.png").write_bytes(b"no image")
    out, err = run_command([*words, tmp_path / "broken.png"], tmp_path, code=65)
    assert f"{ink:.3f} %" in out
    assert "broken.png is not a readable image" in err


def test_checkpoints_are_weights_files_too(trained: Path, digit: Path, tmp_path: Path) -> None:
    checkpoint = trained / "checkpoints" / f"step-{EPOCHS * STEPS_PER_EPOCH:09d}"
    words = ["predict", digit, "--json", "--checkpoint"]
    found, shipped = (json.loads(run_command([*words, path], tmp_path)[0])["pictures"] for path in (checkpoint, trained))
    assert found == shipped


def test_a_dry_run_tells_what_it_would_need_and_writes_nothing(data: str, tmp_path: Path) -> None:
    words = ["train", "ink/tiny", *OPTIONS, "--data", data, "--out", tmp_path / "run", "--dry-run", "--json"]
    found = json.loads(run_command(words, tmp_path)[0])
    assert found["needs"]["pictures_at_once"] == 16
    assert found["needs"]["updates"] == EPOCHS * STEPS_PER_EPOCH
    assert found["needs"]["test_pictures"] == 20
    assert found["options"]["dropout"] == 0.1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "problems"),
    [
        (
            ["train", "ink/tiny", "--dim", "7", "--depth", "0", "--attention", "pole", "--lr", "x", "--dorpout", "1"],
            ["dim is 7, which num_heads", "depth is 0", "--attention is pole", "--lr is x", "did you mean '--dropout'?"],
        ),
        (["eval", "--tolerance", "-1", "--batch-size", "0", "--top", "1"], ["--tolerance is -1", "--batch-size is 0", "--top"]),
        (["predict", "x.png", "--decimals", "10", "--tolerance", "1"], ["--decimals is 10", "no option --tolerance"]),
        (["eval", "--split", "tset"], ["--split is 'tset'; choose one of train, val, test"]),
        (["train", "ink/tiny", "--grad-checkpointing"], ["grad_checkpointing is true"]),
        (["train", "ink/tiny", "--frozen-stages", "1", "--optimizer", "sdg"], ["frozen_stages is 1", "optimizer is 'sdg'"]),
        (["train", "ink/tiny", "--batch-size", "5000"], ["batch_size is 5000, but there are 1437 pictures"]),
        (["check", "digits", "--task", "ink"], ["the task 'ink' cannot check data"]),
        (["models", "--task", "ink"], ["the task 'ink' lists no models"]),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_everything_that_is_wrong_is_told_at_once(
    command: list[str], problems: list[str], trained: Path, tmp_path: Path
) -> None:
    of = ["--checkpoint", trained] if command[0] in ("eval", "predict") else []
    _, err = run_command([*command, *of], tmp_path, code=2)
    for problem in problems:
        assert problem in err
    assert len(err.splitlines()) == (1 + len(problems) if len(problems) > 1 else 1)


def test_a_diverged_step_is_kept_and_replayed(data: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    wild = ["--optimizer", "sgd", "--lr", "1e30", "--warmup-lr", "1e30", "--clip-norm", "None", "--accumulation", "2"]
    _, err = run_command(["train", "ink/tiny", *OPTIONS, *wild, "--data", data, "--out", run], tmp_path, code=70)
    assert "at step 1, with learning rate 1e+30" in err
    found = json.loads(run_command(["resume", run, "--replay", "--json"], tmp_path, code=70)[0])
    [again] = found["replay"]
    assert "head.1.weight" in again["not_finite"]
    parts = load_file(again["file"])
    assert {name for name in parts if name.endswith(".1")} == {"indices.1", "values.1", "exists.1", "ink.1"}
    assert parts["values.0"].shape == parts["exists.0"].shape


def test_without_the_package_its_weights_and_runs_are_one_clear_error(
    trained: Path, digit: Path, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(package)])
    for words in (
        ["predict", digit, "--checkpoint", trained / "model.safetensors"],
        ["eval", "--checkpoint", trained],
        ["resume", trained],
    ):
        out, err = run_command(words, tmp_path, code=65)
        assert "there is no task 'ink'; there are classification" in err
        assert "is the package that provides it installed?" in err
        assert (out, len(err.splitlines())) == ("", 1)
    _, err = run_command(["train", "ink/tiny"], tmp_path, code=2)
    assert "there is no recipe 'ink/tiny'" in err


def test_a_broken_entry_point_is_told_when_asked_for_and_disturbs_no_other_task(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = "Metadata-Version: 2.1\nName: broken\nVersion: 1\n"
    points = "[polaformer.tasks]\nbroken = broken_task:TASK\nnumber = math:pi\nsecond = ink_task:TASK\n"
    write(tmp_path / "site", {"broken-1.dist-info/METADATA": about, "broken-1.dist-info/entry_points.txt": points})
    write(tmp_path / "site", {"broken_task.py": BROKEN})
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    for command in (["models", "--task", "broken"], ["train", "broken/tiny"]):
        _, err = run_command(command, tmp_path, code=2)
        assert "the task 'broken' of broken_task:TASK cannot be used: ImportError: it needs a package that is not there" in err
        assert "the task 'number' of math:pi cannot be used: TypeError: math:pi is a float" in err
        assert "the task 'second' of ink_task:TASK cannot be used: ValueError: there is already a task 'ink'" in err
    for recipe in ("ink/tiny", "digits/pola-vit-tiny"):
        out, err = run_command(["train", recipe, "--data", data, "--batch-size", "16", "--dry-run"], tmp_path)
        assert "Nothing was trained" in out
        assert "broken" not in err


@pytest.mark.long
def test_the_recipe_gives_what_it_says(tmp_path: Path) -> None:
    out, _ = run_command(["train", "ink/tiny", "--num-workers", "0", "--out", tmp_path / "run", "--json"], tmp_path)
    assert json.loads(out)["splits"]["test"]["error"] < 1
