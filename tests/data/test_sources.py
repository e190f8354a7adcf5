"""Rows D1 and X2: every kind of data is read in an order of its own, or refused with one DataError; nothing in it is run."""

import io
import os
import pickle
import random
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from polaformer.data.order import Order
from polaformer.data.samples import Samples, batches
from polaformer.data.sources import Data, Source, open_data
from polaformer.data.transforms import Preprocessing, training_transform
from polaformer.errors import DataError, ImageError

COUNTS = {"cat": 6, "cat-a": 5, "dog": 7}


def content(seed: int) -> bytes:
    """A small image of its own."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def files_of(counts: dict[str, int], first: int = 0, *, deep: bool = True) -> dict[str, bytes]:
    """Path below the root → bytes; some of them deeper than their class folder."""
    paths = [f"{name}/{'deep/er/' * (deep and n % 3 == 2)}{n}.png" for name, number in counts.items() for n in range(number)]
    return {path: content(first + seed) for seed, path in enumerate(paths)}


def write_folder(root: Path, files: dict[str, bytes]) -> str:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return str(root)


def write_tar(path: Path, files: dict[str, bytes]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return str(path)


def below(folder: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{name}": data for name, data in files.items()}


def shuffled(files: dict[str, bytes]) -> dict[str, bytes]:
    return dict(random.Random(0).sample(list(files.items()), len(files)))


def names(source: Source) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def listing(root: Path) -> list[tuple[str, bytes]]:
    return sorted((str(path), path.read_bytes() if path.is_file() else b"") for path in root.rglob("*"))


def contents(data: Data) -> list[tuple[bytes, int]]:
    """What is in both parts, one after the other."""
    return [(part.content(index), part.labels[index]) for part in (data.train, data.val) for index in range(len(part))]


@contextmanager
def refused(*told: str) -> Iterator[None]:
    with pytest.raises(DataError) as caught:
        yield
    for text in told:
        assert text in str(caught.value)


# Folders


def test_the_order_of_a_folder_does_not_depend_on_how_it_was_made_or_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_of(COUNTS)
    for root, order in (("one", files), ("two", shuffled(files))):
        write_folder(tmp_path / root, order)
        (tmp_path / root / "dog" / "linked").symlink_to("deep")  # the same images by two ways: one of them is taken
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
    assert not {one for one, _ in contents(Data(found.train, found.train))} & {
        one for one, _ in contents(Data(found.val, found.val))
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
    assert len({one for one, _ in contents(Data(found.train, found.train))}) == 18
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
        ["holds .tar files and folders of images"],
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


# Archives


def first_batches(data: Data) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two epochs of augmented batches."""
    preprocessing = Preprocessing((8, 8), (0.5,) * 3, (0.25,) * 3)
    transform = training_transform(
        preprocessing,
        scale=(0.3, 1.0),
        ratio=(0.8, 1.2),
        hflip=0.5,
        color_jitter=0.4,
        augmentation="rand-m9-mstd0.5-inc1",
        erase_prob=0.5,
        interpolation="random",
    )
    samples = Samples(data.train, transform, channels=3, seed=3)
    order = Order(len(data.train), 4, seed=3)
    steps = range(2 * order.steps_per_epoch)
    return [(batch.images, batch.labels) for batch in batches(samples, (order.batch(step) for step in steps))]


