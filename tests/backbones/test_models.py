"""What holds for all families and takes a small model to show."""

import inspect

import PIL.Image
import pytest
import timm
import torch
from timm.layers import DropPath
from timm.models import group_parameters
from timm.optim import create_optimizer_v2
from torch.nn import functional as F
from torch.nn.parameter import Parameter

import polaformer
from models import SMALL, images, small
from polaformer.attention import AttentionLayer, PolaAttention, WindowAttention
from polaformer.attention.tables import TokenTable
from polaformer.backbones.block import Block
from polaformer.backbones.layout import Layout
from polaformer.backbones.mechanisms import mechanism_of_stages

FAMILIES = ["pola_deit_tiny", "pola_pvt_tiny", "pola_pvt_v2_b0", "pola_swin_tiny"]


def mechanisms(model):
    return [type(module.core).__name__ for module in model.modules() if isinstance(module, AttentionLayer)]


# Names and arguments.


def test_list_models_takes_patterns():
    assert polaformer.list_models("pola_swin_*_384") == ["pola_swin_tiny_384", "pola_swin_small_384", "pola_swin_base_384"]
    assert polaformer.list_models(["*_deit_tiny", "pola_pvt_v2_b5"]) == [
        "pola_deit_tiny",
        "pola_pvt_v2_b5",
        "softmax_deit_tiny",
    ]
    assert polaformer.list_models("nothing*") == []
    assert len(polaformer.list_models("pola_*")) == len(polaformer.list_models("softmax_*")) == 19


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        ("LLSS", ["PolaCore"] * 3 + ["SoftmaxCore"] * 3),
        ("pola, pola,softmax,softmax", ["PolaCore"] * 3 + ["SoftmaxCore"] * 3),
        (("pola", "softmax", "linear", "pola"), ["PolaCore"] + ["SoftmaxCore"] * 2 + ["LinearCore"] * 2 + ["PolaCore"]),
        ("SSSS", ["SoftmaxCore"] * 6),
        ("softmax", ["SoftmaxCore"] * 6),
        ("L" * 4, ["PolaCore"] * 6),
        ("linear", ["LinearCore"] * 6),
    ],
)
def test_attention_is_chosen_for_each_stage(attention, expected):
    model = small("pola_swin_tiny", attention=attention)
    assert mechanisms(model) == expected
    assert model(images()).isfinite().all()


def test_a_softmax_twin_is_the_pola_model_with_softmax():
    for name in FAMILIES:
        twin, changed = small(name.replace("pola", "softmax")), small(name, attention="softmax")
        assert set(mechanisms(twin)) == {"SoftmaxCore"}
        assert repr(twin) == repr(changed)
        other = {key: p.shape for key, p in small(name, attention="pola").named_parameters() if ".attn." not in key}
        assert {key: p.shape for key, p in twin.named_parameters() if ".attn." not in key} == other


def test_published_settings_of_the_pola_layer():
    """α = 4, kernel 5, ε = 1e-6, and no reduction of keys, in every variant."""
    for name in polaformer.list_models("pola_*"):
        with torch.device("meta"):
            model = polaformer.create_model(name)
        layers = [module for module in model.modules() if isinstance(module, PolaAttention)]
        assert layers
        for layer in layers:
            assert (layer.core.alpha, layer.core.eps, layer.core.polarity) == (4.0, 1e-6, "both")
            assert layer.conv.kernel_size == (5, 5)
            assert layer.key_reduction is None
            assert layer.gate is not None


