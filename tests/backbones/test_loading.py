"""Checkpoints that are read and written, of every kind."""

import json
import os
import stat
import sys
import types
from collections import OrderedDict

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import polaformer
from models import SMALL, images, small
from polaformer import CheckpointError, load_checkpoint, save_checkpoint
from polaformer.attention.layer.token_table import TokenTable
from polaformer.backbones.recognition import model_of_file
from polaformer.weights.files import read_metadata, read_state_dict
from published import published_state_dict

FAMILIES = ["pola_deit_tiny", "pola_pvt_tiny", "pola_pvt_v2_b0", "pola_swin_tiny"]


def equal(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.fixture
def yacs(monkeypatch):
    """A configuration class by the name that the authors' files hold; they were written where it was installed."""
    config = types.ModuleType("yacs.config")
    node = type("CfgNode", (dict,), {"__module__": "yacs.config"})
    config.CfgNode = node
    monkeypatch.setitem(sys.modules, "yacs", types.ModuleType("yacs"))
    monkeypatch.setitem(sys.modules, "yacs.config", config)
    return node


@pytest.mark.parametrize("name", ["pola_pvt_tiny", "pola_swin_tiny", "pola_pvt_v2_b0"])
def test_the_authors_file_with_its_configuration_object(name, yacs, tmp_path, monkeypatch):
    model = small(name)
    published = published_state_dict(model)
    settings = yacs(MODEL=yacs(NAME=name, DROP_PATH_RATE=0.2))
    settings.__dict__["__immutable__"] = True
    whole = {
        "model": OrderedDict(published),
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "lr_scheduler": {"t_initial": 300},
        "max_accuracy": 82.6,
        "epoch": 299,
        "config": settings,
    }
    torch.save(whole, tmp_path / "theirs.pth")
    # It is read where yacs is not installed, which is the usual case.
    monkeypatch.delitem(sys.modules, "yacs.config")
    monkeypatch.delitem(sys.modules, "yacs")
    load_checkpoint(model, tmp_path / "theirs.pth")
    again = small(name)
    again.load_state_dict(published, strict=True)
    assert equal(model, again)


@pytest.mark.parametrize("wrap", [None, "model", "state_dict", "model_ema"])
@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_a_state_dict_bare_or_under_the_usual_keys(wrap, ending, tmp_path):
    model, source = small("pola_pvt_tiny"), small("pola_pvt_tiny", drop_path_rate=0.1)
    path = tmp_path / f"file.{ending}"
    if ending == "safetensors":
        save_file(source.state_dict(), path)
    else:
        torch.save({wrap: source.state_dict()} if wrap else source.state_dict(), path)
    load_checkpoint(model, path)
    assert equal(model, source)


def test_a_state_dict_of_a_model_inside_distributed_data_parallel():
    model, source = small("pola_pvt_tiny"), small("pola_pvt_tiny")
    load_checkpoint(model, {f"module.{key}": value for key, value in source.state_dict().items()})
    assert equal(model, source)


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        ("softmax_deit_tiny", "deit_tiny_patch16_224", {}),
        ("softmax_pvt_v2_b0", "pvt_v2_b0", {}),
        ("softmax_swin_tiny", "swin_tiny_patch4_window7_224", {}),
        ("softmax_swin_tiny", "swin_tiny_patch4_window7_224", {"img_size": (224, 448)}),
    ],
)
def test_timms_weights_in_the_softmax_twins_give_timms_logits(ours, theirs, options):
    reference = timm.create_model(theirs, num_classes=6, **options).double().eval()
    for name, parameter in reference.named_parameters():
        if name.endswith(("relative_position_bias_table", "bias")):
            torch.nn.init.normal_(parameter, std=0.5)
    model = polaformer.create_model(ours, num_classes=6, **options).double().eval()
    loaded = load_checkpoint(model, reference.state_dict())
    assert loaded == ([], [])
    x = images(1, *model.img_size, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(model(x), reference(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_timm_loads_a_file_into_a_feature_backbone(name, ending, tmp_path):
    """`checkpoint_path` cannot do that in timm; an overlay of the file can."""
    model, path = small(name, num_classes=1000), tmp_path / f"file.{ending}"
    save_file(model.state_dict(), path) if ending == "safetensors" else torch.save(model.state_dict(), path)
    options = {"img_size": 64} | SMALL[name]
    overlay = {"file": str(path)}
    whole = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **options).eval()
    features = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, features_only=True, **options).eval()
    x = images()
    assert torch.equal(whole(x), model(x))
    expected = model.forward_intermediates(x, indices=list(features.out_indices), intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(features(x), expected, strict=True))
    # At another size tables are resized, which names alone would not do.
    larger = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **options | {"img_size": 96}).eval()
    tables = [module for module in larger.modules() if isinstance(module, TokenTable)]
    assert all(len(table.rows) == table.num_prefix_tokens + table.size[0] * table.size[1] for table in tables)
    assert larger(images(1, 96, 96)).shape == (1, 1000)


