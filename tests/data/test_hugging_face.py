"""Hugging Face datasets from a local folder."""

import gzip
import os
from pathlib import Path
from typing import Any

import pytest

from pictures import content, contents, files_of, refused, write_folder
from polaformer import regular_files
from polaformer.data.sources import hugging_face
from polaformer.data.sources.opening import open_data
from polaformer.errors import ImageError


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


@pytest.mark.usefixtures("_offline")
def test_links_to_files_in_a_hugging_face_data_set_are_followed(tmp_path: Path) -> None:
    """The hub's cache consists of links."""
    import datasets

    columns = {"image": [{"bytes": content(n), "path": None} for n in range(2)], "label": [0, 1]}
    for split in ("train", "test"):
        write_parquet(tmp_path, split, columns, image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog"]))
        path = tmp_path / "set" / "data" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to((tmp_path / "data" / path.name).rename(tmp_path / f"blob-{split}"))
    assert contents(open_data(f"hfds:{tmp_path}/set")) == [(content(0), 0), (content(1), 1)] * 2


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
        told = "train-00000-of-00001.parquet is not a complete Parquet file ("
    elif kind == "only a test part":
        write_parquet(root, "test", {"image": images, "label": [0, 1]}, image=image, label=classes)
        told = "has the splits test; a split 'train' is needed"
    else:
        told = "is not a dataset that the package `datasets` can read"
    with refused(str(root), told):
        open_data(f"hfds:{root}")


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("_offline")
def test_a_fifo_in_a_hugging_face_data_set_is_one_error(tmp_path: Path) -> None:
    write_folder(tmp_path / "set" / "train", files_of({"cat": 1, "dog": 1}))
    os.mkfifo(tmp_path / "set" / "train" / "metadata.jsonl")
    with refused("metadata.jsonl is not a regular file; remove it from the dataset"):
        open_data(f"hfds:{tmp_path}/set")


@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize("kind", ["equal bytes", "equal rows", "equal starts", "equal labels"])
def test_a_parquet_file_that_grows_in_memory_is_one_error_before_it_is_unpacked(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    monkeypatch.setattr(regular_files, "MAX_UNPACKED", 2**20)
    equal, many = os.urandom(50_000), 300
    images = {"equal bytes": [bytes(2**21), b"?"], "equal rows": [equal] * many, "equal starts": [equal] * many}
    rows = images.get(kind, [b"?"] * 100_000)
    options: dict[str, Any] = {"use_dictionary": False, "column_encoding": {"image.bytes": "DELTA_BYTE_ARRAY"}}
    image = pa.StructArray.from_arrays([pa.array(rows), pa.nulls(len(rows), pa.string())], ["bytes", "path"])
    path = tmp_path / "set" / "train.parquet"
    path.parent.mkdir()
    table = pa.table({"image": image, "label": pa.array([0] * len(rows))})
    parquet.write_table(table, path, compression="zstd", **options if kind == "equal starts" else {})
    assert path.stat().st_size < 60_000
    with refused("train.parquet would take ", " bytes in memory, more than the 1,0"):
        open_data(f"hfds:{tmp_path}/set")


@pytest.mark.usefixtures("_offline")
def test_many_rows_in_a_parquet_file_that_do_not_grow_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(regular_files, "MAX_UNPACKED", 2**16)
    monkeypatch.setattr(regular_files, "MAX_RATIO", 4)
    kinds: dict[str, Any] = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    kinds["words"] = datasets.List(datasets.Value("string"))
    images = [{"bytes": content(n), "path": None} for n in range(100)]
    for split in ("train", "test"):
        columns = {"image": images, "label": [0, 1] * 50, "words": [["one", "two"]] * 100}
        write_parquet(tmp_path / "set", split, columns, **kinds)
    assert len(open_data(f"hfds:{tmp_path}/set").train) == 100


@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize("kind", ["plain", "compressed", "a dictionary", "views", "nothing", "a file with a list", "cut"])
def test_an_arrow_file_is_read_if_it_takes_no_more_memory_than_bytes(kind: str, tmp_path: Path) -> None:
    import datasets
    import pyarrow as pa

    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog"]))
    columns = {"image": [{"bytes": content(n), "path": None} for n in range(2)], "label": [0, 1]}
    table = datasets.Dataset.from_dict(columns, features=features).data.table
    odd = {"a dictionary": pa.array(["a", "a"]).dictionary_encode(), "views": pa.array(["a", "a"], pa.string_view())}
    if kind in (*odd, "nothing"):
        table = table.append_column("odd", odd.get(kind, pa.nulls(2)))
    (tmp_path / "set").mkdir()
    for split in ("train", "test"):
        path = tmp_path / "set" / f"{split}.arrow"
        options = pa.ipc.IpcWriteOptions(compression="zstd" if kind == "compressed" else None)
        write = pa.ipc.new_file if kind == "a file with a list" else pa.ipc.new_stream
        with write(str(path), table.schema, options=options) as writer:
            writer.write_table(table)
        if kind == "cut":
            path.write_bytes(path.read_bytes()[:-100])
    if kind == "plain":
        assert contents(open_data(f"hfds:{tmp_path}/set")) == [(content(0), 0), (content(1), 1)] * 2
    else:
        with refused(".arrow is not a usable Arrow stream: ", "; write it again with Dataset.to_parquet"):
            open_data(f"hfds:{tmp_path}/set")


@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize("name", ["train.zip", "train.csv", "more/train.jsonl", "train.h5", "train.arrow"])
def test_archives_compressed_and_sparse_files_in_a_hugging_face_data_set_are_one_error(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "set" / "train", files_of({"cat": 1, "dog": 1}))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "set" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "set")
    path, told = tmp_path / "set" / name, "is an archive or compressed; unpack it, and remove it from the dataset"
    path.write_bytes(gzip.compress(bytes(1000)) if name.endswith(("csv", "jsonl")) else b"?")
    if name == "train.arrow":
        os.truncate(path, 2**40)  # sparse: takes no disk space
        told = "cannot be read: it has 1,099,511,627,776 bytes, more than the 1,073,741,824 allowed"
    with refused(f"{name} {told}"):
        open_data(f"hfds:{tmp_path}/set")


def test_a_hugging_face_data_set_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    with refused(f"there is no folder {tmp_path}/gone; download the dataset first, and give its folder after hfds:"):
        open_data(f"hfds:{tmp_path}/gone")


@pytest.mark.usefixtures("_offline")
def test_an_image_that_is_missing_or_too_large_in_a_hugging_face_data_set_is_one_error_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    vast = tmp_path / "vast.png"
    vast.touch()
    os.truncate(vast, 2**40)  # sparse: takes no disk space
    images = [{"bytes": content(0), "path": None}, None, {"bytes": b"broken", "path": None}, {"bytes": None, "path": str(vast)}]
    for split in ("train", "validation"):
        columns = {"image": images, "label": [0, 1, 1, 0]}
        write_parquet(tmp_path / "set", split, columns, image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog"]))
    found = open_data(f"hfds:{tmp_path}/set").train
    assert found.read(0, 3).size == (12, 9)
    monkeypatch.setattr(hugging_face, "MAX_BYTES", 100)
    with pytest.raises(ImageError, match=r"train/0 cannot be read: it has \d+ bytes, more than the 100 allowed"):
        found.content(0)
    monkeypatch.undo()
    with pytest.raises(ImageError, match=r"vast.png cannot be read: it has 1,099,511,627,776 bytes, more than"):
        found.content(3)
    with pytest.raises(ImageError, match="train/1 cannot be read: it is missing; check the dataset"):
        found.read(1, 3)
    with pytest.raises(ImageError, match="train/2 is not a readable image"):
        found.read(2, 3)