def test_the_variants_numbers_can_be_overridden():
    model = small("pola_pvt_tiny", patch_size=2, reductions=(4, 2, 1, 1), alpha=3.0, kernel_size=3, in_chans=1)
    layer = model.stages[0].blocks[0].attn
    assert (model.stages[0].stride, layer.key_reduction.ratio, layer.core.alpha) == (2, 4, 3.0)
    assert layer.conv.kernel_size == (3, 3)
    assert [info["reduction"] for info in model.feature_info] == [2, 4, 8, 16]
    assert model(images(2, 32, 32, channels=1)).shape == (2, 5)
    swin = small("softmax_swin_tiny", windows=(4, 4, 2, 2))
    assert [module.window for module in swin.modules() if isinstance(module, WindowAttention)] == [4, 4, 4, 2, 2, 2]
    clipped = small("softmax_swin_tiny", windows=7)  # on grids of 16, 8, 4 and 2 tokens a side
    assert [module.window for module in clipped.modules() if isinstance(module, WindowAttention)] == [7, 7, 7, 4, 4, 2]
    ablated = small("pola_deit_tiny", attention_options={"gate": None, "conv": None, "polarity": "same"})
    assert ablated.blocks[0].attn.gate is None
    assert ablated.blocks[0].attn.core.polarity == "same"
    linear = small("pola_pvt_tiny", attention="linear,softmax,linear,softmax")
    ratios = [stage.blocks[0].attn.key_reduction and stage.blocks[0].attn.key_reduction.ratio for stage in linear.stages]
    assert ratios == [None, 4, None, None]
    three = small("softmax_pvt_tiny", dims=(8, 12, 16), depths=(1, 1, 1), num_heads=2)
    assert [stage.blocks[0].attn.key_reduction is not None for stage in three.stages] == [True, True, False]
    assert three(images()).shape == (2, 5)


def test_deit_without_a_class_token_pools_the_patches():
    model = small("pola_deit_tiny", class_token=False)
    assert model.global_pool == "avg"
    assert len(model.pos_embed.rows) == len(model.blocks[0].attn.key_positions.rows) == 64
    x = images()
    assert torch.allclose(model.forward_head(model.forward_features(x), pre_logits=True), model.forward_features(x).mean(1))
    with pytest.raises(ValueError, match=r"global_pool is 'token'; choose one of 'avg', ''"):
        small("pola_deit_tiny", class_token=False, global_pool="token")
    with pytest.raises(ValueError, match="global_pool is 'token'"):
        model.reset_classifier(3, "token")


@pytest.mark.parametrize(
    ("error", "message", "name", "options"),
    [
        (ValueError, "there is no model 'pola_swin_tny'; did you mean 'pola_swin_tiny'", "pola_swin_tny", {}),
        (TypeError, "does not take depht; did you mean 'depths'", "pola_pvt_tiny", {"depht": 3}),
        (TypeError, "does not take windows", "pola_pvt_v2_b0", {"windows": 7}),
        (ValueError, "no mechanism 'sotfmax'", "pola_pvt_tiny", {"attention": "sotfmax"}),
        (ValueError, "names 3 stages of 4", "pola_pvt_tiny", {"attention": "pola,pola,softmax"}),
        (ValueError, "no mechanism 'LLS'", "pola_swin_tiny", {"attention": "LLS"}),
        (ValueError, "no mechanism 'LLMS3'", "pola_swin_tiny", {"attention": "LLMS3"}),
        (ValueError, "depths is .2, 2., 2 values for 4 stages", "pola_pvt_tiny", {"depths": (2, 2)}),
        (ValueError, "num_heads is 0; give positive whole numbers", "pola_pvt_tiny", {"num_heads": 0}),
        (ValueError, "dim 64 cannot be shared out among 3 heads", "pola_pvt_tiny", {"num_heads": 3}),
        (ValueError, "img_size is 'large'", "pola_pvt_tiny", {"img_size": "large"}),
        (ValueError, "img_size is -1", "pola_pvt_tiny", {"img_size": -1}),
        (ValueError, "global_pool is 'max'", "pola_swin_tiny", {"global_pool": "max"}),
        (
            TypeError,
            "attention_options holds gates; PolaAttention takes",
            "pola_deit_tiny",
            {"attention_options": {"gates": 1}},
        ),
        (ValueError, "drop_path_rate is 1.5", "pola_swin_tiny", {"drop_path_rate": 1.5}),
        (ValueError, "num_classes is -1", "pola_swin_tiny", {"num_classes": -1}),
        (ValueError, "in_chans is 0", "pola_swin_tiny", {"in_chans": 0}),
        (ValueError, "patch_size is 0", "pola_swin_tiny", {"patch_size": 0}),
        (ValueError, "dims is 64; give the channels of each stage", "pola_pvt_tiny", {"dims": 64}),
        (ValueError, "dims is .*positive whole numbers", "pola_swin_tiny", {"dims": (8.0, 8, 8, 8)}),
        (ValueError, "dims is 192.0; give positive whole numbers", "pola_deit_tiny", {"dims": 192.0}),
        (ValueError, "depths is 1.5; give positive whole numbers", "pola_pvt_tiny", {"depths": 1.5}),
        (ValueError, "alpha is '4'", "softmax_pvt_tiny", {"alpha": "4"}),
        (ValueError, "kernel_size is 4", "softmax_pvt_tiny", {"kernel_size": 4}),
        (ValueError, "attention is 5; give one of", "pola_pvt_tiny", {"attention": 5}),
        (ValueError, "proj_drop_rate is 'x'", "pola_pvt_tiny", {"proj_drop_rate": "x"}),
        (TypeError, "attention_options is a list", "softmax_pvt_tiny", {"attention_options": ["gate"]}),
        (TypeError, "attention_options holds gat;", "softmax_pvt_tiny", {"attention_options": {"gat": 1}}),
        (TypeError, "out_indices chooses features; give features_only=True", "pola_pvt_tiny", {"out_indices": [0]}),
        (TypeError, "features_only is 'no'", "pola_pvt_tiny", {"features_only": "no"}),
        (ValueError, "mlp_ratio is 0.001, which leaves no channel of 64", "pola_pvt_tiny", {"mlp_ratios": 0.001}),
        (ValueError, "there is no checkpoint /nowhere.pth", "pola_swin_base", {"checkpoint": "/nowhere.pth"}),
    ],
)
def test_wrong_arguments_get_a_clear_error(error, message, name, options):
    with pytest.raises(error, match=message):
        polaformer.create_model(name, **options)


