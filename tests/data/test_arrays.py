"""Rows D1 and X1: array files are read completely, or refused with one DataError; nothing in them is unpickled."""

import io
import pickle
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pictures import refused
from polaformer.data.sources.opening import open_data
from polaformer.errors import DataError


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
        "x_train is float64 of shape (6, 5, 4, 3); give uint8 of shape",
    ),
    "two channels": ({"x_train": np.zeros((6, 5, 4, 2), np.uint8)}, "of shape (6, 5, 4, 2); give uint8 of shape"),
    "channels first": ({"x_train": np.zeros((6, 3, 5, 4), np.uint8)}, "of shape (6, 3, 5, 4); give uint8 of shape"),
    "flat images": ({"x_train": np.zeros((6, 20), np.uint8)}, "of shape (6, 20); give uint8 of shape"),
    "one number": ({"x_train": np.uint8(3)}, "of shape (); give uint8 of shape"),
    "images without pixels": ({"x_train": np.zeros((6, 0, 4), np.uint8)}, "of shape (6, 0, 4); give uint8 of shape"),
    "bad test images": ({"x_test": np.zeros((2, 5), np.uint8)}, "x_test is uint8 of shape (2, 5); give uint8 of shape"),
    "no images at all": (
        {"x_train": np.zeros((0, 5, 4), np.uint8), "y_train": np.zeros(0, int)},
        "there are no images to train with",
    ),
    "too few labels": ({"y_train": np.zeros(5, int)}, "y_train is int64 of shape (5,); give 6 integers ≥ 0"),
    "labels with a point": ({"y_train": np.zeros(6)}, "y_train is float64 of shape (6,); give 6 integers"),
    "labels in a column": ({"y_train": np.zeros((6, 1), int)}, "of shape (6, 1); give 6 integers"),
    "truth values": ({"y_train": np.zeros(6, bool)}, "y_train is bool of shape (6,); give 6 integers"),
    "texts": ({"y_train": np.array(list("abcabc"))}, "give 6 integers ≥ 0"),
    "a negative label": ({"y_train": np.array([0, 1, 2, 0, 1, -1])}, "give 6 integers ≥ 0"),
    "a label beyond all classes": (
        {"y_train": np.array([0, 1, 2, 0, 1, 2**60])},
        "has the label 1152921504606846976; give integers",
    ),
    "an unsigned label beyond all": (
        {"y_train": np.array([0, 1, 2, 0, 1, 2**64 - 1], np.uint64)},
        "has the label 18446744073709551615",
    ),
    "a class without images": ({"y_train": np.array([0, 3, 2, 0, 3, 2])}, "no training images of 1"),
    "one class": ({"y_train": np.zeros(6, int), "y_test": np.zeros(2, int)}, "has 1 class (0); at least two are needed"),
    "too few names": (
        {"classes": np.array(["a", "b"])},
        "classes has shape (2,) and type <U1, but the largest label is 2; give a list of 3 to 1,000,000 names (strings)",
    ),
    "one name": ({"classes": np.array("abc")}, "classes has shape () and type <U3, but the largest label is 2"),
    "a table of names": ({"classes": np.array([["a", "b", "c"]])}, "classes has shape (1, 3)"),
    "numbers as names": ({"classes": np.arange(3)}, "classes has shape (3,) and type int64"),
    "bytes as names": ({"classes": np.array([b"a", b"b", b"c"])}, "classes has shape (3,) and type |S1"),
    "too many names": ({"classes": np.full(10**6 + 1, "a")}, "classes has shape (1000001,) and type <U1"),
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
    with refused("a.npz is not a complete .npz of plain arrays", "write it again with numpy.savez"):
        open_data(str(path))
    assert not (tmp_path / "executed").exists()


