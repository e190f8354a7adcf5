"""Files and state dicts that are refused: one error each, nothing executed, nothing loaded."""

import json
import os
import subprocess
import sys
import zipfile

import pytest
import torch
from safetensors.torch import save_file

import hostile
from models import small
from polaformer import CheckpointError, load_checkpoint, save_checkpoint
from polaformer.backbones.fitting import fit_state_dict, misfits
from polaformer.backbones.recognition import recognise
from polaformer.weights.files import read_state_dict
from published import published_state_dict

FAMILIES = ["pola_deit_tiny", "pola_pvt_tiny", "pola_pvt_v2_b0", "pola_swin_tiny"]


def equal(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_everything_that_does_not_fit_is_listed_in_one_error_and_nothing_is_loaded():
    model, source = small("pola_pvt_tiny"), small("pola_pvt_tiny").state_dict()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    del source["head.bias"], source["stages.0.blocks.0.attn.core.power"]
    source["extra"] = torch.ones(1)
    source["stages.1.blocks.0.norm1.weight"] = torch.ones(99)
    source["stages.1.blocks.0.norm1.bias"] = torch.ones(12, dtype=torch.long)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(model, source)
    text = str(caught.value)
    assert text.startswith(
        "the state dict does not fit pola_pvt_tiny, and nothing was loaded:\n2 missing in the file:\n  head.bias"
    )
    assert "1 unexpected in the file:\n  extra" in text
    assert "stages.1.blocks.0.norm1.weight has shape (99,) in the file but (12,) in the model" in text
    assert "stages.1.blocks.0.norm1.bias has dtype torch.int64" in text
    assert caught.value.misfits.missing == ["head.bias", "stages.0.blocks.0.attn.core.power"]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_wrong_model_is_one_error():
    """With every name in it, however many."""
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(small("pola_pvt_tiny"), {"extra": torch.ones(1)})
    assert all(f"\n  {key}" in str(caught.value) for key in small("pola_pvt_tiny").state_dict())
    with pytest.raises(CheckpointError, match=r"does not fit pola_swin_tiny, and nothing was loaded:\n\d+ missing"):
        load_checkpoint(small("pola_swin_tiny"), published_state_dict(small("pola_pvt_tiny")))
    with pytest.raises(CheckpointError, match="does not fit softmax_pvt_tiny"):
        load_checkpoint(small("softmax_pvt_tiny"), small("pola_pvt_tiny").state_dict())


@pytest.fixture(scope="module")
def harm(tmp_path_factory):
    """What each hostile file does to careless readers, in a separate process."""
    done = subprocess.run(
        [sys.executable, hostile.__file__, tmp_path_factory.mktemp("hostile")], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_there_are_27_hostile_files_and_each_harms_a_reader_without_care(harm):
    """Otherwise refusal would prove little: 15 run their payload, 12 make a reader allocate, read or write what it must not."""
    assert (len(hostile.PAYLOADS), len(hostile.BOMBS)) == (15, 12)
    assert harm == dict.fromkeys(hostile.HOSTILE, True)


@pytest.mark.parametrize("kind", hostile.HOSTILE)
def test_a_hostile_file_is_one_error_and_nothing_is_executed(kind, tmp_path):
    """Most payloads stop at the check of the pickle; the bare pickle is no archive and stops before it."""
    path, mark = tmp_path / "file.pth", tmp_path / "executed"
    hostile.HOSTILE[kind](path, mark)
    with pytest.raises(CheckpointError, match=r"file\.pth"):
        read_state_dict(path)
    assert not hostile.is_executed(mark)


def test_parts_that_overlap_are_refused_before_any_is_read(tmp_path, monkeypatch):
    """A later check compares what was read with the file's size; a file of a gigabyte could have taken all memory by then."""
    hostile.write_overlapping(tmp_path / "file.pth", tmp_path)
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("it was read"))
    with pytest.raises(CheckpointError, match="claims to hold more bytes than it has"):
        read_state_dict(tmp_path / "file.pth")


NO_CHECKPOINTS = {
    "a pickle that never ends": lambda path: hostile.write(path, b"\x80\x02" + b"(" * 1000),
    "no pickle at all": lambda path: hostile.write(path, b""),
    "a zip of something else": lambda path: zipfile.ZipFile(path, "w").writestr("readme", "hello"),
    "setitem on a list": lambda path: hostile.write(path, b"\x80\x02]K\x01K\x02s."),
    "a FIFO": lambda path: os.mkfifo(path),
    "a sparse file larger than any model": lambda path: (path.touch(), os.truncate(path, 2**40)),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", NO_CHECKPOINTS)
def test_a_file_that_is_no_checkpoint_is_one_error(kind, tmp_path):
    NO_CHECKPOINTS[kind](tmp_path / "file.pth")
    with pytest.raises(CheckpointError, match=r"file\.pth"):
        load_checkpoint(small("pola_pvt_tiny"), tmp_path / "file.pth")


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_every_truncation_is_one_error(ending, tmp_path):
    model, path = small("pola_pvt_tiny"), tmp_path / f"file.{ending}"
    torch.save(model.state_dict(), path) if ending == "pth" else save_checkpoint(model, path)
    whole = path.read_bytes()
    for share in (0, 1, 5, 9, 100, len(whole) // 3, len(whole) - 1000, len(whole) - 1):
        path.write_bytes(whole[:share])
        with pytest.raises(CheckpointError, match=rf"file\.{ending}"):
            load_checkpoint(model, path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds a list"),
        ({}, "an empty mapping"),
        ({"model": {}}, "an empty mapping"),
        ({"a": 1}, "'a' is a int; a mapping from names to plain tensors"),
        ({1: torch.ones(1)}, "1 is not a name"),
        ({"a": torch.ones(3).to_sparse()}, "'a' is a sparse, quantised or meta tensor"),
        (torch.ones(3), "holds a Tensor"),
    ],
)
def test_files_that_hold_no_state_dict(content, message, tmp_path):
    torch.save(content, tmp_path / "file.pth")
    with pytest.raises(CheckpointError, match=message):
        read_state_dict(tmp_path / "file.pth")


@pytest.mark.parametrize(
    "bad",
    [torch.ones(5, 20).to_sparse(), torch.ones(5, 20, device="meta"), torch.ones(1, 1).expand(5, 20)],
    ids=["sparse", "meta", "expanded"],
)
def test_a_tensor_that_cannot_be_copied_is_found_before_any_is(bad):
    model, before = small("pola_pvt_tiny"), None
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"head\.weight"):
        load_checkpoint(model, small("pola_pvt_tiny").state_dict() | {"head.weight": bad})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_state_dicts_that_lie_deep_or_in_themselves(tmp_path):
    inside = {"x": torch.ones(1)}
    for _ in range(100):
        inside = {"model": inside}
    with pytest.raises(CheckpointError, match="no state dict: 'model' is a dict"):
        load_checkpoint(small("pola_pvt_tiny"), inside)
    circle = {}
    circle["model"] = circle
    with pytest.raises(CheckpointError, match="no state dict"):
        load_checkpoint(small("pola_pvt_tiny"), circle)


BROKEN = {
    "qg and kv of other widths": {"block1.0.attn.kv.weight": torch.ones(16, 9)},
    "kv of integers": {"block1.0.attn.kv.weight": torch.ones(16, 8, dtype=torch.long)},
    "qg of no dimension": {"block1.0.attn.qg.weight": torch.tensor(1.0)},
    "an empty table": {"block1.0.attn.positional_encoding": torch.ones(0)},
    "a table of no dimension": {"block1.0.attn.positional_encoding": torch.tensor(1.0)},
    "positions of no dimension": {"pos_embed1": torch.tensor(1.0)},
    "a parameter under two names": {"stages.0.blocks.0.attn.core.power": torch.ones(1, 8)},
    "a classifier of no dimension": {"head.weight": torch.tensor(1.0)},
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_parameters_are_one_error(kind, tmp_path):
    model = small("pola_pvt_tiny")
    state = published_state_dict(model) | BROKEN[kind]
    with pytest.raises(CheckpointError, match="does not fit pola_pvt_tiny"):
        load_checkpoint(model, state)
    assert recognise(state) is None


VAST = torch.zeros(1, 1).expand(2**40, 8)  # four bytes; 32 TiB once copied


def vast_state_dict():
    return published_state_dict(small("pola_pvt_tiny")) | dict.fromkeys(
        ("block1.0.attn.qg.weight", "block1.0.attn.kv.weight"), VAST
    )


def test_tensors_that_store_less_than_they_hold_are_refused_before_they_are_copied():
    with pytest.raises(CheckpointError, match=r"'block1\.0\.attn\..*\.weight' is .* more elements than its storage holds"):
        load_checkpoint(small("pola_pvt_tiny"), vast_state_dict())


def test_nothing_is_fused_that_has_not_the_shape_of_the_model():
    """Whoever reads the file: recognition, timm through our filter, and a layer's own load_state_dict."""
    assert recognise(vast_state_dict()) is None
    model = small("pola_pvt_tiny")
    fitted = fit_state_dict(vast_state_dict(), model)
    problems = misfits(fitted, model).different
    assert "stages.0.blocks.0.attn.qkv.weight has shape (1649267441664, 8) in the file but (24, 8) in the model" in problems
    layer = model.stages[0].blocks[0].attn
    with pytest.raises(RuntimeError, match=r"qkv\.weight: copying a param with shape torch.Size\(\[1649267441664, 8\]\)"):
        layer.load_state_dict({"qg.weight": VAST, "kv.weight": VAST}, strict=False)


def test_a_table_that_stores_less_than_it_holds_is_not_resized():
    model = small("pola_deit_tiny")
    table = torch.zeros(1, 1).expand(1 + (2**20) ** 2, 16)
    assert fit_state_dict(model.state_dict() | {"pos_embed.rows": table}, model)["pos_embed.rows"].shape == table.shape


def test_paths_that_cannot_be_read(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_state_dict("with\0null.pth")
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_state_dict(tmp_path / "nothing.pth")
    with pytest.raises(CheckpointError, match="is a directory"):
        read_state_dict(tmp_path)


def test_a_file_of_a_later_version_says_so(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "f.safetensors", metadata={"format": "polaformer", "version": "9"})
    with pytest.raises(CheckpointError, match=r"version '9'.*update polaformer"):
        read_state_dict(tmp_path / "f.safetensors")


@pytest.mark.parametrize(
    "grids",
    ["no json", "[1]", '{"a": 3}', '{"a": [Infinity, 1]}', '{"a": [-16, -16]}', "[" * 10000],
    ids=lambda text: text[:20],
)
def test_damaged_metadata_is_one_error(grids, tmp_path):
    model = small("pola_pvt_tiny")
    save_file(model.state_dict(), tmp_path / "f.safetensors", metadata={"format": "polaformer", "version": "1", "grids": grids})
    with pytest.raises(CheckpointError, match="its list of table sizes is invalid"):
        load_checkpoint(model, tmp_path / "f.safetensors")
