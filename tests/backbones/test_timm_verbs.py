"""What timm expects of a model."""

import pytest
import timm
import torch
from timm.models import group_parameters
from timm.optim import create_optimizer_v2

import polaformer
from models import SMALL, images, small
from polaformer.backbones.block import Block

FAMILIES = ["pola_deit_tiny", "pola_pvt_tiny", "pola_pvt_v2_b0", "pola_swin_tiny"]


@pytest.mark.parametrize("name", SMALL)
def test_features_only_equals_forward_intermediates(name):
    options = {"num_classes": 5, "img_size": 64} | SMALL[name]
    model = small(name)
    count = len(model.feature_info)
    for indices in ([0], [-1], list(range(count))):
        torch.manual_seed(0)
        features = timm.create_model(name, features_only=True, out_indices=indices, **options).eval()
        polaformer.load_checkpoint(features, model.state_dict())
        expected = model.forward_intermediates(images(), indices=indices, stop_early=True, intermediates_only=True)
        torch.manual_seed(0)
        model_again = model.forward_intermediates(x := images(), indices=indices, intermediates_only=True)
        assert all(torch.equal(a, b) for a, b in zip(features(x), model_again, strict=True))
        assert [e.shape for e in expected] == [f.shape for f in model_again]
        left = {key.removeprefix("model.") for key, _ in features.named_parameters()}
        assert not any(key.startswith("head.") for key in left)
        if indices == [0] and "deit" not in name:
            assert not any(key.startswith("stages.1.") for key in left)


@pytest.mark.parametrize("name", FAMILIES)
def test_feature_norms_act_on_each_output(name):
    model = small(name, feature_norms=True)
    plain = small(name)
    assert polaformer.load_checkpoint(plain, {k: v for k, v in model.state_dict().items() if "feature_norms" not in k})
    x = images()
    outputs = [one.forward_intermediates(x, intermediates_only=True) for one in (model, plain)]
    for index, (normed, raw) in enumerate(zip(*outputs, strict=True)):
        norm = model.feature_norms[index]
        assert torch.allclose(normed, norm(raw.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), atol=1e-6)
    model.prune_intermediate_layers([0], prune_norm=True)
    used = [key for key, _ in model.named_parameters() if key.startswith("feature_norms")]
    assert used == ["feature_norms.0.weight", "feature_norms.0.bias"]


def test_the_final_norm_is_applied_to_the_last_features_if_so_asked():
    for name in ("pola_swin_tiny", "pola_deit_tiny"):
        model, x = small(name), images()
        last = model.forward_intermediates(x, indices=[-1], norm=True, intermediates_only=True)[0]
        raw = model.forward_intermediates(x, indices=[-1], intermediates_only=True)[0]
        assert torch.allclose(last, model.norm(raw.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), atol=1e-6)


def test_the_final_norm_is_for_the_last_stage_alone():
    model, x = small("pola_swin_tiny"), images()
    normed, raw = (model.forward_intermediates(x, norm=norm, intermediates_only=True) for norm in (True, False))
    assert [torch.equal(a, b) for a, b in zip(normed, raw, strict=True)] == [True, True, True, False]


@pytest.mark.parametrize("name", FAMILIES)
def test_stop_early_computes_nothing_beyond_the_last_feature(name):
    model, calls = small(name), []
    parts = model.blocks if "deit" in name else model.stages
    for index, part in enumerate(parts):
        part.register_forward_hook(lambda *_, index=index: calls.append(index))
    model.forward_intermediates(images(), indices=[0], stop_early=True, intermediates_only=True)
    assert calls == [0]
    model.forward_intermediates(images(), indices=[0], intermediates_only=True)
    assert calls[1:] == list(range(len(parts)))


def test_feature_norms_have_the_familys_epsilon():
    for name, eps in (("pola_deit_tiny", 1e-6), ("pola_pvt_tiny", 1e-6), ("pola_pvt_v2_b0", 1e-6), ("pola_swin_tiny", 1e-5)):
        assert {norm.eps for norm in small(name, feature_norms=True).feature_norms} == {eps}


