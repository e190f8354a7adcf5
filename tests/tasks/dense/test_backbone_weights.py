"""Pretrained weights of every origin in the backbone of a detector or segmenter."""

import pytest
import timm
import torch
from torch import nn

import mmdetection
import polaformer
from mmdetection import detector_state, write_checkpoint
from models import SMALL, images, randomise, small
from polaformer import CheckpointError, save_checkpoint
from polaformer.backbones.loading import model_metadata
from polaformer.backbones.mmdetection_names import from_mmdetection
from polaformer.backbones.swin import PatchMerging
from polaformer.errors import DataError
from polaformer.tasks.dense.backbone_weights import load_backbone
from polaformer.tasks.dense.features import Features
from polaformer.training import checkpoint
from polaformer.weights.files import write_safetensors
from published import published_state_dict

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def dense(name, **options):
    """The backbone inside a detector: no classifier, norms of features."""
    return small(name, num_classes=0, feature_norms=True, **options)


def features(model, x):
    with torch.no_grad():
        return model.forward_intermediates(x, intermediates_only=True)


def equal(model, state):
    """Whether the model has the parameters of the state dict, those under common names."""
    own = model.state_dict()
    return all(torch.equal(own[key], value) for key, value in state.items() if key in own)


THEIRS = {
    "softmax_pvt_tiny": lambda: mmdetection.PVT(SMALL["softmax_pvt_tiny"]),
    "softmax_pvt_v2_b0": lambda: mmdetection.PVT(SMALL["softmax_pvt_v2_b0"], v2=True),
    "softmax_swin_tiny": lambda: mmdetection.Swin(SMALL["softmax_swin_tiny"]),
}
SIZES = {"softmax_pvt_tiny": (64, 96), "softmax_pvt_v2_b0": (64, 96), "softmax_swin_tiny": (96, 192)}


def with_their_eps(model):
    """mmdetection's PVT has 1e-6 in all norms."""
    for name, module in model.named_modules():
        if name.endswith(("patch_embed.norm", "key_reduction.norm")):
            module.eps = 1e-6
    return model


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", THEIRS)
def test_the_backbone_of_an_mmdetection_checkpoint_gives_its_features(name, legacy, tmp_path):
    """Names, packed projections, 1×1 convolutions, the order of merged patches: all computed on both sides."""
    theirs = randomise(THEIRS[name]().double()).eval()
    path, is_swin = tmp_path / "detector.pth", "swin" in name
    write_checkpoint(path, detector_state(theirs), _use_new_zipfile_serialization=not legacy)
    ours = small(name, num_classes=0, img_size=96 if is_swin else 64, feature_norms=is_swin).double()
    loaded = load_backbone(ours, path)
    x = images(2, *SIZES[name], dtype=torch.float64)
    expected = theirs(x)
    found = features(ours if is_swin else with_their_eps(ours), x)
    assert [one.shape for one in found] == [one.shape for one in expected]
    assert all(torch.allclose(a, b, **EXACT) for a, b in zip(found, expected, strict=True))
    assert (loaded.names, loaded.left_out) == ("mmdetection's", {"neck": 1, "bbox_head": 1})
    assert loaded.num_loaded == sum(1 for _ in theirs.parameters())


def test_mmdetections_other_epsilon_changes_little(tmp_path):
    """ε of the norms after patches and key reduction is 1e-6 there, 1e-5 here and in the original."""
    theirs = randomise(THEIRS["softmax_pvt_tiny"]().double()).eval()
    write_checkpoint(tmp_path / "detector.pth", detector_state(theirs))
    ours = small("softmax_pvt_tiny", num_classes=0).double()
    load_backbone(ours, tmp_path / "detector.pth")
    x = images(dtype=torch.float64)
    with torch.no_grad():
        pairs = zip(features(ours, x), theirs(x), strict=True)
    difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    assert 1e-9 < difference < 1e-3


