"""What every registered model can do, at full width and depth; a new model is tested by being registered.

The smallest of each family stand in the default suite, the others in `make test-all`.
"""

import pytest
import timm
import torch
from torch import nn

import polaformer
from models import images
from polaformer.backbones.registry import MODELS
from polaformer.backbones.timm_models import register_all

NAMES = polaformer.list_models()
SMALLEST = ("pola_deit_tiny", "pola_pvt_tiny", "pola_pvt_v2_b0", "pola_swin_tiny", "softmax_pvt_v2_b0", "softmax_swin_tiny")
ODD_SIZES = [(200, 312), (97, 61), (33, 130)]


@pytest.fixture(scope="module", params=[pytest.param(n, marks=() if n in SMALLEST else pytest.mark.long) for n in NAMES])
def model(request):
    torch.manual_seed(0)
    return polaformer.create_model(request.param, num_classes=7).eval()


def expected_features(model, height, width):
    return [(info["num_chs"], -(-height // info["reduction"]), -(-width // info["reduction"])) for info in model.feature_info]


def test_forward_and_backward(model):
    """Every parameter that should has a finite gradient; only PVT's unused norm has none."""
    model(images(2, 72, 88)).square().sum().backward()
    without = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert without == ({"norm.weight", "norm.bias"} if type(model).__name__ == "PVT" else set())
    for name, parameter in model.named_parameters():
        if name not in without:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            # Of DeiT's last block the class token alone is classified, and no convolution acts on it.
            is_unseen = type(model).__name__ == "DeiT" and name.startswith("blocks.11.attn.conv.")
            assert parameter.grad.any() != is_unseen, name
    model.zero_grad()


def test_training_mode(model):
    model.train()
    model(images(2, 40, 56)).square().sum().backward()
    model.eval()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    model.zero_grad()


@pytest.mark.parametrize("size", ODD_SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_any_input_size_in_a_batch_of_one(model, size):
    x = images(1, *size)
    with torch.no_grad():
        last, features = model.forward_intermediates(x)
        logits = model(x)
        assert torch.equal(logits, model.forward_head(last))
    assert logits.shape == (1, 7)
    assert logits.isfinite().all()
    assert [tuple(feature.shape[1:]) for feature in features] == expected_features(model, *size)
    assert all(feature.isfinite().all() for feature in features)


def test_saved_and_loaded_it_is_bitwise_equal(model, tmp_path):
    polaformer.save_checkpoint(model, tmp_path / "model.safetensors")
    again = polaformer.create_model(**model.built_from).eval()
    loaded = polaformer.load_checkpoint(again, tmp_path / "model.safetensors")
    assert loaded == ([], [])
    state, other = model.state_dict(), again.state_dict()
    assert state.keys() == other.keys()
    assert all(torch.equal(state[key], other[key]) for key in state)
    x = images(1, 64, 64)
    with torch.no_grad():
        assert torch.equal(model(x), again(x))


def test_timm_makes_it_and_its_features(model):
    name = model.built_from["name"]
    with torch.device("meta"):
        whole = timm.create_model(name, num_classes=3)
        features = timm.create_model(name, features_only=True)
        out = features(torch.empty(2, 3, 96, 64))
    assert type(whole) is type(model)
    assert whole.default_cfg["input_size"] == (3, *model.img_size)
    wanted = [model.feature_info[index] for index in features.out_indices]
    assert features.feature_info.channels() == [info["num_chs"] for info in wanted]
    assert features.feature_info.reduction() == [info["reduction"] for info in wanted]
    assert [f.shape[1:] for f in out] == [expected_features(model, 96, 64)[index] for index in features.out_indices]


def test_strict_ddp_finds_no_unused_parameter(model, tmp_path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=False)
        for _ in range(2):  # the second pass complains if the first left a gradient out
            parallel(images(1, 32, 32)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    finally:
        torch.distributed.destroy_process_group()
        model.zero_grad()


def test_no_name_of_ours_hides_one_of_timms():
    before = (
        set(timm.list_models(module="swin_transformer")) | set(timm.list_models("pvt_v2*")) | set(timm.list_models("deit*"))
    )
    assert before
    assert not before & set(NAMES)
    assert set(NAMES) <= set(timm.list_models())


def test_a_name_that_timm_has_stays_timms(monkeypatch):
    theirs = timm.models.model_entrypoint("resnet18")
    monkeypatch.setitem(MODELS, "resnet18", MODELS["pola_pvt_tiny"])
    register_all()
    assert timm.models.model_entrypoint("resnet18") is theirs