def test_tokens_instead_of_images_and_the_class_token_on_request():
    model, x = small("pola_deit_tiny"), images()
    (tokens, prefix), *_ = model.forward_intermediates(x, output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True)
    assert tokens.shape == (2, 64, 16)
    assert prefix.shape == (2, 1, 16)
    image = model.forward_intermediates(x, intermediates_only=True)[0]
    assert torch.equal(image.flatten(2).mT, tokens)
    with pytest.raises(ValueError, match="output_fmt is 'NHWC'; choose one of NCHW, NLC"):
        model.forward_intermediates(x, output_fmt="NHWC")


@pytest.mark.parametrize("name", FAMILIES)
def test_features_of_a_batch_of_unequal_images(name):
    features = polaformer.create_model(name, features_only=True, out_indices=[-1], img_size=64, **SMALL[name]).eval()
    x, mask = images(2, 64, 64), torch.ones(2, 64, 64, dtype=torch.bool)
    mask[1, 40:] = False
    alone = features(x[1:, :, :40])[0]
    assert torch.allclose(features(x, mask)[0][1:, :, : alone.shape[2]], alone, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_after_pruning_a_new_classifier_fits_the_last_stage_that_is_left(name):
    model = small(name)
    with pytest.raises(ValueError, match="the classifier needs the last features"):
        model.prune_intermediate_layers([0], prune_head=False)
    model.prune_intermediate_layers([0], prune_norm=True)
    model.reset_classifier(4, "avg")
    assert model(images()).shape == (2, 4)


def test_a_refused_classifier_leaves_the_model_as_it_was():
    model = small("pola_pvt_tiny")
    for arguments in ((-1,), (3, "max"), (True,)):
        with pytest.raises(ValueError, match=r"num_classes is|global_pool is"):
            model.reset_classifier(*arguments)
        assert model.num_classes == 5
        assert model(images()).shape == (2, 5)


@pytest.mark.parametrize("name", SMALL)
def test_reset_classifier(name):
    model = small(name)
    assert model.get_classifier() is model.head
    model.reset_classifier(3)
    assert model(images()).shape == (2, 3)
    model.reset_classifier(0)
    assert model(images()).shape == (2, model.num_features)
    model = model.double()
    model.reset_classifier(4)
    assert model.head.weight.dtype == torch.float64
    assert not model.head.training
    assert model.train().head.training
    model.eval()
    model.reset_classifier(0)
    model = model.float()
    assert model.forward_head(model.forward_features(images()), pre_logits=True).shape == (2, model.num_features)


@pytest.mark.parametrize("name", SMALL)
def test_gradient_checkpointing_computes_blocks_again_and_gives_the_same_gradients(name):
    """Also with random draws inside, and where nothing before the first block is trained."""
    model, x = small(name, drop_path_rate=0.5), images(4)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    calls = []
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        calls.clear()
        torch.manual_seed(3)
        model.train()(x).square().sum().backward()
        assert len(calls) == (2 if enable else 1) * len(blocks)
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters() if p.requires_grad})
    assert all(torch.equal(gradients[0][key], gradients[1][key]) for key in gradients[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_layer_wise_learning_rates_grow_towards_the_head(name):
    model = small(name)
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.5)
    rates = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    stem = model.patch_embed if "deit" in name else model.stages[0].patch_embed
    first = model.blocks[0] if "deit" in name else model.stages[0].blocks[0]
    last = model.blocks[-1] if "deit" in name else model.stages[-1].blocks[-1]
    found = [rates[id(module.weight)] for module in (stem.proj, first.norm1, last.norm1, model.head)]
    assert found == sorted(found)
    assert len(set(found)) == 4
    assert found[-1] == 1.0
    groups = [group_parameters(model, model.group_matcher(coarse=coarse), reverse=True) for coarse in (False, True)]
    parts = [len(set(numbers.values())) for numbers in groups]
    assert parts[0] == parts[1] if "deit" in name else parts[0] > parts[1]


@pytest.mark.parametrize("name", SMALL)
def test_arguments_of_timm_itself_reach_timm(name):
    model = timm.create_model(name, pretrained_strict=False, **SMALL[name])
    assert "pretrained_strict" not in model.built_from
    with pytest.raises(TypeError, match="unexpected keyword argument 'pretrained_stricd'"):
        timm.create_model(name, pretrained_stricd=False, **SMALL[name])