def test_merged_patches_are_those_of_unfold():
    """The order of channels alone: rows before columns inside each channel there, columns before rows before channels here."""
    theirs, ours = randomise(mmdetection.Merging(5, 7)).double(), PatchMerging(5, 7).double()
    state = {f"stages.0.downsample.{key}": value for key, value in theirs.state_dict().items()}
    state = from_mmdetection(state | {"stages.0.blocks.0.attn.w_msa.qkv.bias": torch.ones(15)})
    ours.load_state_dict({key.rpartition("patch_embed.")[2]: value for key, value in state.items() if "patch_embed" in key})
    x = torch.randn(2, 5, 4, 6, dtype=torch.float64)
    expected = theirs(x.flatten(2).mT, (4, 6))
    assert torch.allclose(ours(x).flatten(1, 2), expected, **EXACT)
    ours.reduction.weight.data = theirs.reduction.weight.data
    assert not torch.allclose(ours(x).flatten(1, 2), expected, **EXACT)


def test_norms_of_features_are_optional(tmp_path):
    """mmdetection's Swin has them, PVT does not; mmpretrain's Swin has only the last. The final norm is in neither."""
    theirs = randomise(THEIRS["softmax_swin_tiny"]())
    state = detector_state(theirs)
    for key in [key for key in state if key.startswith(("backbone.norm0", "backbone.norm1"))]:
        del state[key]
    write_checkpoint(tmp_path / "f.pth", state)
    ours = dense("softmax_swin_tiny")
    before = {key: value.clone() for key, value in ours.state_dict().items() if "norm" in key}
    loaded = load_backbone(ours, tmp_path / "f.pth")
    now = ours.state_dict()
    kept = [f"{name}.{kind}" for name in ("norm", "feature_norms.0", "feature_norms.1") for kind in ("weight", "bias")]
    assert sorted(loaded.kept) == sorted(kept)
    assert all(torch.equal(now[key], before[key]) for key in kept)
    assert torch.equal(now["feature_norms.2.bias"], theirs.norm2.bias)
    # A backbone without such norms leaves those of the file out.
    plain = small("softmax_swin_tiny", num_classes=0)
    assert load_backbone(plain, tmp_path / "f.pth").left_out == {"neck": 1, "bbox_head": 1, "feature_norms": 4}


def test_tables_are_resized(tmp_path):
    theirs = randomise(THEIRS["softmax_pvt_tiny"]().double()).eval()
    write_checkpoint(tmp_path / "f.pth", detector_state(theirs))
    ours = with_their_eps(small("softmax_pvt_tiny", num_classes=0, img_size=96).double())
    loaded = load_backbone(ours, tmp_path / "f.pth")
    assert loaded.resized[0] == "stages.0.pos_embed.rows: 16×16 → 24×24"
    x = images(1, 96, 96, dtype=torch.float64)
    assert all(torch.allclose(a, b, **EXACT) for a, b in zip(features(ours, x), theirs(x), strict=True))
    write_checkpoint(tmp_path / "f.pth", detector_state(THEIRS["softmax_swin_tiny"]()))
    larger = small("softmax_swin_tiny", num_classes=0, windows=2)
    assert "stages.0.blocks.0.attn.relative_positions.table: 5×5 → 3×3" in load_backbone(larger, tmp_path / "f.pth").resized


@pytest.mark.parametrize("name", ["pola_pvt_tiny", "pola_pvt_v2_b0", "pola_swin_tiny", "softmax_swin_tiny"])
def test_a_classifiers_file_without_its_head(name, tmp_path):
    """Ours, and the authors'."""
    source = small(name)
    save_checkpoint(source, tmp_path / "ours.safetensors")
    torch.save({"model": published_state_dict(source)}, tmp_path / "theirs.pth")
    ours, theirs = dense(name), dense(name)
    loaded = load_backbone(ours, tmp_path / "ours.safetensors")
    assert equal(ours, {key: value for key, value in source.state_dict().items() if not key.startswith("head.")})
    assert (loaded.names, loaded.left_out) == ("our", {"head": 2})
    assert str(loaded).endswith("ours.safetensors; not in the file: feature_norms; left out: head (2)")
    assert load_backbone(theirs, tmp_path / "theirs.pth").names == "published"
    assert equal(theirs, published_by_load(name, source))