@pytest.mark.parametrize(
    ("error", "message", "x", "mask"),
    [
        (
            ValueError,
            r"x has shape \(3, 32, 32\); give a tensor of images, \(batch, 3, height, width\)",
            torch.ones(3, 32, 32),
            None,
        ),
        (ValueError, r"x has shape \(1, 1, 32, 32\)", torch.ones(1, 1, 32, 32), None),
        (ValueError, "x is a list", [1], None),
        (TypeError, "dtype torch.uint8", torch.ones(1, 3, 32, 32, dtype=torch.uint8), None),
        (TypeError, "dtype torch.float64 but the model torch.float32", torch.ones(1, 3, 32, 32, dtype=torch.float64), None),
        (ValueError, "at least one pixel", torch.ones(1, 3, 0, 32), None),
        (
            ValueError,
            r"mask is torch.bool \(1, 32, 31\); give a boolean tensor",
            torch.ones(1, 3, 32, 32),
            torch.ones(1, 32, 31) > 0,
        ),
        (ValueError, "mask is torch.float32", torch.ones(1, 3, 32, 32), torch.ones(1, 32, 32)),
        (ValueError, "mask is list", torch.ones(1, 3, 32, 32), [1]),
        (ValueError, "leaves no pixel of image 0", torch.ones(1, 3, 32, 32), torch.zeros(1, 32, 32) > 0),
    ],
)
@pytest.mark.parametrize("name", ["pola_deit_tiny", "pola_swin_tiny"])
def test_wrong_input_gets_a_clear_error(name, error, message, x, mask):
    with pytest.raises(error, match=message):
        small(name)(x, mask)


# Sizes.


@pytest.mark.parametrize("name", SMALL)
def test_at_the_native_size_nothing_is_resized_padded_or_masked(name, monkeypatch):
    model, x = small(name), images()
    expected = model(x)

    def refuse(*arguments, **options):
        raise AssertionError("something was resized")

    monkeypatch.setattr(F, "interpolate", refuse)
    windows = [module for module in model.modules() if isinstance(module, WindowAttention)]
    seen = []
    for module in windows:
        cut = module._windows
        monkeypatch.setattr(module, "_windows", lambda *a, cut=cut: seen.append(cut(*a)[1]) or cut(*a))
    assert torch.equal(model(x), expected)
    if windows:
        # 16, 8, 4 and 2 tokens a side in windows of 3 (2 in the last stage): all but the last are padded, and so masked.
        assert [exists is None for exists in seen] == [module.window == 2 for module in windows]


