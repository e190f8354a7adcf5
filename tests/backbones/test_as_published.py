"""Settings of every variant, drop path, weight decay, and initial values."""

import PIL.Image
import pytest
import timm
import torch
from timm.layers import DropPath
from timm.optim import create_optimizer_v2

import polaformer
from models import SMALL, images, small
from polaformer.attention import AttentionLayer, PolaAttention, WindowAttention
from polaformer.backbones.block import Block
from polaformer.backbones.token_layout import TokenLayout

FAMILIES = ["pola_deit_tiny", "pola_pvt_tiny", "pola_pvt_v2_b0", "pola_swin_tiny"]


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
def test_a_dropped_branch_leaves_its_sample_as_it_was(name):
    """Each of the two branches of a block is dropped for a sample, or scaled up to compensate."""
    block = next(module for module in small(name).modules() if isinstance(module, Block))
    block.drop_path = DropPath(0.5)
    grid = (8, 8)
    x = torch.randn(64, 64 + block.attn.num_prefix_tokens, block.attn.dim)
    whole = block.eval()(x, TokenLayout(grid)) - x
    attended = block.attn(block.norm1(x), grid)
    kept_both = torch.stack([block.train()(x, TokenLayout(grid)) - x for _ in range(3)]).detach()
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
