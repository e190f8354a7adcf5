"""Runs and weights files written by version 0.1.0 can be resumed, evaluated, replayed and used to predict."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commands import run
from polaformer.data.sources.digits import open_digits
from polaformer.tasks.classification.predictor import load_classifier
from polaformer.tasks.stored_recipe import load_recipe

WRITTEN = Path(__file__).resolve().parents[1] / "written" / "0.1.0"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A copy, because resuming writes into the run directory."""
    return Path(shutil.copytree(WRITTEN, tmp_path / "written"))


def lines(run: Path) -> list[dict[str, object]]:
    found = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "wall"} for line in found]


def test_a_run_that_was_stopped_goes_on_to_the_end_that_the_old_code_came_to(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(["resume", written / "stopped"], capsys)
    assert code == 0, err
    assert "step 110 of 132" in err
    found, wanted = (load_file(written / name / "model.safetensors") for name in ("stopped", "finished"))
    assert found.keys() == wanted.keys()
    for name in wanted:  # not bitwise equal on other processors
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-4)
    assert [line["step"] for line in lines(written / "stopped")] == [line["step"] for line in lines(WRITTEN / "finished")]
    last, old = lines(written / "stopped")[-1], lines(WRITTEN / "finished")[-1]
    assert last.keys() == old.keys()
    assert abs(last["correct"] - old["correct"]) <= 1


def test_a_run_and_a_weights_file_are_evaluated_as_before(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = lines(WRITTEN / "finished")[-1]
    for words in (["finished"], ["finished/model.safetensors", "--data", "digits"]):
        code, out, err = run(["eval", "--checkpoint", written / words[0], *words[1:], "--num-workers", "0", "--json"], capsys)
        assert code == 0, err
        found = json.loads(out)["result"]
        assert abs(found["correct"] - wanted["correct"]) <= 1
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-4)


def test_a_weights_file_predicts_and_names_no_task(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    val = open_digits().val
    for index in range(3):
        val.read(index, 1).save(tmp_path / f"{index}.png")
    weights = written / "finished" / "model.safetensors"
    images = [tmp_path / f"{index}.png" for index in range(3)]
    code, out, err = run(["predict", *images, "--checkpoint", weights, "--json"], capsys)
    assert code == 0, err
    wanted = load_classifier(weights).predict([val.read(index, 1) for index in range(3)])
    found = [[guess["name"] for guess in image["classes"]] for image in json.loads(out)["images"]]
    assert found == [[guess.name for guess in guesses] for guesses in wanted]


def test_a_step_that_diverged_is_replayed(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["resume", written / "diverged", "--replay", "--json"], capsys)
    assert code == 70, err
    [replayed] = json.loads(out)["replay"]
    assert replayed["loss"] is None
    assert len(replayed["not_finite"]) == 26


def test_a_configuration_that_names_no_task_is_one_of_classification(written: Path) -> None:
    path = written / "stopped" / "config.json"
    config = json.loads(path.read_text())
    del config["task"]
    path.write_text(json.dumps(config))
    assert load_recipe(written / "stopped").task == "classification"