@pytest.mark.parametrize("name", FAMILIES)
def test_set_input_size_equals_resizing_at_run_time(name, monkeypatch):
    model, x = small(name).double(), images(1, 88, 104, dtype=torch.float64)
    expected = model(x)
    native = model(images(1, dtype=torch.float64)).shape
    model.set_input_size((88, 104))
    assert model.img_size == (88, 104)
    assert torch.allclose(model(x), expected, rtol=1e-12, atol=1e-12)
    assert model(images(1, dtype=torch.float64)).shape == native
    tables = [module for module in model.modules() if isinstance(module, TokenTable)]
    assert all(isinstance(table.rows, Parameter) and table.rows.requires_grad for table in tables)
    # Nothing is left to resize at that size.
    monkeypatch.setattr(F, "interpolate", lambda *_, **__: pytest.fail("something was resized"))
    assert torch.allclose(model(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in SMALL),
        ("pola_swin_tiny", {"attention": "LLLL"}),
        ("pola_pvt_tiny", {"reductions": 2}),
        ("pola_pvt_v2_b0", {"reductions": (4, 2, 2, 1)}),
        ("pola_deit_tiny", {"reductions": 2}),
        ("pola_deit_tiny", {"class_token": False}),
        ("pola_deit_tiny", {"attention_options": {"gate": "matrix", "conv": "deformable"}}),
    ],
    ids=str,
)
def test_padding_law_an_image_alone_and_in_a_padded_batch_gives_the_same_features(name, options):
    """Also with NaN in the padding, for features, logits and the gradient of the image; in softmax windows too."""
    model = small(name, **options).double()
    sizes, largest = [(41, 70), (64, 37), (23, 80)], (64, 80)
    batch, mask = torch.full((3, 3, *largest), torch.nan, dtype=torch.float64), torch.zeros(3, *largest, dtype=torch.bool)
    alone = [images(1, *size, dtype=torch.float64).requires_grad_() for size in sizes]
    for index, image in enumerate(alone):
        height, width = image.shape[2:]
        batch[index, :, :height, :width], mask[index, :height, :width] = image[0].detach(), True
    batch.requires_grad_()
    logits, features = model(batch, mask), model.forward_intermediates(batch, mask=mask, intermediates_only=True)
    logits.square().sum().backward()
    for index, image in enumerate(alone):
        own_logits = model(image)
        assert torch.allclose(logits[index], own_logits[0], rtol=1e-9, atol=1e-9)
        for feature, own in zip(features, model.forward_intermediates(image, intermediates_only=True), strict=True):
            height, width = own.shape[2:]
            assert torch.allclose(feature[index, :, :height, :width], own[0], rtol=1e-9, atol=1e-9)
            rest = feature[index].detach().clone()
            rest[:, :height, :width] = 0
            assert not rest.any()
        own_logits.square().sum().backward()
        height, width = image.shape[2:]
        assert torch.allclose(batch.grad[index, :, :height, :width], image.grad[0], rtol=1e-7, atol=1e-7)
        outside = batch.grad[index].masked_fill(mask[index], 0.0)
        assert not outside.any()


@pytest.mark.parametrize("name", SMALL)
def test_content_outside_the_mask_influences_nothing(name):
    model, x, mask = small(name), images(2, 50, 70), torch.zeros(2, 50, 70, dtype=torch.bool)
    mask[0, :50, :33], mask[1, :21, :70] = True, True
    expected = model(x, mask)
    other = torch.where(mask[:, None], x, torch.nan)
    assert torch.equal(model(other, mask), expected)
    assert expected.isfinite().all()


