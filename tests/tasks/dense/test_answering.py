"""The files that `predict --out` writes: each input has its own, and no input is overwritten."""

import os
from pathlib import Path

import pytest

from coco_files import write_image
from polaformer.errors import SettingsError
from polaformer.tasks.dense.answering import DrawnFiles, readable_images

ENDINGS = (".png", "-classes.png")


def test_files_of_different_inputs_have_different_names(tmp_path: Path) -> None:
    inputs = ["a.jpg", "more/a.png", "a-classes.png", "a.png"]
    files = DrawnFiles(tmp_path / "drawn", inputs, ENDINGS, "all.json")
    assert files.stems == ["a", "a-2", "a-classes-2", "a-3"]
    names = [stem + ending for stem in files.stems for ending in ENDINGS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["a.png", "a-classes.png", "all.json"])
def test_an_input_is_not_overwritten(tmp_path: Path, name: str) -> None:
    for one in {"a.png", name}:
        write_image(tmp_path / one, format="PNG")
    before = (tmp_path / name).read_bytes()
    inputs = ["elsewhere/a.png", str(tmp_path / name)]
    with pytest.raises(SettingsError, match=rf"would overwrite what is given: .*{name} is the input .*{name}; give another"):
        DrawnFiles(tmp_path, inputs, ENDINGS, "all.json")
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symlink", "hard link"])
def test_links_to_an_input_are_the_input(tmp_path: Path, link) -> None:
    image = write_image(tmp_path / "photos" / "a.png")
    (tmp_path / "drawn").mkdir()
    link(image, tmp_path / "drawn" / "a.png")
    with pytest.raises(SettingsError, match="would overwrite what is given"):
        DrawnFiles(tmp_path / "drawn", [str(image)], ENDINGS, "all.json")
    os.symlink(tmp_path / "photos", tmp_path / "same")
    with pytest.raises(SettingsError, match="would overwrite what is given"):
        DrawnFiles(tmp_path / "same", [str(image)], ENDINGS, "all.json")


def test_what_was_drawn_before_is_drawn_again(tmp_path: Path) -> None:
    image = write_image(tmp_path / "photos" / "a.jpg")
    write_image(tmp_path / "drawn" / "a.png")
    assert DrawnFiles(tmp_path / "drawn", [str(image)], ENDINGS, "all.json").stems == ["a"]


def test_inputs_that_cannot_be_read_are_named_and_counted(tmp_path: Path) -> None:
    image, unreadable, steps = write_image(tmp_path / "a.png"), list[str](), list[int]()
    inputs = [str(tmp_path / "gone.png"), str(image)]
    [(index, path, read)] = readable_images(inputs, unreadable, lambda: steps.append(1))
    assert (index, path, read.size) == (1, str(image), (60, 40))
    assert len(steps) == 2
    assert "gone.png" in unreadable[0]