def published_by_load(name, source):
    again = small(name)
    again.load_state_dict(published_state_dict(source), strict=True)
    return {key: value for key, value in again.state_dict().items() if not key.startswith("head.")}


def test_a_classifier_of_the_models_own_stays(tmp_path):
    model = small("pola_pvt_tiny")
    save_checkpoint(small("pola_pvt_tiny", num_classes=9), tmp_path / "f.safetensors")
    head = model.head.weight.clone()
    assert load_backbone(model, tmp_path / "f.safetensors").left_out == {"head": 2}
    assert torch.equal(model.head.weight, head)


def test_timms_weights_in_the_softmax_twins(tmp_path):
    sizes = {"embed_dim": 8, "depths": (1, 2, 2, 1), "num_heads": (2, 2, 2, 2), "mlp_ratio": 2}
    swin = timm.create_model("swin_tiny_patch4_window7_224", num_classes=6, **sizes)
    ours = {"dims": (8, 16, 32, 64), "depths": (1, 2, 2, 1), "num_heads": 2, "mlp_ratios": 2}
    pairs = {"softmax_swin_tiny": (swin, ours), "softmax_pvt_v2_b0": (timm.create_model("pvt_v2_b0", num_classes=6), {})}
    for name, (reference, options) in pairs.items():
        reference = randomise(reference.double()).eval()
        torch.save(reference.state_dict(), tmp_path / "timm.pth")
        model = polaformer.create_model(name, num_classes=0, **options).double().eval()
        loaded = load_backbone(model, tmp_path / "timm.pth")
        assert (loaded.names, loaded.left_out) == ("published", {"head": 2})
        x = images(1, 224, 224, dtype=torch.float64)
        with torch.no_grad():
            expected = reference.forward_features(x)
            expected = expected.permute(0, 3, 1, 2) if "swin" in name else expected
            assert torch.allclose(model.forward_features(x), expected, **EXACT)


@pytest.mark.parametrize("name", ["pola_pvt_tiny", "softmax_swin_tiny"])
def test_features_from_a_later_stage_on(name, tmp_path):
    """Pruned: without the final norm and the norms of features that are not used."""
    options = SMALL[name] | {"img_size": 64}
    source, ours = dense(name), Features(name, first_stage=1, feature_norms=True, **options)
    save_checkpoint(source, tmp_path / "f.safetensors")
    assert load_backbone(ours.backbone, tmp_path / "f.safetensors").left_out == {"norm": 2, "feature_norms": 2}
    x = images()
    expected = source.forward_intermediates(x, intermediates_only=True)[1:]
    assert all(torch.equal(a, b) for a, b in zip(ours.eval()(x), expected, strict=True))


