"""An image folder with train, val and test: val is evaluated during training, test at the end."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import faults
from commands import run
from polaformer.data.sources.opening import open_data
from polaformer.errors import DataError
from polaformer.tasks.classification.recipe import ClassificationRecipe
from polaformer.tasks.running import resume, train
from polaformer.training import journal


def quiet(event: str, record: dict[str, Any]) -> None:
    """Ignores all events."""


def write_images(root: Path, **numbers: int) -> Path:
    draws = np.random.default_rng(0)
    for part, number in numbers.items():
        for label, name in enumerate(("dark", "light")):
            (root / part / name).mkdir(parents=True)
            for index in range(number):
                pixels = draws.integers(128 * label, 128 * label + 127, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{index}.png")
    return root


def tiny(data: Path) -> ClassificationRecipe:
    return faults.tiny(str(data), epochs=1, batch_size=8, accumulation=1, save_every=2)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"), train=8, val=3, test=5)


@pytest.fixture(scope="module")
def trained(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(tiny(images), folder, quiet)
    return folder


def test_the_test_part_is_evaluated_once_at_the_end(trained: Path) -> None:
    lines = journal.read(trained)
    assert [line["kind"] for line in lines][-2:] == ["eval", "final"]
    assert [line["samples"] for line in lines if line["kind"] == "eval"] == [6]
    assert [(line["split"], line["samples"]) for line in lines if line["kind"] == "final"] == [("test", 10)]


def test_eval_takes_the_split_by_name(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split, samples in (("train", 16), ("val", 6), ("test", 10)):
        code, out, err = run(["eval", "--checkpoint", trained, "--split", split, "--num-workers", "0", "--json"], capsys)
        assert code == 0, err
        assert json.loads(out)["result"]["samples"] == samples
    assert json.loads(out)["result"]["correct"] == journal.read(trained)[-1]["correct"]


def test_without_a_validation_part_the_test_part_validates_as_before(tmp_path: Path) -> None:
    data = open_data(str(write_images(tmp_path / "images", train=4, test=2)))
    assert (len(data.val), data.test) == (4, None)


def test_a_run_that_knew_of_no_test_part_is_resumed_where_there_is_one(images: Path, tmp_path: Path) -> None:
    shutil.copytree(images, tmp_path / "images")
    shutil.rmtree(tmp_path / "images" / "test")
    train(tiny(tmp_path / "images"), tmp_path / "run", quiet)
    shutil.copytree(images / "test", tmp_path / "images" / "test")
    assert resume(tmp_path / "run", quiet).counts.keys() == {"val", "test"}
    (tmp_path / "images" / "val" / "dark" / "0.png").unlink()
    with pytest.raises(DataError, match="the data are not those that"):
        resume(tmp_path / "run", quiet)


def test_a_test_part_of_other_classes_is_refused(tmp_path: Path) -> None:
    data = write_images(tmp_path / "images", train=4, val=2, test=2)
    (data / "test" / "dark").rename(data / "test" / "grey")
    with pytest.raises(DataError, match=r"training and test have different classes \(dark, grey\)"):
        open_data(str(data))


def test_a_test_part_without_class_folders_has_no_labels_and_is_left_alone(tmp_path: Path) -> None:
    """As in ImageNet."""
    data = write_images(tmp_path / "images", train=4, val=2)
    (data / "test").mkdir()
    Image.new("L", (8, 8)).save(data / "test" / "0.png")
    assert open_data(str(data)).test is None


def test_check_reads_the_test_part_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_images(tmp_path / "images", train=4, val=2, test=2)
    (data / "test" / "dark" / "0.png").write_bytes(b"broken")
    code, out, _ = run(["check", "--json", data], capsys)
    assert code == 65
    [problem] = json.loads(out)["problems"]
    assert (problem["part"], problem["image"]) == ("test", "dark/0.png")


def test_the_best_weights_are_tested(images: Path, tmp_path: Path) -> None:
    recipe = replace(tiny(images), ship="best", eval_every_steps=1, epochs=2)
    counts = train(recipe, tmp_path / "run", quiet).counts
    finals = {line["split"]: line for line in journal.read(tmp_path / "run") if line["kind"] == "final"}
    assert finals["test"]["correct"] == counts["test"].top1
    assert counts["val"].record()["accuracy"] == max(
        line["accuracy"] for line in journal.read(tmp_path / "run") if line["kind"] == "eval"
    )
