"""Generated data are compared with the manifest of their generator."""

from pathlib import Path

import pytest

from polaformer.data.sources.lra import listops, listops_generator, pathfinder, pathfinder_generator
from polaformer.data.sources.lra.generated import changes


@pytest.fixture
def expressions(tmp_path: Path) -> Path:
    listops_generator.generate(tmp_path / "listops", {"train": 6, "val": 2, "test": 2}, 0)
    return tmp_path / "listops"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    pathfinder_generator.generate(tmp_path / "pathfinder", 20, 4, 0)
    return tmp_path / "pathfinder"


def test_unchanged_data_have_no_changes(expressions: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert changes(expressions, listops.load(expressions)) == []
    assert changes(images, pathfinder.load(images)) == []
    assert changes(images.parent, pathfinder.load(images)) == []  # no manifest
    monkeypatch.chdir(images / "curv_contour_length_4")
    assert changes(Path(), pathfinder.load(Path())) == []


def test_a_changed_row_and_a_missing_split_are_found(expressions: Path) -> None:
    file = expressions / "basic_train.tsv"
    file.write_text("\n".join(file.read_text().splitlines()[:-1]) + "\n")
    (expressions / "basic_val.tsv").unlink()
    found = changes(expressions, listops.load(expressions))
    assert [(one.part, one.sample) for one in found] == [(name, f"{expressions}/manifest.json") for name in ("train", "val")]
    assert found[0].text.startswith("it has changed since it was generated, from 6 samples to 5: sha256 should be ")
    assert found[1].text == "it was generated, but it is not in the data"


@pytest.mark.parametrize("level", ["", "curv_contour_length_4"])
def test_an_image_that_is_lost_is_found_in_its_split_alone(level: str, images: Path) -> None:
    Path(pathfinder.load(images)["val"].name(0)).write_bytes(b"")
    path = images / level
    (with_loss,) = changes(path, pathfinder.load(path))
    assert with_loss.part == "val"
    assert "from 2 samples to 1" in with_loss.text


def test_another_level_beside_the_generated_one_is_not_compared(images: Path) -> None:
    (images / "curv_contour_length_4").rename(images / "curv_contour_length_5")
    assert changes(images, pathfinder.load(images)) == []


@pytest.mark.parametrize("text", ['{"format": "polaformer-generated-1"', '{"format": "polaformer-generated-1", "splits": [1]}'])
def test_a_damaged_manifest_is_a_problem(text: str, expressions: Path) -> None:
    splits = listops.load(expressions)
    (expressions / "manifest.json").write_text(text)
    (problem,) = changes(expressions, splits)
    assert (problem.part, problem.sample) == ("manifest", f"{expressions}/manifest.json")
    assert problem.text.startswith("it is damaged: ")