LAYOUTS: dict[str, Callable[[Path, dict[str, bytes], dict[str, bytes]], str]] = {
    "a tar of train and val": lambda root, train, val: write_tar(root / "all.tar", below("train", train) | below("val", val)),
    "a tar with a folder around": lambda root, train, val: write_tar(
        root / "all.tar", shuffled(below("./photos/2026/training", train) | below("./photos/2026/test", val))
    ),
    "a tar each": lambda root, train, val: (
        write_tar(root / "train" / "a.tar", shuffled(train)) and write_tar(root / "val" / "a.tar", val) and str(root)
    ),
    "shards with class folders": lambda root, train, val: (
        write_tar(root / "train-0.tar", dict(list(train.items())[::2]))
        and write_tar(root / "train-1.tar", dict(list(train.items())[1::2]))
        and write_tar(root / "validation-0.tar", val)
        and str(root)
    ),
    "a tar a class": lambda root, train, val: (
        [
            write_tar(
                root / part / f"{name}.tar",
                {path.split("/")[1]: data for path, data in files.items() if path.startswith(f"{name}/")},
            )
            for part, files in (("train", train), ("val", val))
            for name in COUNTS
        ]
        and str(root)
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_from_archives_equals_training_from_folders_to_the_last_bit(layout: str, tmp_path: Path) -> None:
    train, val = (files_of(COUNTS, first, deep=layout != "a tar a class") for first in (0, 100))
    write_folder(tmp_path / "folders" / "train", train)
    write_folder(tmp_path / "folders" / "val", val)
    one, other = open_data(str(tmp_path / "folders")), open_data(LAYOUTS[layout](tmp_path / "archives", train, val))
    assert one.classes == other.classes == ("cat", "cat-a", "dog")
    assert contents(one) == contents(other)
    for (images, labels), (other_images, other_labels) in zip(first_batches(one), first_batches(other), strict=True):
        assert torch.equal(images, other_images)
        assert torch.equal(labels, other_labels)


def test_a_tar_without_parts_holds_some_of_its_images_out(tmp_path: Path) -> None:
    found = open_data(write_tar(tmp_path / "all.tar", files_of({"cat": 60, "dog": 60})), val_share=0.3)
    assert sorted(names(found.train) + names(found.val)) == sorted(
        f"all.tar/{name}" for name in files_of({"cat": 60, "dog": 60})
    )
    assert 15 < len(found.val) < 60


def test_of_two_files_of_one_name_the_last_is_taken_as_when_unpacked(tmp_path: Path) -> None:
    files = below("train", {"cat/1.png": content(1), "dog/2.png": content(2)}) | {
        "val/cat/1.png": content(3),
        "val/dog/1.png": content(4),
    }
    write_tar(tmp_path / "all.tar", files)
    with tarfile.open(tmp_path / "all.tar", "a") as archive:
        info = tarfile.TarInfo("train/cat/1.png")
        info.size = len(content(5))
        archive.addfile(info, io.BytesIO(content(5)))
    train = open_data(str(tmp_path / "all.tar")).train
    assert (names(train), train.content(0)) == (["all.tar/train/cat/1.png", "all.tar/train/dog/2.png"], content(5))


@pytest.mark.parametrize("named", [False, True])
def test_webdataset_shards_are_read_with_the_labels_beside_the_images(named: bool, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    classes = ("cat", "dog", "mouse")
    wanted = []
    for shard, first in (("train-000000", 0), ("train-000001", 6), ("val-000000", 12)):
        with webdataset.TarWriter(str(tmp_path / f"{shard}.tar")) as writer:
            for seed in range(first, first + 6):
                label = classes[seed % 3] if named else seed % 3
                writer.write({"__key__": f"sample{seed:03d}", "png": content(seed), "cls": label, "json": {"n": seed}})
                wanted.append((content(seed), seed % 3))
    found = open_data(str(tmp_path))
    assert found.classes == (classes if named else ("0", "1", "2"))
    assert (len(found.train), len(found.val)) == (12, 6)
    assert contents(found) == wanted
    assert found.val.name(0) == "val-000000.tar/sample012.png"


def labelled(*labels: str) -> dict[str, bytes]:
    return {
        f"{n}.{kind}": data for n, label in enumerate(labels) for kind, data in (("png", content(n)), ("cls", label.encode()))
    }


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (("0", ""), "1.cls is empty; write the number or the name of the class into it"),
        (("0", "dog") * 10, "some classes are numbers and some are names"),
        (("0", "2") * 10, "no training images of 1; add some or remove the class"),
        (("0", "999999") * 10, "no training images of 1, 2, 3, 4, 5, …"),
        (("0", "1000000000000") * 10, "some classes are numbers and some are names"),
        (("0", "-1") * 10, "some classes are numbers and some are names"),
    ],
)
def test_labels_that_make_no_sense_are_refused(labels: tuple[str, ...], told: str, tmp_path: Path) -> None:
    with refused(told):
        open_data(write_tar(tmp_path / "shard.tar", labelled(*labels)), val_share=0.3)


def test_numbers_of_classes_are_places_in_their_list(tmp_path: Path) -> None:
    found = open_data(write_tar(tmp_path / "shard.tar", labelled(*[str(n % 12) for n in range(60)])), val_share=0.2)
    assert found.classes == tuple(str(n) for n in range(12))
    assert {found.train.content(i): found.train.labels[i] for i in range(len(found.train))}.items() <= {
        content(n): n % 12 for n in range(60)
    }.items()


def test_a_tar_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = Path(write_tar(tmp_path / "all.tar", files_of({"cat": 10, "dog": 10})))
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0"))
    end += -end % 512
    open_data(str(path))
    for cut in sorted({*range(0, end + 1, 512), *(end * n // 40 for n in range(40))}):
        path.write_bytes(whole[:cut])
        with refused("all.tar is no whole, uncompressed .tar", "write or fetch it again"):
            open_data(str(path))


def test_a_tar_with_a_damaged_header_is_refused_and_not_read_up_to_there(tmp_path: Path) -> None:
    path = Path(write_tar(tmp_path / "all.tar", files_of({"cat": 10, "dog": 10})))
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        headers = [info.offset for info in archive]
    for place in headers[1:]:
        path.write_bytes(whole[:place] + b"?" + whole[place + 1 :])
        with refused(f"all.tar is no whole, uncompressed .tar: it is damaged, or cut off, at byte {place}"):
            open_data(str(path))


@pytest.mark.parametrize("mode", ["gz", "bz2", "xz"])
def test_a_compressed_tar_is_refused_whatever_its_name(mode: str, tmp_path: Path) -> None:
    plain = Path(write_tar(tmp_path / "plain.tar", files_of(COUNTS)))
    for name in ("all.tar", f"all.tar.{mode}"):
        with tarfile.open(tmp_path / name, f"w:{mode}") as archive:
            archive.add(plain)
    with refused("all.tar is no whole, uncompressed .tar"):
        open_data(str(tmp_path / "all.tar"))
    with refused(f"all.tar.{mode} is a file; give a folder of class folders, a .tar"):
        open_data(str(tmp_path / f"all.tar.{mode}"))


def test_an_archive_that_changes_after_it_was_opened_gives_errors_of_images(tmp_path: Path) -> None:
    path = Path(write_tar(tmp_path / "all.tar", files_of(COUNTS)))
    found = open_data(str(path), val_share=0.3).train
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ImageError, match=r"all.tar/dog/.* is cut short: .*all.tar ends inside it; fetch the archive again"):
        found.read(len(found) - 1, 3)
    path.unlink()
    with pytest.raises(ImageError, match=r"all.tar/cat/.* cannot be read: No such file"):
        found.read(0, 3)


# Row X2: hostile archives

BLOCK = 512


def header(name: str = "cat/1.png", size: int | bytes = 0, kind: bytes = b"0", link: str = "") -> bytes:
    field = size if isinstance(size, bytes) else b"%011o\0" % size
    parts = (name.encode().ljust(100, b"\0"), b"0000644\0" + b"0000000\0" * 2, field, b"00000000000\0", b" " * 8, kind)
    block = bytearray(b"".join([*parts, link.encode().ljust(100, b"\0"), b"ustar\00000"]).ljust(BLOCK, b"\0"))
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def pax(**fields: str) -> bytes:
    lines = b""
    for name, value in fields.items():
        rest = f" {name}={value}\n".encode()
        length = next(n for n in range(len(rest), len(rest) + 20) if n == len(rest) + len(str(n)))
        lines += str(length).encode() + rest
    return header("pax", len(lines), b"x") + padded(lines)


END = bytes(2 * BLOCK)
HUGE = b"\x80" + (2**62).to_bytes(11, "big")
NEGATIVE = b"\xff" + (256**11 - 1024).to_bytes(11, "big")
IMAGE = header(size=len(content(0))) + padded(content(0))
HOSTILE: dict[str, bytes] = {
    "a file larger than the archive": header(size=8**11 - 1) + END,
    "a file larger than any disk": header(size=HUGE) + END,
    "a negative size": IMAGE + header("cat/2.png", NEGATIVE) + END,
    "a negative size in an extended header": IMAGE + pax(size="-1024") + header("cat/2.png") + END,
    "a negative size that leads back for ever": IMAGE + pax(size=str(-3 * BLOCK)) + header("cat/2.png") + END,
    "a huge size in an extended header": pax(size="9" * 30) + header() + END,
    "names of names without end": (header("././@LongLink", 5, b"L") + padded(b"a.png")) * 3000 + IMAGE + END,
    "extended headers without end": pax(path="cat/9.png") * 3000 + IMAGE + END,
    "a name larger than any memory": header("././@LongLink", HUGE, b"L") + padded(b"a.png") + END,
    "a map of holes that is none": pax(**{"GNU.sparse.map": "0,a"}) + IMAGE + END,
    "no archive": b"hello",
    "an empty file": b"",
    "zeros": bytes(10240),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_one_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "all.tar").write_bytes(HOSTILE[name])
    with refused("all.tar "):
        open_data(str(tmp_path / "all.tar"))


def test_nothing_in_an_archive_is_written_anywhere_or_read_from_outside(tmp_path: Path) -> None:
    secret = Path(write_folder(tmp_path, {"secret.png": content(99)})) / "secret.png"
    inside = ["train/cat/0.png", "train/dog/1.png", "val/cat/2.png", "val/dog/3.png"]
    climbing = ["../train/cat/4.png", "train/cat/../../../../5.png", "/train/dog/6.png", "//train/dog//../7.png"]
    entries = b""
    for n, name in enumerate([*inside, *climbing, f"{tmp_path}/evil.png", "../../evil.png"]):
        entries += header(name, len(content(n))) + padded(content(n))
    entries += header("train/cat/link.png", 0, b"2", str(secret)) + header("train/cat/hard.png", 0, b"1", str(secret))
    entries += header("train/cat/device.png", 0, b"3") + header("train/cat/pipe.png", 0, b"6") + header("train/x.png", 0, b"5")
    entries += header("train/dog/same.png", 0, b"1", "train/cat/0.png")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "all.tar").write_bytes(entries + END)
    before = listing(tmp_path)
    found = open_data(str(tmp_path / "inside" / "all.tar"))
    read = contents(found)
    assert listing(tmp_path) == before
    # A file that is stored once under two names counts twice; nothing else that is no file counts.
    wanted = [(content(n), n in (1, 3, 6, 7)) for n in range(8)] + [(content(0), True)]
    assert sorted(read) == sorted(wanted)


# Arrays


def arrays(**changes: Any) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    good = {"x_train": draw.integers(0, 256, (6, 5, 4, 3), dtype=np.uint8), "y_train": np.array([0, 1, 2, 0, 1, 2])}
    good |= {"x_test": draw.integers(0, 256, (2, 5, 4, 3), dtype=np.uint8), "y_test": np.array([2, 0])}
    return {name: value for name, value in (good | changes).items() if value is not None}


def write_arrays(path: Path, **changes: Any) -> str:
    np.savez(path, **arrays(**changes))
    return str(path)


def test_an_array_file_gives_its_images_labels_and_classes(tmp_path: Path) -> None:
    found = open_data(write_arrays(tmp_path / "a.npz", classes=np.array(["ant", "bee", "cat", "dog"][:3])))
    assert (found.classes, found.train.labels, found.val.labels) == (("ant", "bee", "cat"), [0, 1, 2, 0, 1, 2], [2, 0])
    assert np.array_equal(np.asarray(found.train.read(4, 3)), arrays()["x_train"][4])
    assert (found.train.name(4), found.val.name(1)) == ("train/4", "test/1")
    assert found.train.content(4) == arrays()["x_train"][4].tobytes()


def test_an_array_file_may_be_grey_compressed_and_without_a_test_part(tmp_path: Path) -> None:
    grey = np.arange(100 * 4 * 4, dtype=np.uint8).reshape(100, 4, 4)
    np.savez_compressed(tmp_path / "a.npz", x_train=grey, y_train=np.arange(100, dtype=np.uint8) % 2)
    found = open_data(str(tmp_path / "a.npz"))
    assert (len(found.train) + len(found.val), found.classes) == (100, ("0", "1"))
    assert found.val.name(0).startswith("train/")
    place = int(found.train.name(3).split("/")[1])
    assert np.array_equal(np.asarray(found.train.read(3, 1)), grey[place])


BAD_ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "no images": ({"x_train": None}, "has no x_train; it needs x_train and y_train"),
    "nothing": ({"x_train": None, "y_train": None}, "has no x_train and no y_train"),
    "test images without labels": ({"y_test": None}, "has only one of x_test and y_test; give both"),
    "numbers with a point": (
        {"x_train": np.zeros((6, 5, 4, 3))},
        "x_train is float64 of shape (6, 5, 4, 3); give bytes (uint8)",
    ),
    "two channels": ({"x_train": np.zeros((6, 5, 4, 2), np.uint8)}, "of shape (6, 5, 4, 2); give bytes (uint8) of shape"),
    "channels first": ({"x_train": np.zeros((6, 3, 5, 4), np.uint8)}, "of shape (6, 3, 5, 4); give bytes"),
    "flat images": ({"x_train": np.zeros((6, 20), np.uint8)}, "of shape (6, 20); give bytes"),
    "one number": ({"x_train": np.uint8(3)}, "of shape (); give bytes"),
    "images without pixels": ({"x_train": np.zeros((6, 0, 4), np.uint8)}, "of shape (6, 0, 4); give bytes"),
    "bad test images": ({"x_test": np.zeros((2, 5), np.uint8)}, "x_test is uint8 of shape (2, 5); give bytes"),
    "no images at all": (
        {"x_train": np.zeros((0, 5, 4), np.uint8), "y_train": np.zeros(0, int)},
        "there are no images to train with",
    ),
    "too few labels": ({"y_train": np.zeros(5, int)}, "y_train is int64 of shape (5,); give 6 whole numbers of at least 0"),
    "labels with a point": ({"y_train": np.zeros(6)}, "y_train is float64 of shape (6,); give 6 whole numbers"),
    "labels in a column": ({"y_train": np.zeros((6, 1), int)}, "of shape (6, 1); give 6 whole numbers"),
    "truth values": ({"y_train": np.zeros(6, bool)}, "y_train is bool of shape (6,); give 6 whole numbers"),
    "texts": ({"y_train": np.array(list("abcabc"))}, "give 6 whole numbers of at least 0"),
    "a negative label": ({"y_train": np.array([0, 1, 2, 0, 1, -1])}, "give 6 whole numbers of at least 0"),
    "a label beyond all classes": (
        {"y_train": np.array([0, 1, 2, 0, 1, 2**60])},
        "has the label 1152921504606846976; give whole",
    ),
    "an unsigned label beyond all": (
        {"y_train": np.array([0, 1, 2, 0, 1, 2**64 - 1], np.uint64)},
        "has the label 18446744073709551615",
    ),
    "a class without images": ({"y_train": np.array([0, 3, 2, 0, 3, 2])}, "no training images of 1"),
    "one class": ({"y_train": np.zeros(6, int), "y_test": np.zeros(2, int)}, "has 1 class (0); at least two are needed"),
    "too few names": (
        {"classes": np.array(["a", "b"])},
        "classes has shape (2,), but there is the label 2; give a list of at least 3",
    ),
    "one name": ({"classes": np.array("abc")}, "classes has shape (), but there is the label 2"),
    "a table of names": ({"classes": np.array([["a", "b", "c"]])}, "classes has shape (1, 3)"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_arrays_that_cannot_be_used_are_one_error(name: str, tmp_path: Path) -> None:
    changes, told = BAD_ARRAYS[name]
    with refused(f"{tmp_path}/a.npz", told):
        open_data(write_arrays(tmp_path / "a.npz", **changes))


class Payload:
    """Leaves a file behind if it is ever unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("where", ["x_train", "y_train", "classes", "a bare pickle", "an array file of one"])
def test_nothing_in_an_array_file_is_unpickled(where: str, tmp_path: Path) -> None:
    hostile = np.array([Payload(tmp_path / "executed")] * 6, dtype=object)
    path = tmp_path / "a.npz"
    if where == "a bare pickle":
        path.write_bytes(pickle.dumps(Payload(tmp_path / "executed")))
    elif where == "an array file of one":
        with open(path, "wb") as file:
            np.save(file, hostile, allow_pickle=True)
    else:
        write_arrays(path, **{where: hostile})
    with refused("a.npz is no whole .npz of plain arrays", "write it again with numpy.savez"):
        open_data(str(path))
    assert not (tmp_path / "executed").exists()


def test_an_array_file_that_is_cut_or_changed_is_one_error_or_whole(tmp_path: Path) -> None:
    path, draw = Path(write_arrays(tmp_path / "a.npz")), random.Random(0)
    whole = path.read_bytes()
    for cut in (len(whole) * n // 40 for n in range(40)):
        path.write_bytes(whole[:cut])
        with refused("a.npz is no whole .npz of plain arrays"):
            open_data(str(path))
    for _ in range(300):
        changed = bytearray(whole)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            open_data(str(path))
        except DataError as error:
            assert "a.npz" in str(error)  # noqa: PT017, a file may be whole all the same


def npy(shape: tuple[int, ...], data: bytes = b"") -> bytes:
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def zipped(data: bytes, place: int = 0, mask: bytes = b"") -> bytes:
    """A zip archive with x_train.npy in it, some bits of its entry in the list of contents set."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x_train.npy", data)
    found = bytearray(file.getvalue())
    start = found.index(b"PK\1\2") + place
    found[start : start + len(mask)] = bytes(a | b for a, b in zip(found[start:], mask, strict=False))
    return bytes(found)


NO_ARRAYS = {
    "a single array": (npy((2, 3), bytes(6)), "is not a zip file"),
    "text": (b"hello", "is not a zip file"),
    "a lie about its shape": (zipped(npy((10**9, 1000, 1000))), "is no whole .npz of plain arrays"),
    "a bomb": (zipped(npy((9, 9), bytes(81)), 24, b"\0\0\0\xf0"), "unpacked it would have 4,026,53"),
    "a password": (zipped(npy((9, 9), bytes(81)), 8, b"\1"), "is no whole .npz of plain arrays"),
    "an unknown compression": (zipped(npy((9, 9), bytes(81)), 10, b"\x7f"), "is no whole .npz of plain arrays"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", NO_ARRAYS)
def test_an_array_file_that_is_none_is_one_error(kind: str, tmp_path: Path) -> None:
    data, told = NO_ARRAYS[kind]
    (tmp_path / "a.npz").write_bytes(data)
    with refused("a.npz is no whole .npz of plain arrays", told, "write it again with numpy.savez"):
        open_data(str(tmp_path / "a.npz"))


# Data sets in the form of Hugging Face


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.mark.usefixtures("_offline")
def test_a_hugging_face_data_set_is_read_from_its_folder(tmp_path: Path) -> None:
    root, train, test = tmp_path / "set", files_of({"cat": 3, "dog": 2}, deep=False), files_of({"cat": 1, "dog": 1}, first=20)
    write_folder(root / "train", train)
    write_folder(root / "test", test)
    found = open_data(f"hfds:{root}")
    assert (found.classes, found.train.labels, found.val.labels) == (("cat", "dog"), [0, 0, 0, 1, 1], [0, 1])
    assert sorted(one for one, _ in contents(found)) == sorted([*train.values(), *test.values()])
    assert found.train.read(0, 1).size == (12, 9)
    assert (found.train.name(4), found.val.name(0)) == ("train/4", "test/0")


def write_parquet(root: Path, split: str, columns: dict[str, Any], **kinds: Any) -> None:
    import datasets

    (root / "data").mkdir(parents=True, exist_ok=True)
    rows = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    rows.to_parquet(root / "data" / f"{split}-00000-of-00001.parquet")


@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize(
    "kind", ["no labels", "labels without names", "unlabelled", "other names", "cut", "only a test part", "empty"]
)
def test_a_hugging_face_data_set_that_cannot_be_used_is_one_error(kind: str, tmp_path: Path) -> None:
    import datasets

    root, classes = tmp_path / "set", datasets.ClassLabel(names=["cat", "dog"])
    image, images = datasets.Image(), [{"bytes": content(n), "path": None} for n in range(2)]
    root.mkdir()
    told = "has no column 'image' of images and 'label' of classes"
    if kind == "no labels":
        write_parquet(root, "train", {"image": images}, image=image)
    elif kind == "labels without names":
        write_parquet(root, "train", {"image": images, "label": [0, 1]}, image=image, label=datasets.Value("int64"))
    elif kind == "unlabelled":
        write_parquet(root, "train", {"image": images, "label": [0, -1]}, image=image, label=classes)
        told = "1 images have no label, first train/1; remove or label them"
    elif kind == "other names":
        write_parquet(root, "train", {"img": images, "label": [0, 1]}, img=image, label=classes)
    elif kind == "cut":
        write_parquet(root, "train", {"image": images, "label": [0, 1]}, image=image, label=classes)
        path = next((root / "data").iterdir())
        path.write_bytes(path.read_bytes()[:200])
        told = "is no data set that the package `datasets` can read"
    elif kind == "only a test part":
        write_parquet(root, "test", {"image": images, "label": [0, 1]}, image=image, label=classes)
        told = "has the splits test; a split 'train' is needed"
    else:
        told = "is no data set that the package `datasets` can read"
    with refused(str(root), told):
        open_data(f"hfds:{root}")


def test_a_hugging_face_data_set_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    with refused(f"there is no folder {tmp_path}/gone; download the data set first, and give its folder after hfds:"):
        open_data(f"hfds:{tmp_path}/gone")


@pytest.mark.usefixtures("_offline")
def test_a_missing_image_of_a_hugging_face_data_set_is_one_error_when_it_is_read(tmp_path: Path) -> None:
    import datasets

    images = [{"bytes": content(0), "path": None}, None, {"bytes": b"broken", "path": None}]
    for split in ("train", "validation"):
        columns = {"image": images, "label": [0, 1, 1]}
        write_parquet(tmp_path / "set", split, columns, image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog"]))
    found = open_data(f"hfds:{tmp_path}/set").train
    assert found.read(0, 3).size == (12, 9)
    with pytest.raises(ImageError, match="train/1 cannot be read: it is missing; check the data set"):
        found.read(1, 3)
    with pytest.raises(ImageError, match="train/2 is no image that can be read"):
        found.read(2, 3)


# The bundled digits


def test_the_digits_are_split_once_and_for_all() -> None:
    found = open_data("digits")
    assert (len(found.train), len(found.val), found.classes) == (1437, 360, tuple("0123456789"))
    assert found.val.labels[:12] == [6, 6, 6, 2, 5, 6, 6, 2, 2, 1, 1, 9]
    assert {one.read(0, 1).size for one in (found.train, found.val)} == {(8, 8)}
    assert (names(found.train)[:2], names(found.val)[:2]) == (["train/0", "train/1"], ["test/0", "test/1"])
    assert contents(open_data("digits", val_share=0.5)) == contents(found)


def test_no_digit_is_in_both_parts() -> None:
    found = open_data("digits")
    train, val = ([part.content(index) for index in range(len(part))] for part in (found.train, found.val))
    assert len({*train, *val}) == 1797
    assert not {*train} & {*val}
