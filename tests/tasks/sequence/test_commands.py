"""`models`, `check` and `predict` on the datasets of the Long Range Arena."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from arena import RELEASED, cifar
from commands import run
from polaformer.data.sources.lra import pathfinder_generator, prepared
from polaformer.data.sources.lra.datasets import DATASETS
from polaformer.data.sources.lra.inputs import READERS, read_input
from polaformer.data.sources.lra.opening import DATASETS as SOURCES
from polaformer.data.sources.lra.opening import find_dataset, open_sequences
from polaformer.errors import DataError


def test_every_dataset_is_a_source_with_the_same_classes_and_can_be_asked():
    assert set(DATASETS) == set(SOURCES) == set(READERS)
    for name, dataset in DATASETS.items():
        assert dataset.name == name
        assert dataset.classes == find_dataset(name).CLASSES


def test_models_lists_every_task_and_mechanism_with_its_size(capsys):
    code, out, _ = run(["models", "--task", "sequence", "--json"], capsys)
    assert code == 0
    models = {one["name"]: one for one in json.loads(out)["models"]}
    assert len(models) == 120
    assert models["text-pola-a3"]["params"] == 379_522
    assert models["retrieval-softmax"]["params"] == 395_138
    assert models["listops-pola-a7"]["attention"] == "pola"
    for model in models.values():
        assert model["macs"] > 64 * 64 * 4 * model["length"]
    # Softmax multiplies 3.6 to 12.2 times as much as pola (lra.md 8); the classifier and the embedding are negligible.
    for task, ratio in (("image", 3.6), ("listops", 6.5), ("text", 12.2)):
        assert models[f"{task}-softmax"]["macs"] / models[f"{task}-pola-a3"]["macs"] == pytest.approx(ratio, rel=0.03)


def test_models_can_be_chosen_by_pattern_and_mechanism(capsys):
    code, out, _ = run(["models", "text-*", "--task", "sequence", "--attention", "pola", "--json"], capsys)
    assert code == 0
    assert [one["name"] for one in json.loads(out)["models"]] == ["text-pola-a3", "text-pola-a5", "text-pola-a7"]
    for arguments, message in (
        (["poem-*"], "no model matches 'poem-*'"),
        (["--attention", "polar"], "--attention has 'polar'; did you mean 'pola'?"),
    ):
        code, _, err = run(["models", *arguments, "--task", "sequence"], capsys)
        assert code == 2
        assert message in err


def test_check_recognises_the_datasets(tmp_path, capsys):
    rows = [("train", 0, "dull"), ("train", 1, "superb"), ("test", 1, "dull"), ("test", 0, "dull"), ("test", 1, "")]
    lines = [json.dumps({"split": split, "label": label, "text": text}) for split, label, text in rows]
    (tmp_path / "imdb.jsonl").write_text("\n".join(lines) + "\n")
    code, out, _ = run(["check", tmp_path / "imdb.jsonl", "--json"], capsys)
    assert code == 65
    found = json.loads(out)
    assert found["parts"]["train"]["samples"] == 2
    texts = " ".join(problem["text"] for problem in found["problems"])
    assert "it is empty" in texts
    assert "labelled" in texts
    assert "it is in both splits" in texts


@pytest.mark.parametrize("form", ["released", "prepared"])
@pytest.mark.parametrize("dataset", RELEASED)
def test_check_reads_all_samples_of_either_form(dataset, form, tmp_path, capsys):
    path = RELEASED[dataset](tmp_path / "released")
    splits = open_sequences(path, dataset)
    if form == "prepared":
        path = tmp_path / "prepared"
        prepared.write(splits, path, dataset, {})
    code, out, _ = run(["check", path, "--json"], capsys)
    found = json.loads(out)
    assert {name: part["samples"] for name, part in found["parts"].items()} == {name: len(one) for name, one in splits.items()}
    assert (code, found["problems"]) == (0, [])


def test_check_takes_an_array_file_for_image_if_the_task_is_named(tmp_path, capsys):
    """It may hold images for any task: without the name it is checked as labelled images."""
    images, labels = cifar(30)[0], np.arange(30) % 10
    np.savez(tmp_path / "c.npz", x_train=images, y_train=labels, x_test=images[:5], y_test=labels[:5])
    code, out, _ = run(["check", tmp_path / "c.npz", "--task", "sequence", "--json"], capsys)
    found = json.loads(out)
    assert {name: part["samples"] for name, part in found["parts"].items()} == {"train": 27, "val": 3, "test": 5}
    assert (code, len(found["problems"])) == (65, 5)  # the test images are those of train
    assert "documents" in found["parts"]["train"]
    assert "images" in json.loads(run(["check", tmp_path / "c.npz", "--json"], capsys)[1])["parts"]["train"]


def test_check_reports_empty_images_and_data_that_are_no_longer_as_generated(tmp_path, capsys):
    pathfinder_generator.generate(tmp_path / "out", 20, 4, 0)
    assert run(["check", tmp_path / "out"], capsys)[0] == 0
    lost = open_sequences(tmp_path / "out", "pathfinder")["train"].name(5)
    Path(lost).write_bytes(b"")
    code, out, _ = run(["check", tmp_path / "out", "--json"], capsys)
    found = json.loads(out)
    assert (code, found["parts"]["train"]["empty"], found["parts"]["val"]["empty"]) == (65, 1, 0)
    assert [(one["part"], one["sample"]) for one in found["problems"]] == [
        ("train", lost),
        ("train", str(tmp_path / "out" / "manifest.json")),
    ]
    assert "it is empty and left out" in found["problems"][0]["text"]
    assert "from 16 samples to 15" in found["problems"][1]["text"]


def test_check_refuses_what_is_none_of_the_datasets(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    code, _, err = run(["check", tmp_path / "empty", "--task", "sequence"], capsys)
    assert code == 65
    assert "none of the datasets of the Long Range Arena" in err


def test_an_input_is_a_file_or_the_document_itself(tmp_path):
    file = tmp_path / "review.txt"
    file.write_bytes("déjà vu".encode())
    assert bytes(read_input("text", str(file))) == bytes(read_input("text", "déjà vu")) == "déjà vu".encode()
    assert (
        read_input("listops", "[MAX 2 [MIN 3 4 ] 9 ]").tolist() == read_input("listops", "( [MAX 2 [MIN 3 4 ] 9 ] )").tolist()
    )
    with pytest.raises(DataError, match="cannot be read"):
        read_input("text", str(tmp_path))


@pytest.mark.parametrize("text", ["", "[MAX 2", "[MAX 2 12 ]", "[AVG 1 2 ]", "MAX 1 2"])
def test_expressions_that_are_none_are_refused(text):
    with pytest.raises(DataError):
        read_input("listops", text)


@pytest.mark.parametrize("form", ["argument", "file"])
def test_an_expression_that_is_none_is_named(form, tmp_path):
    text = "[MAX 2 [MIN 3 ] 7"
    given = text if form == "argument" else str(tmp_path / "one.txt")
    (tmp_path / "one.txt").write_text(text)
    named = f"the expression {text!r}" if form == "argument" else f"{given}: the expression"
    with pytest.raises(DataError, match=re.escape(f"{named} ends too early, with 1 × ] missing")):
        read_input("listops", given)


def test_a_long_expression_is_named_by_its_beginning():
    with pytest.raises(DataError, match=re.escape(f"the expression '[MAX {'1 ' * 27}…' ends too early")):
        read_input("listops", "[MAX " + 400 * "1 ")


def test_images_are_grey_levels_row_by_row(tmp_path):
    grey = np.arange(1024, dtype=np.uint32).reshape(32, 32).astype(np.uint8)
    Image.fromarray(grey).save(tmp_path / "contours.png")
    assert read_input("pathfinder", str(tmp_path / "contours.png")).tolist() == grey.reshape(-1).tolist()
    colour = np.zeros((32, 32, 3), dtype=np.uint8)
    colour[0, 1] = 255, 0, 0
    Image.fromarray(colour).save(tmp_path / "red.png")
    assert read_input("image", str(tmp_path / "red.png"))[:3].tolist() == [0, 76, 0]
    Image.fromarray(grey[:16]).save(tmp_path / "half.png")
    with pytest.raises(DataError, match="has 32×16 pixels; give an image of 32×32"):
        read_input("pathfinder", str(tmp_path / "half.png"))
    with pytest.raises(DataError, match="cannot be read"):
        read_input("image", str(Path(tmp_path / "missing.png")))