def test_an_array_file_that_is_cut_or_changed_is_one_error_or_whole(tmp_path: Path) -> None:
    path, draw = Path(write_arrays(tmp_path / "a.npz")), random.Random(0)
    whole = path.read_bytes()
    for cut in (len(whole) * n // 40 for n in range(40)):
        path.write_bytes(whole[:cut])
        with refused("a.npz is not a complete .npz of plain arrays"):
            open_data(str(path))
    for _ in range(300):
        changed = bytearray(whole)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            open_data(str(path))
        except DataError as error:
            assert "a.npz" in str(error)  # noqa: PT017, a file may still be intact


@pytest.mark.timeout(20)
def test_an_array_file_larger_than_memory_should_hold_is_not_read(tmp_path: Path) -> None:
    """A file of a few kilobytes on disk: most of it is a hole."""
    path, size = tmp_path / "a.npz", 2**31
    start = npy((size,))
    with zipfile.ZipFile(path, "w") as archive, archive.open("x_train.npy", "w", force_zip64=True) as member:
        member.write(start)
    stored = path.read_bytes()
    place = stored.index(b"PK\1\2")
    listed = bytearray(stored[place:])
    listed[20:28] = struct.pack("<2I", len(start) + size, len(start) + size)
    listed[-6:-2] = struct.pack("<I", place + size)
    with open(path, "wb") as file:
        file.write(stored[:place])
        file.seek(place + size)
        file.write(listed)
    assert path.stat().st_blocks * 512 < 2**20
    with refused("a.npz is not a complete", f"it unpacks to {len(start) + size:,} bytes, more than the 1,073,741,824"):
        open_data(str(path))


@pytest.mark.parametrize("kind", ["<U0", "|S0", "|V0", "no array"])
def test_an_array_that_takes_more_memory_than_its_file_holds_is_one_error(kind: str, tmp_path: Path) -> None:
    """NumPy reads nothing for items of zero bytes, and then gives each of them some."""
    path = tmp_path / "a.npz"
    write_arrays(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("classes.npy", b"ant bee cat" if kind == "no array" else npy((1000,), kind=kind))
    with refused("a.npz is not a complete .npz of plain arrays: classes is not a complete array"):
        open_data(str(path))


def test_an_array_file_with_the_end_of_a_large_one_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 4 GiB, or many arrays, the central directory is followed by another record."""
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    path = write_arrays(tmp_path / "a.npz")
    monkeypatch.undo()
    assert b"PK\6\6" in Path(path).read_bytes()
    assert len(open_data(path).train) == 6


def test_stored_arrays_may_be_as_large_as_the_file_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polaformer.data.sources.arrays.MAX_BYTES", 1000)
    arrays = {"x_train": np.zeros((20, 8, 8), np.uint8), "y_train": np.arange(20) % 2}
    np.savez(tmp_path / "stored.npz", **arrays)  # type: ignore[arg-type]
    assert len(open_data(str(tmp_path / "stored.npz")).train) + len(open_data(str(tmp_path / "stored.npz")).val) == 20
    np.savez_compressed(tmp_path / "packed.npz", x_train=np.zeros((20, 99, 99), np.uint8), y_train=arrays["y_train"])
    with refused("packed.npz is not a complete", "allowed"):
        open_data(str(tmp_path / "packed.npz"))


def npy(shape: tuple[int, ...], data: bytes = b"", kind: str = "|u1") -> bytes:
    text = f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {shape}}}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def zipped(data: bytes, place: int = 0, mask: bytes = b"") -> bytes:
    """A zip archive with x_train.npy in it, with some bits of its entry in the central directory set."""
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
    "a lie about its shape": (zipped(npy((10**9, 1000, 1000))), "is not a complete .npz of plain arrays"),
    "a bomb": (zipped(npy((9, 9), bytes(81)), 24, b"\0\0\0\xf0"), "it unpacks to 4,026,53"),
    "a password": (zipped(npy((9, 9), bytes(81)), 8, b"\1"), "is not a complete .npz of plain arrays"),
    "an unknown compression": (zipped(npy((9, 9), bytes(81)), 10, b"\x7f"), "is not a complete .npz of plain arrays"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", NO_ARRAYS)
def test_an_array_file_that_is_none_is_one_error(kind: str, tmp_path: Path) -> None:
    data, told = NO_ARRAYS[kind]
    (tmp_path / "a.npz").write_bytes(data)
    with refused("a.npz is not a complete .npz of plain arrays", told, "write it again with numpy.savez"):
        open_data(str(tmp_path / "a.npz"))
