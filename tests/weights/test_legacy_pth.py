"""The format of torch.save from before version 1.6, in which mmdetection publishes its models."""

import pytest
import torch

from hostile import number, numbers, text
from polaformer import CheckpointError
from polaformer.weights.files import read_state_dict
from polaformer.weights.legacy_pth import ITEM_SIZES, START

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8)


def saved(content, path):
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return path.read_bytes()


def test_weights_of_every_dtype_and_shared_storages(tmp_path):
    shared = torch.arange(12.0)
    state = {str(dtype): torch.arange(5).to(dtype) for dtype in (*DTYPES, torch.uint8, torch.bool)}
    state |= {"first": shared[:4], "rest": shared[4:].reshape(2, 4).T, "empty": torch.zeros(0)}
    assert saved({"meta": {"CLASSES": ("a", "b"), "hooks": None}, "state_dict": state}, tmp_path / "f.pth").startswith(START)
    found = read_state_dict(tmp_path / "f.pth")
    assert found.keys() == state.keys()
    assert all(found[key].dtype == value.dtype and torch.equal(found[key], value) for key, value in state.items())
    assert len(ITEM_SIZES) == len(DTYPES) + 2


def legacy(content, listed, storages):
    """A file from the pickle of its content, that of its list of storages, and their bytes."""
    return START + b"\x80\x02M\xe9\x03." + b"\x80\x02}." + content + listed + storages


def storage(key=None, count=4, view=b"N", kind=b"Float"):
    where = b"(" + text("storage") + b"ctorch\n" + kind + b"Storage\n" + (text("7") if key is None else key)
    return where + text("cpu") + number(count) + view + b"tQ"


def state(reference, size=4):
    rest = number(0) + numbers(size) + numbers(1) + b"\x89ccollections\nOrderedDict\n)RtR"
    return b"\x80\x02}" + text("x") + b"ctorch._utils\n_rebuild_tensor_v2\n(" + reference + rest + b"s."


LISTED = b"\x80\x02]" + text("7") + b"a."
BYTES = number(4)[2:] + torch.arange(4.0).numpy().tobytes()
HONEST = legacy(state(storage()), LISTED, BYTES)
WRONG = {
    "a storage larger than the file": (legacy(state(storage(count=2**40)), LISTED, BYTES), "its storages take 24 bytes"),
    "a storage that is not listed": (legacy(state(storage()), b"\x80\x02].", BYTES), "restricted form"),
    "a storage that is listed twice": (legacy(state(storage()), LISTED[:-1] + text("7") + b"a.", BYTES * 2), "restricted form"),
    "a list that is computed": (legacy(state(storage()), b"\x80\x02ctorch\ndevice\n0" + LISTED[2:], BYTES), "restricted form"),
    "a view of a storage": (
        legacy(state(storage(view=b"(" + text("8") + number(0) + number(2**40) + b"t")), LISTED, BYTES),
        "form",
    ),
    "a negative size": (legacy(state(storage(count=-4)), LISTED, BYTES), "restricted form"),
    "a storage of unknown items": (legacy(state(storage(kind=b"Untyped")), LISTED, BYTES), "restricted form"),
    "a storage of two sizes": (
        legacy(state(storage())[:-1] + text("y") + storage(count=2**40) + b"s.", LISTED, BYTES),
        "restricted form",
    ),
    "a storage before the content": (
        START + b"\x80\x02M\xe9\x03." + b"\x80\x02}K\x01" + storage() + b"s." + state(storage()) + LISTED + BYTES,
        "restricted form",
    ),
    "another class": (legacy(b"\x80\x02cos\nmkdir\n(" + text("x") + b"tR.", LISTED, BYTES), "os.mkdir"),
    "code in the header": (START + b"\x80\x02cos\nmkdir\n(" + text("x") + b"tR." + HONEST, "os.mkdir"),
    "bytes after the end": (HONEST + b"x", "its storages take 25 bytes, but should take 24"),
    "bytes that are missing": (HONEST[:-1], "its storages take 23 bytes"),
    "a stored size that is another": (HONEST.replace(BYTES, number(5)[2:] + BYTES[8:]), "is damaged"),
    "half a pickle": (HONEST[:60], "is damaged"),
    "a magic number alone": (START, "is damaged"),
}


def test_a_file_made_by_hand(tmp_path):
    (tmp_path / "f.pth").write_bytes(HONEST)
    assert read_state_dict(tmp_path / "f.pth")["x"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_file_is_one_error(kind, tmp_path, monkeypatch):
    content, message = WRONG[kind]
    (tmp_path / "f.pth").write_bytes(content)
    if kind != "a stored size that is another":  # which torch finds, in storages of the size of the file
        monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("it was read"))
    with pytest.raises(CheckpointError, match=rf"f\.pth.*{message}"):
        read_state_dict(tmp_path / "f.pth")


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_every_truncation_is_one_error(share, tmp_path):
    content = saved({"model": {f"x{i}": torch.randn(20) for i in range(20)}}, tmp_path / "f.pth")
    (tmp_path / "f.pth").write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match=r"f\.pth is damaged"):
        read_state_dict(tmp_path / "f.pth")