def test_a_padded_image_that_fits_into_one_window_is_not_shifted_either():
    """Beside a larger one in the batch, of which the windows are shifted."""
    model = small("softmax_swin_tiny", windows=4).double()
    x, mask = images(2, 64, 64, dtype=torch.float64), torch.ones(2, 64, 64, dtype=torch.bool)
    mask[1, 16:], mask[1, :, 16:] = False, False
    assert torch.allclose(model(x, mask)[1], model(x[1:, :, :16, :16])[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SMALL)
def test_a_mask_of_everything_changes_nothing(name):
    model, x = small(name).double(), images(2, 50, 70, dtype=torch.float64)
    everything = torch.ones(2, 50, 70, dtype=torch.bool)
    assert torch.allclose(model(x, everything), model(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SMALL)
def test_a_batch_of_none_gives_none(name):
    assert small(name)(images(0)).shape == (0, 5)
    assert small(name)(images(0), torch.ones(0, 64, 64, dtype=torch.bool)).shape == (0, 5)


@pytest.mark.parametrize("name", ["pola_swin_tiny", "pola_deit_tiny"])
def test_masked_pooling_does_not_leave_half_precision(name):
    model = small(name, global_pool="avg")
    mask = torch.ones(1, 1200, 1200, dtype=torch.bool)
    features = torch.full((1, 20, 38, 38), 60.0) if "swin" in name else torch.full((1, 1 + 150 * 150, 16), 60.0)
    pooled = model.forward_head(features.half(), pre_logits=True, mask=mask)
    assert torch.allclose(pooled.float(), torch.full_like(pooled, 60.0).float())


def test_pvts_positions_are_resized_bilinearly_and_key_tables_bicubically():
    model = small("pola_pvt_tiny")
    stage = model.stages[0]
    for table, mode in ((stage.pos_embed, "bilinear"), (stage.blocks[0].attn.key_positions, "bicubic")):
        image = table.rows.T.unflatten(1, (16, 16))[None]
        expected = F.interpolate(image, size=(20, 13), mode=mode)[0].flatten(1).T
        assert torch.equal(table((20, 13)), expected)


# Verbs of timm.


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
    with pytest.raises(ValueError, match="the classifier is for the last features"):
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


@pytest.mark.parametrize("name", SMALL)
def test_weight_decay_as_the_authors_have_it(name):
    """Powers, scales, key tables and PVT's positions are decayed; vectors, biases and relative positions are not."""
    model = small(name)
    groups = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    for key, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        spared = parameter.ndim == 1 or key.endswith(("relative_positions.table", "cls_token")) or key == "pos_embed.rows"
        assert (id(parameter) in decayed) != spared, key
    if "softmax" not in name:
        assert any(id(p) in decayed for key, p in model.named_parameters() if key.endswith("core.power"))
        assert any(id(p) in decayed for key, p in model.named_parameters() if key.endswith("key_positions.rows"))


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


@pytest.mark.parametrize("name", FAMILIES)
def test_a_dropped_branch_leaves_its_sample_as_it_was(name):
    """Each of the two branches of a block is dropped for a sample, or scaled up by what the others lost."""
    block = next(module for module in small(name).modules() if isinstance(module, Block))
    block.drop_path = DropPath(0.5)
    grid = (8, 8)
    x = torch.randn(64, 64 + block.attn.num_prefix_tokens, block.attn.dim)
    whole = block.eval()(x, Layout(grid)) - x
    attended = block.attn(block.norm1(x), grid)
    kept_both = torch.stack([block.train()(x, Layout(grid)) - x for _ in range(3)]).detach()
    same = [torch.isclose(one, torch.zeros(()), atol=1e-6).all(dim=(1, 2)) for one in kept_both]
    assert any(0 < rows.sum() < 32 for rows in same)  # a quarter on average: both branches dropped
    only_attention = [torch.isclose(one, 2 * attended, rtol=1e-4, atol=1e-4).all(dim=(1, 2)).sum() for one in kept_both]
    assert any(0 < count < 32 for count in only_attention)
    assert not torch.allclose(whole, attended)


@pytest.mark.parametrize("name", SMALL)
def test_every_rate_and_the_bias_reach_the_modules_they_name(name):
    model = small(name, drop_rate=0.1, proj_drop_rate=0.2, qkv_bias=False)
    assert model.head_drop.p == 0.1
    for module in model.modules():
        if isinstance(module, AttentionLayer):
            assert module.proj_drop.p == 0.2
            assert module.qkv.bias is None
        elif isinstance(module, Block):
            drops = [part.p for part in module.mlp.modules() if isinstance(part, torch.nn.Dropout)]
            assert drops
            assert set(drops) == {0.2}
    features, x = torch.ones(8, model.num_features), images(1)
    assert not torch.equal(model.train().head_drop(features), features)
    assert not torch.equal(model(x), model(x))


# Embedding dimensions, depths, heads, rates of drop path; from the released configurations, and for DeiT and PVTv2 from the
# models that the readings are built on.
VARIANTS = {
    "deit_tiny": (192, 12, 3, 0.0),
    "deit_small": (384, 12, 6, 0.1),
    "deit_base": (768, 12, 12, 0.1),
    "pvt_tiny": ((64, 128, 320, 512), (2, 2, 2, 2), (1, 2, 5, 8), 0.1),
    "pvt_small": ((64, 128, 320, 512), (3, 4, 6, 3), (1, 2, 5, 8), 0.1),
    "pvt_medium": ((64, 128, 320, 512), (3, 4, 18, 3), (1, 2, 5, 8), 0.3),
    "pvt_large": ((64, 128, 320, 512), (3, 8, 27, 3), (1, 2, 5, 8), 0.3),
    "pvt_v2_b0": ((32, 64, 160, 256), (2, 2, 2, 2), (1, 2, 5, 8), 0.1),
    "pvt_v2_b1": ((64, 128, 320, 512), (2, 2, 2, 2), (1, 2, 5, 8), 0.1),
    "pvt_v2_b2": ((64, 128, 320, 512), (3, 4, 6, 3), (1, 2, 5, 8), 0.1),
    "pvt_v2_b3": ((64, 128, 320, 512), (3, 4, 18, 3), (1, 2, 5, 8), 0.3),
    "pvt_v2_b4": ((64, 128, 320, 512), (3, 8, 27, 3), (1, 2, 5, 8), 0.3),
    "pvt_v2_b5": ((64, 128, 320, 512), (3, 6, 40, 3), (1, 2, 5, 8), 0.3),
    "swin_tiny": ((96, 192, 384, 768), (2, 2, 6, 2), (3, 6, 12, 24), 0.2),
    "swin_small": ((96, 192, 384, 768), (2, 2, 18, 2), (3, 6, 12, 24), 0.3),
    "swin_base": ((128, 256, 512, 1024), (2, 2, 18, 2), (4, 8, 16, 32), 0.5),
    "swin_tiny_384": ((96, 192, 384, 768), (2, 2, 6, 2), (3, 6, 12, 24), 0.2),
    "swin_small_384": ((96, 192, 384, 768), (2, 2, 18, 2), (3, 6, 12, 24), 0.3),
    "swin_base_384": ((128, 256, 512, 1024), (2, 2, 18, 2), (4, 8, 16, 32), 0.5),
}


@pytest.mark.parametrize("name", polaformer.list_models())
def test_the_numbers_of_every_variant(name):
    with torch.device("meta"):
        model = polaformer.create_model(name)
    stages = [model.blocks] if "deit" in name else [stage.blocks for stage in model.stages]
    dims, depths, heads, rate = VARIANTS[name.partition("_")[2]]
    expected = [(dims,), (depths,), (heads,)] if "deit" in name else [dims, depths, heads]
    found = [[blocks[0].attn.dim for blocks in stages], [len(b) for b in stages], [b[0].attn.num_heads for b in stages]]
    assert [tuple(one) for one in found] == expected
    rates = [block.drop_path.drop_prob for blocks in stages for block in blocks]
    assert rates == pytest.approx([rate * i / (len(rates) - 1) for i in range(len(rates))])
    windows = {module.window for module in model.modules() if isinstance(module, WindowAttention)}
    assert windows <= ({12} if name.endswith("384") else {7})
    assert bool(windows) == ("swin" in name)


def test_default_cfg_is_the_authors_evaluation():
    for name, crop, size in (("pola_swin_tiny", 0.875, 224), ("pola_swin_base_384", 1.0, 384)):
        with torch.device("meta"):
            model = polaformer.create_model(name)
        config = timm.data.resolve_model_data_config(model)
        assert config["input_size"] == (3, size, size)
        assert (config["crop_pct"], config["crop_mode"], config["interpolation"]) == (crop, "squash", "bicubic")
        assert config["mean"] == (0.485, 0.456, 0.406)
        assert config["std"] == (0.229, 0.224, 0.225)
        transform = timm.data.create_transform(**config)
        assert transform(PIL.Image.new("RGB", (500, 300))).shape == (3, size, size)
    assert small("pola_pvt_tiny", img_size=(64, 96)).default_cfg["input_size"] == (3, 64, 96)


def test_drop_path_grows_linearly_over_all_blocks():
    model = polaformer.create_model("pola_pvt_tiny", drop_path_rate=0.7, **SMALL["pola_pvt_tiny"])
    rates = [block.drop_path.drop_prob for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0.0, 0.175, 0.35, 0.525, 0.7])


# Initialisation.


def test_initial_values_as_published():
    for name in FAMILIES:
        torch.manual_seed(0)
        model = polaformer.create_model(name, drop_path_rate=0.0)
        for key, parameter in model.named_parameters():
            kind = key.rpartition(".")[2]
            if key.endswith(("core.power", "core.scale", "key_positions.rows")) or (kind == "bias" and "conv" not in key):
                is_conv = key.endswith(("patch_embed.proj.bias", "dwconv.bias")) and "v2" not in name
                assert is_conv or not parameter.any(), key
            elif parameter.ndim == 1 and kind == "weight":
                assert (parameter == 1).all(), key
            elif parameter.ndim == 2 or key.endswith("cls_token"):
                assert parameter.std().item() == pytest.approx(0.02, rel=0.15), key
        if "v2" not in name:  # convolutions as PyTorch makes them: uniform within the square root of the fan-in's inverse
            for module in model.modules():
                if isinstance(module, torch.nn.Conv2d):
                    bound = module.weight[0].numel() ** -0.5
                    assert module.weight.abs().max() <= bound
                    assert module.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.15)
        if "v2" in name:
            proj = model.stages[0].patch_embed.proj
            assert proj.weight.std().item() == pytest.approx((2 / (7 * 7 * 32)) ** 0.5, rel=0.1)
            filters = torch.stack([m.conv.weight for m in model.modules() if isinstance(m, PolaAttention)][:2])
            assert filters.std().item() == pytest.approx((2 / 25) ** 0.5, rel=0.1)


