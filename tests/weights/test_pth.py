"""What the pickle of a .pth file may ask for, and where its central directory must be."""

import struct
import zipfile
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch

import hostile
from hostile import number, numbers, state, storage, tensor, text, write
from mmdetection import write_checkpoint
from polaformer import CheckpointError
from polaformer.weights.files import check_storages, read_state_dict
from polaformer.weights.pth import Dropped

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


HISTORY = b"cmmengine.logging.history_buffer\nHistoryBuffer\n"
GETATTR = b"c__builtin__\ngetattr\n"
MKDIR = b"cos\nmkdir\n"


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_checkpoint_of_mmengine_with_the_history_of_its_training(zipped, tmp_path):
    write_checkpoint(tmp_path / "file.pth", MODEL, _use_new_zipfile_serialization=zipped)
    with pytest.raises(Exception, match=r"HistoryBuffer|_reconstruct|getattr"):
        torch.load(tmp_path / "file.pth", weights_only=True)
    state = read_state_dict(tmp_path / "file.pth")
    assert state.keys() == MODEL.keys()
    assert torch.equal(state["x"], MODEL["x"])


def test_what_this_process_allows_elsewhere_is_neither_used_nor_forgotten(tmp_path):
    """NumPy's function, which users allow to read such checkpoints, allocates any size."""
    vast = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + number(2**45) + b"\x85" + text("b") + b"tR"
    write(
        tmp_path / "file.pth",
        b"\x80\x02}(" + text("model") + b"}" + text("x") + tensor((4,), (1,)) + b"s" + text("o") + vast + b"u.",
    )
    allowed = [(np._core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"), np.ndarray, getattr]
    with torch.serialization.safe_globals(allowed):
        before = set(torch.serialization.get_safe_globals())
        assert read_state_dict(tmp_path / "file.pth")["x"].tolist() == [1, 2, 3, 4]
        assert set(torch.serialization.get_safe_globals()) == before


def test_what_is_dropped_is_no_weight(tmp_path):
    assert Dropped("anything", 1) is Dropped()
    write(tmp_path / "file.pth", b"\x80\x02}" + text("x") + HISTORY + b")\x81}" + text("y") + b"K\x01sbs.")
    with pytest.raises(CheckpointError, match="'x' is a Dropped; a mapping from names to plain tensors is needed"):
        read_state_dict(tmp_path / "file.pth")


IN_A_HISTORY = {
    "another class of the same module": lambda mark: HISTORY.replace(b"Buffer\n", b"Buffers\n") + b")\x81",
    "the class from another module": lambda mark: b"cmmengine.logging\nHistoryBuffer\n)\x81",
    "the class in other letters": lambda mark: HISTORY.replace(b"HistoryBuffer", b"Historybuffer") + b")\x81",
    "something that the module imports": lambda mark: b"cmmengine.logging.history_buffer\nwarnings\n",
    "a dotted name": lambda mark: b"cmmengine.logging.history_buffer\nHistoryBuffer.__init__\n",
    "another function of NumPy": lambda mark: b"cnumpy\nload\n(" + text(mark) + b"tR",
    "reduce in its state": lambda mark: HISTORY + b")\x81}" + text("a") + MKDIR + b"(" + text(mark) + b"tRsb",
    "reduce of a method": lambda mark: GETATTR + b"(" + HISTORY + text("mean") + b"tR(" + text(mark) + b"tR",
    "build of the class": lambda mark: HISTORY + b"}" + text("__setstate__") + MKDIR + b"sb)\x81" + text(mark) + b"b",
    "build of the class with what is allowed": lambda mark: HISTORY + b"}" + text("__setstate__") + GETATTR + b"sb",
    "setitem on an instance": lambda mark: HISTORY + b")\x81" + text("a") + b"K\x01s",
    "append to an instance": lambda mark: HISTORY + b")\x81K\x01a",
    "getattr of something else": lambda mark: GETATTR + b"(cnumpy\nndarray\n" + text("tofile") + b"tR",
    "getattr of an instance": lambda mark: GETATTR + b"(" + HISTORY + b")\x81" + text("max_length") + b"tR",
    "bytes of any size": lambda mark: b"c__builtin__\nbytes\n(" + number(2**33) + b"tR",
    "text that doubles": lambda mark: b"c_codecs\nencode\n(" + text("ab") + text("hex") + b"tR",
    "one text many times": lambda mark: (
        b"](" + text("ab" * 500) + b"q\x01c_codecs\nencode\nq\x02" + 50 * (b"h\x02h\x01" + text("latin1") + b"\x86R") + b"e"
    ),
    "encoding of no text": lambda mark: b"c_codecs\nencode\n(K\x01" + text("latin1") + b"tR",
}


@pytest.mark.parametrize("kind", IN_A_HISTORY)
def test_a_history_that_is_more_than_that_is_one_error_and_nothing_is_executed(kind, tmp_path):
    mark = tmp_path / "executed"
    beside = text("message_hub") + IN_A_HISTORY[kind](mark)
    write(tmp_path / "file.pth", b"\x80\x02}(" + text("model") + b"}" + text("x") + tensor((4,), (1,)) + b"s" + beside + b"u.")
    with pytest.raises(CheckpointError, match=r"file\.pth (holds more than tensors and plain containers|is damaged)"):
        read_state_dict(tmp_path / "file.pth")
    assert not hostile.is_executed(mark)
