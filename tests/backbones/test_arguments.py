"""Names of models, and every argument that makes one."""

import inspect
from dataclasses import fields

import pytest
import torch

import polaformer
from models import images, small
from polaformer.attention import AttentionLayer, PolaAttention, WindowAttention
from polaformer.backbones.config import stage_mechanisms

FAMILIES = ["pola_deit_tiny", "pola_pvt_tiny", "pola_pvt_v2_b0", "pola_swin_tiny"]


def mechanisms(model):
    return [type(module.core).__name__ for module in model.modules() if isinstance(module, AttentionLayer)]


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
    """α = 4, kernel 5, ε = 1e-6, and no key reduction, in every variant."""
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
        (ValueError, "unknown model 'pola_swin_tny'; did you mean 'pola_swin_tiny'", "pola_swin_tny", {}),
        (TypeError, "does not take depht; did you mean 'depths'", "pola_pvt_tiny", {"depht": 3}),
        (TypeError, "does not take windows", "pola_pvt_v2_b0", {"windows": 7}),
        (ValueError, "unknown mechanism 'sotfmax'", "pola_pvt_tiny", {"attention": "sotfmax"}),
        (ValueError, "names 3 mechanism\\(s\\) for 4 stage\\(s\\)", "pola_pvt_tiny", {"attention": "pola,pola,softmax"}),
        (ValueError, "unknown mechanism 'LLS'", "pola_swin_tiny", {"attention": "LLS"}),
        (ValueError, "unknown mechanism 'LLMS3'", "pola_swin_tiny", {"attention": "LLMS3"}),
        (ValueError, "depths is .2, 2., 2 value\\(s\\) for 4 stage\\(s\\)", "pola_pvt_tiny", {"depths": (2, 2)}),
        (ValueError, "num_heads is 0; give positive integers", "pola_pvt_tiny", {"num_heads": 0}),
        (ValueError, "dim 64 is not divisible by 3 heads", "pola_pvt_tiny", {"num_heads": 3}),
        (ValueError, "img_size is 'large'", "pola_pvt_tiny", {"img_size": "large"}),
        (ValueError, "img_size is -1", "pola_pvt_tiny", {"img_size": -1}),
        (ValueError, "global_pool is 'max'", "pola_swin_tiny", {"global_pool": "max"}),
        (
            TypeError,
            "attention_options has gates=1, which no stage supports; pola here takes alpha",
            "pola_deit_tiny",
            {"attention_options": {"gates": 1}},
        ),
        (ValueError, "drop_path_rate is 1.5", "pola_swin_tiny", {"drop_path_rate": 1.5}),
        (ValueError, "num_classes is -1", "pola_swin_tiny", {"num_classes": -1}),
        (ValueError, "in_chans is 0", "pola_swin_tiny", {"in_chans": 0}),
        (ValueError, "patch_size is 0", "pola_swin_tiny", {"patch_size": 0}),
        (ValueError, "dims is 64; give the channels of each stage", "pola_pvt_tiny", {"dims": 64}),
        (ValueError, "dims is .*positive integers", "pola_swin_tiny", {"dims": (8.0, 8, 8, 8)}),
        (ValueError, "dims is 192.0; give positive integers", "pola_deit_tiny", {"dims": 192.0}),
        (ValueError, "depths is 1.5; give positive integers", "pola_pvt_tiny", {"depths": 1.5}),
        (ValueError, "alpha is '4'", "softmax_pvt_tiny", {"alpha": "4"}),
        (ValueError, "kernel_size is 4", "softmax_pvt_tiny", {"kernel_size": 4}),
        (ValueError, "attention is 5; give one of", "pola_pvt_tiny", {"attention": 5}),
        (ValueError, "proj_drop_rate is 'x'", "pola_pvt_tiny", {"proj_drop_rate": "x"}),
        (TypeError, "attention_options is \\['gate'\\]", "softmax_pvt_tiny", {"attention_options": ["gate"]}),
        (TypeError, "attention_options has gat=1, which", "softmax_pvt_tiny", {"attention_options": {"gat": 1}}),
        (TypeError, "out_indices chooses features; give features_only=True", "pola_pvt_tiny", {"out_indices": [0]}),
        (TypeError, "features_only is 'no'", "pola_pvt_tiny", {"features_only": "no"}),
        (ValueError, "mlp_ratio is 0.001, too small for a hidden channel at dim 64", "pola_pvt_tiny", {"mlp_ratios": 0.001}),
        (ValueError, "checkpoint /nowhere.pth does not exist", "pola_swin_base", {"checkpoint": "/nowhere.pth"}),
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


def test_mechanism_of_stages_says_what_is_allowed():
    with pytest.raises(
        ValueError, match=r"give one of angular, .* softmax, synthesizer for all stages, 4 of them separated by commas"
    ):
        stage_mechanisms("none", 4)
    assert stage_mechanisms("L", 1) == ("pola",)


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


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_shows_its_arguments(name):
    family = type(small(name))
    shown = inspect.signature(family).parameters
    assert set(shown) == {field.name for field in fields(family.config_type)}
    assert shown["attention"].default == family.config_type.attention


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("pola_deit_tiny", {"alpha": -1}, r"^backbone: alpha is -1; give a number > 0 \(4 in the authors' models\)$"),
        (
            "pola_pvt_tiny",
            {"img_size": 0},
            r"^backbone: img_size is 0; give a number of pixels \(an integer ≥ 1\)",
        ),
        ("pola_pvt_v2_b0", {"patch_size": 0}, r"^backbone: patch_size is 0; give an integer ≥ 1$"),
        (
            "pola_swin_tiny",
            {"depths": (1,)},
            r"^backbone: depths is \(1,\), 1 value\(s\) for 4 stage\(s\); give one per stage",
        ),
    ],
)
def test_messages_about_arguments_begin_in_the_same_way(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        polaformer.create_model(name, **wrong)