def test_derived_buffers_are_neither_needed_nor_used():
    model = small("pola_swin_tiny")
    published = published_state_dict(model)
    nonsense = {"layers.2.blocks.0.attn.relative_position_index": torch.zeros(9, 9, dtype=torch.long)}
    nonsense |= {"layers.2.blocks.1.attn_mask": torch.zeros(4, 9, 9)}
    load_checkpoint(model, published | nonsense)
    expected = model(images())
    again = small("pola_swin_tiny")
    load_checkpoint(again, published)
    torch.manual_seed(0)
    assert torch.equal(again(x := images()), model(x))
    assert expected.isfinite().all()


@pytest.mark.parametrize("name", FAMILIES)
def test_tables_are_resized_to_the_models_size(name):
    """As if the smaller model had been given the larger image, for sizes that windows do not notice."""
    source = small(name, img_size=64, **({"attention": "LLLL"} if "swin" in name else {})).double()
    larger = small(name, img_size=96, **({"attention": "LLLL"} if "swin" in name else {})).double()
    loaded = load_checkpoint(larger, source.state_dict())
    assert loaded.resized
    assert not loaded.left_out
    x = images(1, 96, 96, dtype=torch.float64)
    assert torch.allclose(larger(x), source(x), rtol=1e-12, atol=1e-12)


def test_our_own_files_tell_the_shape_of_tables(tmp_path):
    """A table of 8×18 rows in a file is not one of 12×12, though both have 144."""
    source = small("pola_deit_tiny", img_size=(64, 144)).double()
    square = small("pola_deit_tiny", img_size=96).double()
    save_checkpoint(source, tmp_path / "oblong.safetensors")
    loaded = load_checkpoint(square, tmp_path / "oblong.safetensors")
    assert "pos_embed.rows: 8×18 → 12×12" in loaded.resized
    x = images(1, 96, 96, dtype=torch.float64)
    assert torch.allclose(square(x), source(x), rtol=1e-12, atol=1e-12)
    with pytest.raises(CheckpointError, match=r"pos_embed.rows has shape \(136, 16\) in the file but \(145, 16\)"):
        # A bare state dict does not state the shape, and 135 is not a square.
        load_checkpoint(square, small("pola_deit_tiny", img_size=(72, 120)).double().state_dict())


def test_other_classes():
    model, source = small("pola_pvt_tiny"), small("pola_pvt_tiny", num_classes=3)
    with pytest.raises(CheckpointError, match=r"head.weight has shape \(3, 20\).*\n.*\n.*reset_head=True"):
        load_checkpoint(model, source.state_dict())
    head = model.head.weight.clone()
    loaded = load_checkpoint(model, source.state_dict(), reset_head=True)
    assert sorted(loaded.left_out) == ["head.bias", "head.weight"]
    assert torch.equal(model.head.weight, head)
    assert torch.equal(model.stages[0].blocks[0].attn.qkv.weight, source.stages[0].blocks[0].attn.qkv.weight)
    without = small("pola_pvt_tiny", num_classes=0)
    assert sorted(load_checkpoint(without, source.state_dict()).left_out) == ["head.bias", "head.weight"]
    with pytest.raises(CheckpointError, match=r"2 missing in the file:\n  head.bias\n  head.weight"):
        load_checkpoint(model, without.state_dict())


def test_create_model_takes_a_checkpoint(tmp_path):
    source = small("pola_pvt_tiny")
    save_checkpoint(source, tmp_path / "model.safetensors")
    assert equal(small_from(tmp_path / "model.safetensors"), source)


def small_from(path):
    return polaformer.create_model("pola_pvt_tiny", num_classes=5, img_size=64, checkpoint=path, **SMALL["pola_pvt_tiny"])


