"""Row D1: folders are read in an order that depends on names alone, or refused with one DataError."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pictures import COUNTS, below, content, contents, files_of, names, refused, shuffled, write_folder
from polaformer.data.sources.opening import open_data
from polaformer.data.sources.source import DataSplits
from polaformer.errors import ImageError


def test_the_order_of_a_folder_does_not_depend_on_how_it_was_made_or_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_of(COUNTS)
    for root, order in (("one", files), ("two", shuffled(files))):
        write_folder(tmp_path / root, order)
        (tmp_path / root / "dog" / "linked").symlink_to("deep")  # the same images by two paths: one of them is used
    found = open_data(write_folder(tmp_path / "one", {}), val_share=0.3)
    assert names(found.train) == sorted(names(found.train), key=lambda name: (name.split("/")[0], name))
    scandir = os.scandir

    @contextmanager
    def in_another_order(folder: Any) -> Iterator[Any]:
        with scandir(folder) as entries:
            yield iter(sorted(entries, key=lambda entry: entry.name, reverse=True))

    monkeypatch.setattr(os, "scandir", in_another_order)
    for root in ("one", "two"):
        other = open_data(str(tmp_path / root), val_share=0.3)
        assert (names(other.train), names(other.val)) == (names(found.train), names(found.val))
        assert contents(other) == contents(found)


@pytest.mark.parametrize("train", ["train", "training"])
@pytest.mark.parametrize("val", ["val", "valid", "validation", "test"])
def test_folders_for_training_and_validation_are_known_by_their_names(train: str, val: str, tmp_path: Path) -> None:
    write_folder(tmp_path / train, files_of({"cat": 3, "dog": 3}))
    found = open_data(write_folder(tmp_path / val, files_of({"cat": 1, "dog": 2}, first=50)) and str(tmp_path))
    assert (found.classes, found.train.labels, found.val.labels) == (("cat", "dog"), [0, 0, 0, 1, 1, 1], [0, 1, 1])
    assert not {one for one, _ in contents(DataSplits(found.train, found.train))} & {
        one for one, _ in contents(DataSplits(found.val, found.val))
    }


def test_without_a_validation_part_a_share_is_held_out_by_name(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {f"{name}/{n}.png": b"" for name in ("cat", "dog") for n in range(1000)})
    found = open_data(root, val_share=0.2)
    assert sorted(names(found.train) + names(found.val)) == sorted(
        f"{name}/{n}.png" for name in ("cat", "dog") for n in range(1000)
    )
    assert 330 < len(found.val) < 470
    assert not set(names(found.train)) & set(names(found.val))


def test_images_that_come_later_do_not_move_others_between_the_parts(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {f"{name}/{n}.png": b"" for name in ("cat", "dog") for n in range(200)})
    before = open_data(root, val_share=0.2)
    write_folder(tmp_path, {f"{name}/{n}.png": b"" for name in ("ant", "cat") for n in range(200, 300)})
    after = open_data(root, val_share=0.2)
    assert set(names(before.train)) < set(names(after.train))
    assert set(names(before.val)) < set(names(after.val))


def test_a_larger_share_holds_out_the_same_images_and_more(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {f"{name}/{n}.png": b"" for name in ("cat", "dog") for n in range(200)})
    assert set(names(open_data(root, val_share=0.1).val)) < set(names(open_data(root, val_share=0.3).val))


def test_links_are_followed_but_not_round_in_circles(tmp_path: Path) -> None:
    train, elsewhere = tmp_path / "train", tmp_path / "elsewhere"
    write_folder(train, {"cat/1.png": content(1), "dog/2.png": content(2)})
    write_folder(elsewhere, {"3.png": content(3)})
    write_folder(tmp_path / "val", {f"{name}/1.png": content(4) for name in ("cat", "dog", "mouse")})
    (train / "cat" / "linked").symlink_to(elsewhere)
    (train / "cat" / "again").symlink_to(train / "cat")
    (train / "cat" / "up").symlink_to("..")  # all dogs would be cats
    (elsewhere / "back").symlink_to(train / "dog")
    (train / "cat" / "loop").symlink_to("loop")
    (train / "mouse").symlink_to(elsewhere)
    found = open_data(str(tmp_path)).train
    wanted = {"cat/1.png": 0, "cat/linked/3.png": 0, "cat/linked/back/2.png": 0}
    wanted |= {"dog/2.png": 1, "mouse/3.png": 2, "mouse/back/2.png": 2}
    assert dict(zip(names(found), found.labels, strict=True)) == wanted


def test_images_behind_links_to_files_and_to_folders_are_read(tmp_path: Path) -> None:
    write_folder(tmp_path / "store", {"blob": content(1), "dogs/2.png": content(2)})
    for part in ("train", "val"):
        (tmp_path / "data" / part / "cat").mkdir(parents=True)
        (tmp_path / "data" / part / "cat" / "1.png").symlink_to(tmp_path / "store" / "blob")
        (tmp_path / "data" / part / "dog").symlink_to(tmp_path / "store" / "dogs")
    (tmp_path / "link").symlink_to("data")
    found = open_data(str(tmp_path / "link"))
    assert contents(found) == [(content(1), 0), (content(2), 1)] * 2
    assert found.train.read(0, 3).size == (12, 9)


def test_a_dangling_link_and_a_link_to_itself_are_bad_images_and_no_more(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"cat/1.png": content(1), "dog/2.png": content(2)})
    write_folder(tmp_path / "val", {"cat/1.png": content(3), "dog/2.png": content(4)})
    (tmp_path / "train" / "cat" / "dangling.png").symlink_to("gone")
    (tmp_path / "train" / "cat" / "loop.png").symlink_to("loop.png")
    train = open_data(str(tmp_path)).train
    assert names(train) == ["cat/1.png", "cat/dangling.png", "cat/loop.png", "dog/2.png"]
    for index, reason in ((1, "No such file"), (2, "Too many levels")):
        for read in (train.content, lambda index: train.read(index, 3)):
            with pytest.raises(ImageError, match=f"{names(train)[index]} cannot be read: {reason}"):
                read(index)


def test_names_may_have_any_bytes_and_any_length(tmp_path: Path) -> None:
    odd = [b"new\nline.png", b"\xff\xfe not utf-8.png", b"a" * 251 + b".png", b"UPPER.PNG", "größe.jpeg".encode(), b"-x.png"]
    for part in ("train", "val"):
        for number, name in enumerate([b"cl\nass", b"\xff\xfe", b"b" * 255]):
            folder = os.path.join(os.fsencode(tmp_path), part.encode(), name)
            os.makedirs(folder)
            for seed, one in enumerate(odd):
                Path(os.fsdecode(os.path.join(folder, one))).write_bytes(content(seed + 10 * number))
    found = open_data(str(tmp_path))
    assert len(found.train) == 18
    assert len({one for one, _ in contents(DataSplits(found.train, found.train))}) == 18
    for name in names(found.train):
        assert name.encode().decode().isprintable()
    assert any("new\\nline.png" in name for name in names(found.train))
    assert {found.train.read(index, 1).size for index in range(18)} == {(12, 9)}


def test_hidden_folders_are_no_classes_and_other_files_no_images(tmp_path: Path) -> None:
    files = {"cat/1.png": content(1), "dog/2.png": content(2), "dog/notes.txt": b"", "dog/Thumbs.db": b"", "readme.png": b""}
    write_folder(tmp_path / "train", files | {".git/3.png": content(3)})
    write_folder(tmp_path / "val", files)
    found = open_data(str(tmp_path))
    assert found.classes == ("cat", "dog")
    assert names(found.train) == ["cat/1.png", "dog/2.png"]


Maker = Callable[[Path], str]
BAD_FOLDERS: dict[str, tuple[Maker, list[str]]] = {
    "an empty folder": (lambda root: write_folder(root, {}), ["has no class folders; put the images of each class into"]),
    "loose images": (
        lambda root: write_folder(root, {"1.png": b"", "2.png": b""}),
        ["has no class folders (the images in it have no class)"],
    ),
    "no images": (
        lambda root: write_folder(root, {"cat/1.txt": b"", "dog/2.txt": b""}),
        ["has class folders but no images in them", ".jpg"],
    ),
    "one class": (
        lambda root: write_folder(root, files_of({"cat": 30})),
        ["has 1 class (cat); at least two are needed"],
    ),
    "an empty class": (
        lambda root: write_folder(root, files_of({"cat": 30, "dog": 30}) | {"mouse/notes.txt": b""}),
        ["no training images of mouse; add some or remove the class"],
    ),
    "other classes for validation": (
        lambda root: write_folder(
            root, below("train", files_of({"cat": 2, "dog": 2})) | below("val", files_of({"cat": 2, "ox": 2}))
        ),
        ["training and validation have different classes (dog, ox)"],
    ),
    "an empty validation folder": (
        lambda root: write_folder(root, below("train", files_of({"cat": 2, "dog": 2})) | {"val/notes.txt": b""}),
        ["val has no class folders"],
    ),
    "too few to hold any out": (
        lambda root: write_folder(root, {"cat/2.png": b"", "dog/2.png": b""}),
        ["there are no images to validate with", "--val-share"],
    ),
    "a folder and archives": (
        lambda root: write_folder(root, files_of({"cat": 3, "dog": 3}) | {"backup.tar": bytes(10240)}),
        ["holds both .tar files and image folders"],
    ),
    "a file": (
        lambda root: write_folder(root, {"notes.txt": b""}) + "/notes.txt",
        ["notes.txt is a file; give a folder of class"],
    ),
    "nothing there": (lambda root: str(root / "gone"), ["there is no data ", "gone; give a folder of class folders"]),
    "no name": (lambda root: "", ["there is no data without a name"]),
    "a name that is too long": (lambda root: "a" * 5000, ["cannot be read: File name too long"]),
    "a null byte": (lambda root: "a\0b", ["there is no data a\\x00b"]),
    "a link to itself": (
        lambda root: os.symlink(root / "loop", root / "loop") or str(root / "loop"),
        ["there is no data "],
    ),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_folder_that_cannot_be_used_is_one_error_with_path_reason_and_remedy(name: str, tmp_path: Path) -> None:
    make, told = BAD_FOLDERS[name]
    with refused(*told):
        open_data(make(tmp_path))


def test_a_folder_that_may_not_be_listed_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_folder(tmp_path, files_of({"cat": 3, "dog": 3}))

    def refuse(folder: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(os, "scandir", refuse)  # root may list everything
    with refused("cannot be listed: Permission denied; check the path and its permissions"):
        open_data(root)


def test_an_image_that_vanishes_is_one_error_when_it_is_read(tmp_path: Path) -> None:
    found = open_data(write_folder(tmp_path, files_of(COUNTS)), val_share=0.3)
    shutil.rmtree(tmp_path / "cat")
    with pytest.raises(ImageError, match=r"cat/.*\.png cannot be read: No such file or directory"):
        found.train.read(0, 3)
