"""Rows D1 and X2: .tar files train like folders, or are refused with one DataError; nothing in them is unpacked to disk."""

import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from commands import run
from pictures import COUNTS, below, content, contents, files_of, listing, names, refused, shuffled, write_folder, write_tar
from polaformer.data.labelled_images import ImageReader
from polaformer.data.order import Order
from polaformer.data.samples import Samples, batches
from polaformer.data.sources.opening import open_data
from polaformer.data.sources.source import DataSplits
from polaformer.data.transforms import Preprocessing, training_transform
from polaformer.errors import ImageError


def first_batches(data: DataSplits) -> list[tuple[torch.Tensor, torch.Tensor]]:
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
    samples = Samples(ImageReader(data.train, transform, channels=3), seed=3)
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
        (("0", "dog") * 10, "some labels are numbers and some are names"),
        (("0", "2") * 10, "no training images of 1; add some or remove the class"),
        (("0", "999999") * 10, "no training images of 1, 2, 3, 4, 5, …"),
        (("0", "1000000000000") * 10, "some labels are numbers and some are names"),
        (("0", "-1") * 10, "some labels are numbers and some are names"),
        (("cat", "dog" * 400) * 10, "1.cls cannot be read: it has 1,200 bytes, more than the 1,000 allowed"),
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
        with refused("all.tar is not a complete, uncompressed .tar", "write or fetch it again"):
            open_data(str(path))


def test_a_tar_with_a_damaged_header_is_refused_and_not_read_up_to_there(tmp_path: Path) -> None:
    path = Path(write_tar(tmp_path / "all.tar", files_of({"cat": 10, "dog": 10})))
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        headers = [info.offset for info in archive]
    for place in headers[1:]:
        path.write_bytes(whole[:place] + b"?" + whole[place + 1 :])
        with refused(f"all.tar is not a complete, uncompressed .tar: it is damaged or truncated at byte {place}"):
            open_data(str(path))


@pytest.mark.parametrize("mode", ["gz", "bz2", "xz"])
def test_a_compressed_tar_is_refused_whatever_its_name(mode: str, tmp_path: Path) -> None:
    plain = Path(write_tar(tmp_path / "plain.tar", files_of(COUNTS)))
    for name in ("all.tar", f"all.tar.{mode}"):
        with tarfile.open(tmp_path / name, f"w:{mode}") as archive:
            archive.add(plain)
    with refused("all.tar is not a complete, uncompressed .tar"):
        open_data(str(tmp_path / "all.tar"))
    with refused(f"all.tar.{mode} is a file; give a folder of class folders, a .tar"):
        open_data(str(tmp_path / f"all.tar.{mode}"))


def test_an_archive_that_changes_after_it_was_opened_gives_errors_of_images(tmp_path: Path) -> None:
    path = Path(write_tar(tmp_path / "all.tar", files_of(COUNTS)))
    found = open_data(str(path), val_share=0.3).train
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ImageError, match=r"all.tar/dog/.* is truncated: .*all.tar ends inside it; fetch the archive again"):
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


def write_sparse(path: Path, before: bytes, size: int, name: str = "cat/0.png", kind: bytes = b"0") -> str:
    """An archive whose last member is a hole of that many bytes: it takes a few kilobytes on disk."""
    with open(path, "wb") as file:
        file.write(before + header(name, size, kind))
        file.truncate(file.tell() + size + len(END))
    assert path.stat().st_blocks * 512 < 2**20
    return str(path)


@pytest.mark.timeout(20)
def test_a_member_larger_than_any_image_is_one_bad_image_and_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = [header(f"{name}/{n}.png", len(content(n))) + padded(content(n)) for n, name in enumerate(["cat", "dog"] * 20)]
    path = write_sparse(tmp_path / "all.tar", b"".join(images), 7 * 2**30, "cat/vast.png")
    code, out, _ = run(["check", path, "--json"], capsys)
    told = "all.tar/cat/vast.png cannot be read: it has 7,516,192,768 bytes, more than the 1,073,741,824 allowed"
    assert code == 65
    assert [problem["text"].split(";")[0] for problem in json.loads(out)["problems"]] == [told]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", [b"L", b"x"], ids=["of a name", "extended"])
def test_a_header_larger_than_any_name_is_not_read(kind: bytes, tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "all.tar", b"", 7 * 2**30, "././@LongLink", kind)
    with refused("all.tar is not a complete, uncompressed .tar", "bytes; at most 1,048,576 are allowed"):
        open_data(path)


@pytest.mark.timeout(20)
def test_a_fifo_named_like_an_archive_is_one_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.tar")
    with refused("train.tar is not a complete, uncompressed .tar: it is not a regular file"):
        open_data(str(tmp_path))


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
    # A file stored once under two names counts twice; members other than files do not count.
    wanted = [(content(n), n in (1, 3, 6, 7)) for n in range(8)] + [(content(0), True)]
    assert sorted(read) == sorted(wanted)