def test_a_file_says_how_its_model_was_made(tmp_path):
    path = tmp_path / "model.safetensors"
    source = small("pola_swin_tiny", img_size=(64, 96), attention="LLLS")
    save_checkpoint(source, path, metadata={"note": "trained on nothing"})
    metadata = read_metadata(path)
    assert metadata["note"] == "trained on nothing"
    assert json.loads(metadata["model"])["attention"] == "LLLS"
    arguments = model_of_file(path, load_file(path))
    again = polaformer.create_model(**arguments)
    load_checkpoint(again, path)
    assert equal(again, source)


def test_writing_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path, model = tmp_path / "model.safetensors", small("pola_pvt_tiny")
    save_checkpoint(model, path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(small("pola_pvt_tiny", num_classes=3), path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_written_file_has_the_usual_permissions(tmp_path):
    (tmp_path / "other").touch()
    save_checkpoint(small("pola_pvt_tiny"), tmp_path / "model.safetensors")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("other", "model.safetensors")]
    assert modes[0] == modes[1]


def test_published_tables_are_squares():
    """A table of 14×14 rows is not treated as one of 28×7, though both have 196."""
    square = small("softmax_deit_tiny", img_size=112).double()
    oblong = small("softmax_deit_tiny", img_size=(224, 56)).double()
    published = {key.replace("pos_embed.rows", "pos_embed"): value for key, value in square.state_dict().items()}
    published["pos_embed"] = published["pos_embed"][None]
    assert load_checkpoint(oblong, published).resized == ["pos_embed.rows: 14×14 → 28×7"]
    x = images(1, 224, 56, dtype=torch.float64)
    assert torch.allclose(oblong(x), square(x))
    again = small("softmax_deit_tiny", img_size=(224, 56)).double()
    assert load_checkpoint(again, oblong.state_dict()) == ([], [])  # our own names: its own shape


def test_a_model_without_memory():
    with torch.device("meta"):
        model = polaformer.create_model("pola_swin_tiny", num_classes=5, img_size=64, **SMALL["pola_swin_tiny"])
    source = small("pola_swin_tiny")
    with pytest.raises(CheckpointError, match="to_empty"):
        load_checkpoint(model, source.state_dict())
    model = model.to_empty(device="cpu").eval()
    load_checkpoint(model, source.state_dict())
    assert torch.equal(model(x := images()), source(x))


def test_wrapped_models_are_saved_and_loaded_by_what_is_inside(tmp_path):
    source, path = small("pola_pvt_tiny"), tmp_path / "model.safetensors"
    for wrap in (torch.compile, torch.nn.DataParallel):
        save_checkpoint(wrap(source), path)
        assert json.loads(read_metadata(path)["model"])["name"] == "pola_pvt_tiny"
        again = small("pola_pvt_tiny")
        load_checkpoint(wrap(again), path)
        assert equal(again, source)
    for prefix in ("module.", "_orig_mod.", "module._orig_mod.", "model."):
        load_checkpoint(again := small("pola_pvt_tiny"), {f"{prefix}{k}": v for k, v in source.state_dict().items()})
        assert equal(again, source)
    features = polaformer.create_model(
        "pola_pvt_tiny", features_only=True, out_indices=[1], img_size=64, **SMALL["pola_pvt_tiny"]
    )
    save_checkpoint(features, path)
    assert "model" not in read_metadata(path)
    other = polaformer.create_model("pola_pvt_tiny", features_only=True, out_indices=[1], img_size=64, **SMALL["pola_pvt_tiny"])
    load_checkpoint(other, path)
    assert equal(other, features)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_tells_how_the_model_is_now(name, tmp_path):
    """After another size and other classes, too."""
    model, path = small(name), tmp_path / "model.safetensors"
    model.set_input_size((96, 64))
    model.reset_classifier(9)
    save_checkpoint(model, path)
    again = polaformer.create_model(**model_of_file(path, read_state_dict(path))).eval()
    assert load_checkpoint(again, path) == ([], [])
    x = images(1, 96, 64)
    assert torch.equal(again(x), model(x))
    by_timm = timm.create_model(name, pretrained_cfg_overlay={"num_classes": 4}, img_size=64, **SMALL[name])
    assert by_timm.built_from["num_classes"] == 4


def test_metadata_of_the_user_does_not_hide_ours(tmp_path):
    save_checkpoint(small("pola_pvt_tiny"), tmp_path / "f.safetensors", metadata={"version": "9", "model": "mine", "note": "x"})
    assert read_metadata(tmp_path / "f.safetensors")["note"] == "x"
    load_checkpoint(small("pola_pvt_tiny"), tmp_path / "f.safetensors")
