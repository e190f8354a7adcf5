"""What the pickle of a .pth file may ask for, and where its central directory must be."""

import struct
import zipfile
from collections import Counter, OrderedDict

import pytest
import torch

import hostile
from hostile import number, numbers, state, storage, tensor, text, write
from polaformer import CheckpointError
from polaformer.weights.files import check_storages, read_state_dict

MODEL = {"x": torch.arange(4.0)}


def parameter_with_state():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.no_weight_decay = True
    return parameter


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_what_checkpoints_hold_beside_weights_still_loads(tmp_path):
    shape = torch.Size([1, 2])
    beside = {
        "parameters": [torch.nn.Parameter(torch.ones(2)), parameter_with_state()],
        "tensors": [torch.ones(2, dtype=torch.uint16), torch.ones(2).to_sparse(), torch.ones(2, device="meta")],
        "dtypes": [torch.ones(1, dtype=one) for one in (torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn)],
        "plain": [Counter([1, 1]), {1, 2}, {3}, shape, shape, torch.device("cpu"), torch.float32, 1j, OrderedDict(a=1)],
        "numbers": [1, 300, 70000, 2**40, 0.5, None, True, (), (1, 2, 3, 4), "x"],
    }
    torch.save({"model": MODEL, **beside}, tmp_path / "file.pth")
    assert torch.equal(read_state_dict(tmp_path / "file.pth")["x"], MODEL["x"])


def values(*pickled):
    return b"\x80\x02}" + text("x") + b"(" + b"".join(pickled) + b"ts."


ORDERED_DICT = b"ccollections\nOrderedDict\n"
GREEDY = {
    "bytes without end": (values(b"cbuiltins\nbytearray\n(" + number(2**20) + b"tR"), "builtins.bytearray"),
    "a tensor of any size": (values(b"ctorch\nTensor\n(" + number(20000) + number(20000) + b"tR"), "torch.Tensor"),
    "a storage of any size": (values(b"ctorch.storage\nUntypedStorage\n(" + number(2**40) + b"tR"), "UntypedStorage"),
    "text that doubles": (values(b"c_codecs\nencode\n(" + text("ab") + text("hex") + b"tR"), "_codecs.encode"),
    "a quantised tensor": (values(b"ctorch._utils\n_rebuild_qtensor\n"), "torch._utils._rebuild_qtensor"),
    "copies of one dict": (values(b"}q\x01", ORDERED_DICT + b"(h\x01tR"), "collections.OrderedDict"),
    "copies of one dict that grows": (values(b"}q\x01", ORDERED_DICT + b"(h\x01K\x01NstR"), "collections.OrderedDict"),
    "copies of one text": (values(b"cbuiltins\nset\n(" + text("abc") + b"tR"), "builtins.set"),
    "a call of what was made": (values(b"))R"), "restricted form"),
    "a name of a later protocol": (b"\x80\x04" + hostile.short("os") + hostile.short("mkdir") + b"\x93.", "restricted form"),
    "a storage under a number and its text": (state(x=storage(number(0), 4)), "restricted form"),
    "a storage under names of other case": (state(x=storage(text("a"), 4)), "restricted form"),
    "a storage under a name used again": (values(b"(" + text("0") + b"tq\x01", b"h\x01Q"), "restricted form"),
}


@pytest.mark.parametrize("kind", GREEDY)
def test_a_pickle_that_could_allocate_at_will_is_refused_before_torch_reads_it(kind, tmp_path):
    pickled, message = GREEDY[kind]
    write(tmp_path / "file.pth", pickled, {"data/a": bytes(16)})
    with pytest.raises(CheckpointError, match=rf"more than tensors and plain containers \(.*{message}"):
        read_state_dict(tmp_path / "file.pth")


def test_the_containers_of_an_honest_pickle_pass(tmp_path):
    pickled = b"\x80\x02}(" + text("model") + b"}" + text("x") + tensor((4,), (1,)) + b"s"
    pickled += text("shape") + b"ctorch\nSize\n(" + numbers(1, 2) + b"tR" + text("config") + b"cyacs.config\nCfgNode\n)\x81u."
    write(tmp_path / "file.pth", pickled)
    assert read_state_dict(tmp_path / "file.pth")["x"].tolist() == [1, 2, 3, 4]


def moved(content, place, form, by):
    """The content with the number at an offset from the end changed."""
    place += len(content)
    [old] = struct.unpack_from(form, content, place)
    return content[:place] + struct.pack(form, old + by) + content[place + struct.calcsize(form) :]


ENDS = {
    "a comment": lambda content: content[:-2] + b"\2\0hi",
    "something before it": lambda content: b"hi" + content,
    "a list elsewhere": lambda content: moved(content, -98 + 48, "<Q", -1),
    "a list of another length": lambda content: moved(content, -98 + 40, "<Q", -1),
    "a record elsewhere": lambda content: moved(content, -42 + 8, "<Q", -1),
    "a longer record": lambda content: moved(content, -98 + 4, "<Q", 1),
    "no record": lambda content: content[:-98] + b"PK\0\0" + content[-94:],
}


@pytest.mark.parametrize("kind", ENDS)
def test_an_archive_that_does_not_end_as_torch_writes_it_is_refused(kind, tmp_path):
    path = tmp_path / "file.pth"
    torch.save(MODEL, path)
    assert read_state_dict(path).keys() == MODEL.keys()
    path.write_bytes(ENDS[kind](path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"file\.pth (does not end with its central directory|is damaged|is neither)"):
        read_state_dict(path)


def test_a_file_with_two_lists_of_contents_is_refused_before_torch_inflates_one(tmp_path):
    hostile.write_two_lists(tmp_path / "file.pth", tmp_path)
    with pytest.raises(CheckpointError, match="does not end with its central directory"):
        read_state_dict(tmp_path / "file.pth")


@pytest.mark.parametrize("name", ["archive/DATA.PKL", "other/data.pkl", "archive/data.pkl\0"])
def test_a_second_pickle_that_torch_could_take_is_refused(name, tmp_path):
    write(tmp_path / "file.pth", state(x=tensor((4,), (1,))))
    with zipfile.ZipFile(tmp_path / "file.pth", "a") as archive:
        archive.writestr(name.replace("\0", "~"), state(y=tensor((4,), (1,))))
    content = (tmp_path / "file.pth").read_bytes()
    (tmp_path / "file.pth").write_bytes(content.replace(b"data.pkl~", b"data.pkl\0"))
    with pytest.raises(CheckpointError, match="has duplicate entries or some outside its root"):
        read_state_dict(tmp_path / "file.pth")


def test_tensors_that_take_more_memory_than_their_file_has_bytes_are_refused():
    shared = torch.zeros(10)
    check_storages({"x": shared, "y": shared[2:]}, 40, "file.pth")
    with pytest.raises(CheckpointError, match=r"file\.pth has 40 bytes, but its tensors take 44; it was not loaded"):
        check_storages({"x": shared, "y": torch.zeros(1)}, 40, "file.pth")