class Detector(nn.Module):
    """A backbone, somewhere inside a model with other parts."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = nn.ModuleDict({"backbone": backbone, "fpn": nn.Conv2d(4, 4, 1)})
        self.head = nn.Linear(4, 4)


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_a_detectors_file_of_ours(ending, tmp_path):
    source, path = Detector(dense("pola_pvt_tiny", img_size=(64, 144))), tmp_path / f"detector.{ending}"
    if ending == "pth":
        torch.save(source.state_dict(), path)
    else:
        write_safetensors(source.state_dict(), path, model_metadata(source))
    ours = dense("pola_pvt_tiny", img_size=(64, 144))
    loaded = load_backbone(ours, path)
    assert equal(ours, source.backbone["backbone"].state_dict())
    assert (loaded.left_out, loaded.kept, loaded.resized) == ({"backbone": 2, "head": 2}, [], [])
    if ending == "safetensors":  # which state the grids of tables
        square = dense("pola_pvt_tiny", img_size=96)
        assert "stages.0.pos_embed.rows: 16×36 → 24×24" in load_backbone(square, path).resized


def test_runs_and_checkpoints(tmp_path):
    old, new = small("pola_pvt_tiny"), small("pola_pvt_tiny")
    files = []
    for model in (old, new):
        save_checkpoint(model, tmp_path / "f.safetensors")
        files.append((tmp_path / "f.safetensors").read_bytes())
    run, ours = tmp_path / "run", dense("pola_pvt_tiny")
    run.mkdir()
    with pytest.raises(DataError, match="is neither a run nor a checkpoint"):
        load_backbone(ours, run)
    at = checkpoint.write(run / "checkpoints", 1, {"model.safetensors": files[0], "ema.safetensors": files[1]}, keep=1)
    for path in (run, at):
        ours = dense("pola_pvt_tiny")
        assert load_backbone(ours, path).path == at / "ema.safetensors"
        assert torch.equal(ours.stages[0].blocks[0].attn.qkv.weight, new.stages[0].blocks[0].attn.qkv.weight)
    (run / "model.safetensors").write_bytes(files[0])
    assert load_backbone(ours, run).path == run / "model.safetensors"


@pytest.mark.parametrize("name", ["softmax_pvt_tiny", "softmax_pvt_v2_b0", "softmax_swin_tiny"])
def test_the_original_repositories_detectors(name, tmp_path):
    """Official PVT and Swin for detection: the names of classification below `backbone.`, PVT's class token, Swin's norms."""
    source = small(name)
    state = {key: value for key, value in published_state_dict(source).items() if not key.startswith(("head.", "norm."))}
    extra = {}
    if name == "softmax_pvt_tiny":
        table = state["pos_embed4"]
        state["pos_embed4"] = torch.cat([torch.full_like(table[:, :1], 99.0), table], dim=1)
        extra = {"cls_token": torch.ones(1, 1, 20)}
    if "swin" in name:
        dims = enumerate(SMALL[name]["dims"])
        extra = {f"norm{i}.{kind}": torch.full((dim,), 7.0) for i, dim in dims for kind in ("weight", "bias")}
        extra["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(9, 9, dtype=torch.long)
    content = {"meta": {}, "state_dict": {f"backbone.{key}": value for key, value in (state | extra).items()}}
    torch.save(content, tmp_path / "f.pth")
    ours = dense(name)
    loaded = load_backbone(ours, tmp_path / "f.pth")
    assert loaded.names == "published"
    expected = {key: value for key, value in published_by_load(name, source).items() if not key.startswith("norm.")}
    assert equal(ours, expected)
    assert loaded.left_out == ({"cls_token": 1} if extra and "pvt" in name else {})
    assert ("swin" not in name) or bool((ours.feature_norms[3].weight == 7).all())


def refused(name, path):
    """The message, after checking that nothing was loaded."""
    model = dense(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_backbone(model, path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    return str(caught.value)


@pytest.mark.parametrize("family", ["pvt_tiny", "pvt_v2_b0", "swin_tiny"])
def test_linear_attention_and_a_softmax_file(family, tmp_path):
    softmax, linear = f"softmax_{family}", f"pola_{family}"
    write_checkpoint(tmp_path / "f.pth", detector_state(THEIRS[softmax]()))
    message = refused(linear, tmp_path / "f.pth")
    assert f"f.pth is for softmax attention, but the attention of {linear} here is pola" in message
    assert f"Choose the softmax twin ({softmax}), or give weights" in message
    save_checkpoint(small(softmax), tmp_path / "f.safetensors")
    assert "f.safetensors is for softmax attention" in refused(linear, tmp_path / "f.safetensors")


def test_another_model_is_named(tmp_path):
    save_checkpoint(small("pola_swin_tiny"), tmp_path / "ours.safetensors")
    message = refused("pola_pvt_tiny", tmp_path / "ours.safetensors")
    assert "ours.safetensors holds pola_swin_tiny, not pola_pvt_tiny; nothing was loaded. Choose that model" in message
    sizes = {"dims": (32, 64, 160, 256), "depths": (2, 2, 2, 2), "num_heads": (1, 2, 5, 8), "mlp_ratios": 8}
    theirs = mmdetection.PVT(sizes, v2=True)
    for i, stage in enumerate(theirs.layers):  # b0 has 8, 8, 4, 4
        for block in stage[1] if i > 1 else []:
            block.ffn = mmdetection.ConvolutionalFeedForward(sizes["dims"][i], 4 * sizes["dims"][i], depthwise=True)
    write_checkpoint(tmp_path / "theirs.pth", detector_state(theirs))
    for name in ("softmax_swin_tiny", "pola_swin_tiny"):
        assert f"theirs.pth holds softmax_pvt_v2_b0, not {name};" in refused(name, tmp_path / "theirs.pth")


def test_a_parameter_too_few_or_too_many(tmp_path):
    state, path = detector_state(THEIRS["softmax_swin_tiny"]()), tmp_path / "f.pth"
    missing = "backbone.stages.1.blocks.0.ffn.layers.1.bias"
    write_checkpoint(path, {key: value for key, value in state.items() if key != missing})
    message = refused("softmax_swin_tiny", path)
    assert "does not fit softmax_swin_tiny, and nothing was loaded:\n1 missing in the file:\n" in message
    assert "\n  stages.1.blocks.0.mlp.fc2.bias" in message
    write_checkpoint(path, state | {"backbone.absolute_pos_embed": torch.ones(1, 256, 8)})
    assert "1 unexpected in the file:\n  absolute_pos_embed" in refused("softmax_swin_tiny", path)
    write_checkpoint(path, state | {"backbone.stages.0.blocks.0.ffn.layers.1.weight": torch.ones(8, 17)})
    assert "mlp.fc2.weight has shape (8, 17) in the file but (8, 16) in the model" in refused("softmax_swin_tiny", path)
    # Two names for one parameter.
    write_checkpoint(path, state | {"backbone.patch_embed.proj.bias": torch.ones(8)})
    assert "1 unexpected in the file:\n  patch_embed.proj.bias" in refused("softmax_swin_tiny", path)


def test_files_without_a_backbone(tmp_path):
    torch.save({"neck.weight": torch.ones(2), "bbox_head.bias": torch.ones(3)}, tmp_path / "heads.pth")
    message = refused("pola_pvt_tiny", tmp_path / "heads.pth")
    assert "heads.pth holds no backbone for pola_pvt_tiny; nothing was loaded. None of its 2 parameters (neck.weight" in message
    both = {f"{who}.backbone.x": torch.ones(1) for who in ("teacher", "student")}
    torch.save(both, tmp_path / "both.pth")
    assert "holds 2 backbones (teacher.backbone., student.backbone.)" in refused("pola_pvt_tiny", tmp_path / "both.pth")


def test_files_that_are_no_checkpoints(tmp_path):
    (tmp_path / "text.pth").write_text("hello")
    save_checkpoint(small("pola_pvt_tiny"), tmp_path / "half.safetensors")
    content = (tmp_path / "half.safetensors").read_bytes()
    (tmp_path / "half.safetensors").write_bytes(content[: len(content) // 2])
    messages = {
        "text.pth": "is neither a safetensors file nor a complete torch.save file",
        "half.safetensors": "is not a complete safetensors file",
        "absent.pth": "cannot be read: No such file",
    }
    for name, message in messages.items():
        assert message in refused("pola_pvt_tiny", tmp_path / name)


def test_weights_that_are_not_finite(tmp_path):
    source = small("pola_pvt_tiny")
    source.stages[1].blocks[0].norm1.bias.data[0] = float("nan")
    save_checkpoint(source, tmp_path / "f.safetensors")
    message = "has weights that are not finite, first in stages.1.blocks.0.norm1.bias"
    assert message in refused("pola_pvt_tiny", tmp_path / "f.safetensors")


def test_a_backbone_without_memory(tmp_path):
    with torch.device("meta"):
        model = polaformer.create_model("pola_pvt_tiny")
    with pytest.raises(CheckpointError, match="to_empty"):
        load_backbone(model, tmp_path / "f.pth")
