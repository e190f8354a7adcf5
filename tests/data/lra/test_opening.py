"""Datasets are recognised and opened by name, in either form."""

from pathlib import Path

import numpy as np
import pytest

import arena
from arena import RELEASED
from pictures import refused
from polaformer.data.sources.lra import opening, prepared


def prepare(dataset: str, root: Path) -> Path:
    splits = opening.open_sequences(RELEASED[dataset](root / "released"), dataset)
    prepared.write(splits, root / "prepared", dataset, {})
    return root / "prepared"


@pytest.mark.parametrize("dataset", RELEASED)
def test_both_forms_are_recognised_and_opened(dataset: str, tmp_path: Path) -> None:
    path = prepare(dataset, tmp_path)
    released = opening.open_sequences(str(tmp_path / "released"), dataset)
    again = opening.open_sequences(path, dataset)
    assert opening.recognise(tmp_path / "released") == opening.recognise(str(path)) == dataset
    assert {name: split.digest() for name, split in released.items()} == {name: one.digest() for name, one in again.items()}


@pytest.mark.parametrize("dataset", opening.DATASETS)
def test_every_dataset_has_the_same_parts(dataset: str, tmp_path: Path) -> None:
    module = opening.find_dataset(dataset)
    assert len(module.CLASSES) >= 2
    assert module.holds(tmp_path) is False
    with refused(str(tmp_path)):
        module.load(tmp_path)


@pytest.mark.parametrize("form", ["released", "prepared"])
def test_another_dataset_is_one_error(form: str, tmp_path: Path) -> None:
    prepare("text", tmp_path)
    with refused(f"{tmp_path / form} holds the dataset 'text', not 'retrieval'; give other data, or the name of this dataset"):
        opening.open_sequences(tmp_path / form, "retrieval")


def test_prepared_data_with_other_classes_are_one_error(tmp_path: Path) -> None:
    splits = opening.open_sequences(arena.write_cifar(tmp_path / "released"), "image")
    prepared.write(splits, tmp_path / "prepared", "text", {})
    with refused(f"{tmp_path}/prepared has other classes than negative, positive"):
        opening.open_sequences(tmp_path / "prepared", "text")


def test_what_is_none_of_them_is_one_error(tmp_path: Path) -> None:
    assert opening.recognise(tmp_path) is None
    with refused(f"{tmp_path} has no reviews; give an aclImdb folder"):
        opening.open_sequences(tmp_path, "text")
    assert opening.recognise(tmp_path / "gone") is None
    with refused(f"there is no file or folder {tmp_path}/gone; check the path"):
        opening.open_sequences(tmp_path / "gone", "text")
    with pytest.raises(ValueError, match=r"there is no dataset 'poems'; choose one of .*text"):
        opening.open_sequences(tmp_path, "poems")


def test_a_damaged_prepared_directory_is_not_taken_for_anything_else(tmp_path: Path) -> None:
    path = prepare("text", tmp_path)
    (path / "manifest.json").write_text('{"format": "polaformer-sequences-1"')
    assert opening.recognise(path) is None
    with refused("manifest.json is not a manifest of sequences"):
        opening.open_sequences(path, "text")


def test_an_array_file_is_opened_but_not_recognised(tmp_path: Path) -> None:
    """`polaformer check` would otherwise take any .npz for a dataset of sequences."""
    images, labels = np.zeros((20, 32, 32), np.uint8), np.arange(20) % 10
    np.savez(tmp_path / "x.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    assert opening.recognise(tmp_path / "x.npz") is None
    assert len(opening.open_sequences(tmp_path / "x.npz", "image")["val"]) == 2