# PyTorch.


@pytest.mark.parametrize("name", FAMILIES)
def test_torch_compile_in_one_graph(name):
    model, x = small(name), images()
    compiled = torch.compile(model, fullgraph=True)
    assert torch.allclose(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    compiled(x).sum().backward()
    by_compiled = {key: p.grad.clone() for key, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    model(x).sum().backward()
    largest = max(g.abs().max() for g in by_compiled.values())
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(by_compiled[key], parameter.grad, rtol=1e-3, atol=1e-5 * largest), key


@pytest.mark.parametrize("name", ["pola_deit_tiny", "pola_pvt_v2_b0"])
def test_torch_compile_takes_another_size(name):
    """The second size is compiled with symbols for the sides, which must not take forever, and serves a third."""
    model = small(name)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for size in ((64, 64), (96, 80), (128, 96)):
            x = images(1, *size)
            assert torch.allclose(compiled(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_torch_export_with_a_dynamic_batch(name):
    model = small(name)
    program = torch.export.export(model, (images(2),), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    for batch in (1, 3):
        x = images(batch)
        assert torch.allclose(program.module()(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_and_autocast_are_finite_and_near(name):
    model, x = polaformer.create_model(name, img_size=64, num_classes=5, **SMALL[name]).eval(), images()
    expected = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(model(x).float(), expected, atol=0.05)
    assert torch.allclose(model.bfloat16()(x.bfloat16()).float(), expected, atol=0.05)


def test_mechanism_of_stages_says_what_is_allowed():
    with pytest.raises(ValueError, match="give one of linear, pola, softmax for all stages, 4 of them with commas between"):
        mechanism_of_stages("none", 4)
    assert mechanism_of_stages("L", 1) == ("pola",)


def test_create_model_has_the_documented_arguments():
    arguments = inspect.signature(polaformer.create_model).parameters
    assert list(arguments)[:7] == [
        "name",
        "num_classes",
        "img_size",
        "in_chans",
        "attention",
        "drop_path_rate",
        "checkpoint",
    ]
