"""Every mechanism in every backbone."""

import pytest
import torch
from torch import nn

import polaformer
from models import images, small
from polaformer import attention
from polaformer.attention import AttentionLayer, WindowAttention, registry
from polaformer.attention.layer.gate import MatrixGate
from polaformer.attention.mechanisms.softmax import SoftmaxCore
from polaformer.backbones.token_layout import TokenLayout

FAMILIES = {
    "pola_deit_tiny": "{0}",
    "pola_pvt_tiny": "{0}",
    "pola_pvt_v2_b0": "{0}",
    "pola_swin_tiny": "{0},{0},softmax,softmax",
}
# DeiT's head reads the class token, which the convolutions of the last block pass by. At this size Swin's last stage has one
# token and each of PVT's stages one reduced key, so that their tables of scores have no effect.
WITHOUT_EFFECT = ("blocks.1.mlp.dwconv.", "blocks.1.attn.conv.", "stages.3.blocks.0.attn.relative_positions.")
# What depends on the place of a token in the sequence, or draws by it, sees a padded image as another sequence.
BY_PLACE = {name for name in attention.names() if attention.facts(name).stochastic}
BY_PLACE |= {"angular", "bigbird", "cosformer", "linformer", "local", "longformer", "nystrom", "synthesizer"}


@pytest.mark.parametrize("name", attention.names())
def test_a_mechanism_works_in_every_backbone_and_every_parameter_learns(name):
    for family, stages in FAMILIES.items():
        model = small(family, attention=stages.format(name), img_size=32)
        x = images(2, 32, 32).requires_grad_()
        logits = model(x)
        logits.square().sum().backward()
        assert logits.shape == (2, 5)
        assert logits.isfinite().all()
        assert x.grad.isfinite().all()
        learning = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
        assert [key for key, grad in learning.items() if grad is None or not grad.isfinite().all()] == [], family
        idle = [key for key, grad in learning.items() if not grad.any() and not key.startswith(WITHOUT_EFFECT)]
        assert [key for key in idle if not (key.endswith("core.synthetic") and learning[key].shape[-1] == 1)] == [], family


@pytest.mark.parametrize("name", [name for name in attention.names() if name not in BY_PLACE])
def test_padding_law_holds_for_what_looks_at_no_order(name):
    """An image alone and at the top left of a larger, masked one gives the same features."""
    model = small("pola_pvt_tiny", attention=name, img_size=32).double()
    x = images(1, 32, 32, dtype=torch.float64)
    canvas, mask = images(1, 64, 96, dtype=torch.float64), torch.zeros(1, 64, 96, dtype=torch.bool)
    canvas[..., :32, :32], mask[..., :32, :32] = x, True
    alone = model.forward_intermediates(x, intermediates_only=True)
    padded = model.forward_intermediates(canvas, intermediates_only=True, mask=mask)
    for one, other in zip(alone, padded, strict=True):
        torch.testing.assert_close(other[..., : one.shape[2], : one.shape[3]], one, rtol=1e-8, atol=1e-8)


def test_stages_may_have_different_mechanisms():
    model = small("pola_swin_tiny", attention="focused,hydra,softmax,nystrom")
    names = [type(stage.blocks[0].attn.core).__name__ for stage in model.stages]
    assert names == ["FocusedCore", "HydraCore", "SoftmaxCore", "NystromCore"]
    assert [isinstance(stage.blocks[0].attn, WindowAttention) for stage in model.stages] == [False, False, True, False]
    again = polaformer.create_model("pola_swin_tiny", attention="focused,focused,softmax,softmax")
    assert again.stages[0].blocks[0].attn.key_positions.size == (56, 56)
    assert again.stages[0].blocks[0].attn.gate is None


def test_enhanced_attention_brings_a_convolution_into_the_mlp_and_the_class_token_passes_by():
    """The reading that gives Table 1's 5.8 M parameters."""
    block = small("pola_deit_tiny", attention="enhanced").blocks[0]
    assert isinstance(block.mlp.dwconv, nn.Conv2d)
    hidden = torch.randn(1, 5, 16)
    out = block.feed_forward(hidden, TokenLayout((2, 2)))
    nn.init.zeros_(block.mlp.dwconv.weight)
    nn.init.zeros_(block.mlp.dwconv.bias)
    without = block.feed_forward(hidden, TokenLayout((2, 2)))
    assert torch.equal(out[:, 0], without[:, 0])
    assert not torch.isclose(out[:, 1:], without[:, 1:]).any()
    mixed = small("pola_swin_tiny", attention="enhanced,pola,softmax,softmax")
    assert [hasattr(stage.blocks[0].mlp, "dwconv") for stage in mixed.stages] == [True, False, False, False]


def test_options_reach_the_mechanisms_that_know_them():
    options = {"num_landmarks": 5, "gate": "linear", "polarity": "same"}
    model = small("pola_swin_tiny", attention="nystrom,pola,hydra,softmax", attention_options=options)
    nystrom, pola, hydra, softmax = (stage.blocks[0].attn for stage in model.stages)
    assert (nystrom.core.num_landmarks, pola.core.polarity) == (5, "same")
    assert [layer.gate is not None for layer in (nystrom, pola, hydra, softmax)] == [True, True, True, True]
    assert isinstance(softmax, WindowAttention)


@pytest.mark.parametrize(
    ("name", "mechanism", "options", "refused"),
    [
        ("pola_deit_tiny", "hydra", {"num_landmarks": 5}, "num_landmarks=5"),
        ("pola_deit_tiny", "hydra", {"gate": "linear", "polarity": "same", "alpha": 2.0}, "polarity='same', alpha=2.0"),
        ("softmax_pvt_tiny", "softmax", {"backend": "torch"}, "backend='torch'"),
        ("softmax_swin_tiny", "softmax", {"conv": "depthwise", "gate": "linear"}, "conv='depthwise'"),
        ("softmax_swin_tiny", "softmax", {"gate": "matrix"}, "gate='matrix'"),
        ("pola_deit_tiny", "hydra", {"kernel_size": 3}, "kernel_size=3"),
        ("softmax_pvt_tiny", "softmax", {"gate_init": "zeros"}, "gate_init='zeros'"),
        ("pola_deit_tiny", "pola", {"gate": None, "gate_init": "zeros"}, "gate_init='zeros'"),
        ("pola_deit_tiny", "pola", {"gate": None, "gate_bias_init": "zeros"}, "gate_bias_init='zeros'"),
    ],
)
def test_an_option_that_no_stage_can_honour_is_refused(name, mechanism, options, refused):
    with pytest.raises(TypeError, match=f"attention_options has {refused}, which no stage supports; {mechanism} here takes"):
        small(name, attention=mechanism, attention_options=options)


@pytest.mark.parametrize("name", attention.names())
def test_gate_and_convolution_reach_the_layer_of_every_mechanism(name):
    """Both change the result, so that twins can differ in their attention alone."""
    options = {"gate": "linear", "conv": "depthwise"}
    model = small("pola_deit_tiny", attention=name, attention_options=options, kernel_size=3)
    layer = model.blocks[0].attn
    assert layer.conv.weight.shape[-2:] == (3, 3)
    model(images()).square().sum().backward()
    assert layer.gate.weight.grad.abs().sum() > 0
    assert layer.conv.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["pola_deit_tiny", "pola_swin_tiny", "softmax_pvt_tiny", "softmax_swin_tiny"])
def test_the_ablation_of_gate_and_convolution_suits_every_model(name):
    options = {"gate": None, "conv": None, "key_positions": None}
    layers = [layer for layer in small(name, attention_options=options).modules() if isinstance(layer, AttentionLayer)]
    assert {(layer.gate, layer.conv, layer.key_positions) for layer in layers} == {(None, None, None)}


def test_windows_take_what_they_can_and_the_rest_passes_them_by():
    options = {"gate": "matrix", "conv": "deformable", "scale": 5.0, "dropout": 0.25}
    model = small("pola_swin_tiny", attention_options=options)
    pola, window = model.stages[0].blocks[0].attn, model.stages[3].blocks[0].attn
    assert isinstance(pola.gate, MatrixGate)
    assert (window.gate, window.conv, window.core.scale, window.core.dropout) == (None, None, 5.0, 0.25)


def test_a_gate_in_windows_is_the_gate_of_each_token_wherever_its_window_lies():
    """Without a projection after it, a layer with the gate returns W x + b times the output without it, token by token."""
    layer = WindowAttention(8, 2, 2, shift=1, gate="linear", gate_init="normal")
    nn.init.eye_(layer.proj.weight)
    x, grid = torch.randn(2, 15, 8), (3, 5)
    gated, factors = layer(x, grid), torch.nn.functional.linear(x, layer.gate.weight, layer.gate.bias)
    layer.gate = None
    torch.testing.assert_close(gated, factors * layer(x, grid))


def test_the_gates_of_windows_start_as_told():
    gate = WindowAttention(8, 2, 2, gate="linear", gate_init="zeros").gate
    assert not gate.weight.any()


def test_what_has_parameters_for_each_token_is_made_for_the_native_size():
    model = small("pola_deit_tiny", attention="synthesizer", img_size=32)
    assert model.blocks[0].attn.core.max_length == 17
    assert model(images(1, 24, 24)).shape == (1, 5)
    with pytest.raises(ValueError, match="got 26 queries, but it was created for at most 17"):
        model(images(1, 40, 40))


def test_a_larger_native_size_is_refused_by_what_has_parameters_for_each_token():
    model = small("pola_deit_tiny", attention="linformer", img_size=32)
    with pytest.raises(ValueError, match=r"the grid \(6, 6\) has 37 tokens, but the attention was created for at most 17"):
        model.set_input_size((48, 48))
    small("pola_deit_tiny", attention="hydra", img_size=32).set_input_size((48, 48))
    model = small("pola_deit_tiny", attention="cosformer", img_size=32, attention_options={"max_length": 17})
    with pytest.raises(
        ValueError, match=r"the grid \(6, 6\) has 37 tokens, but the attention was created for at most 17; create"
    ):
        model.set_input_size((48, 48))


@pytest.mark.parametrize("family", ["pola_pvt_tiny", "pola_pvt_v2_b0"])
@pytest.mark.parametrize("name", ["linformer", "synthesizer"])
def test_every_entry_of_a_table_for_each_token_learns_at_the_native_size(name, family):
    model = small(family, attention=name)
    model(images()).square().sum().backward()
    tables = {key: p.grad for key, p in model.named_parameters() if key.endswith(("core.synthetic", "core.projection"))}
    assert len(tables) == 5
    assert [key for key, grad in tables.items() if (grad == 0).any()] == []


def test_synthesizers_own_map_has_a_column_for_each_reduced_key():
    """And for each prefix token, which is not reduced. Columns for all tokens: 22 M parameters of PVT-T that never learn."""
    model = small("pola_pvt_tiny", attention="synthesizer", img_size=72)
    shapes = [tuple(stage.blocks[0].attn.core.synthetic.shape[1:]) for stage in model.stages]
    assert shapes == [(18 * 18, 3 * 3), (9 * 9, 3 * 3), (5 * 5, 3 * 3), (3 * 3, 3 * 3)]
    model = small("pola_deit_tiny", attention="synthesizer", img_size=32, reductions=2)
    core = model.blocks[0].attn.core
    assert (core.max_length, core.max_keys) == (17, 5)
    with pytest.raises(ValueError, match="got 9 keys, but it was created for at most 5; create it with max_keys=9 or more"):
        model(images(1, 8, 128))
    with pytest.raises(ValueError, match=r"the grid \(1, 16\) has 9 keys, but the attention was created for at most 5"):
        model.set_input_size((8, 128))
    chosen = attention.create_layer("synthesizer", 8, 2, tokens=(4, 4), reduction=2, max_length=30).core
    assert (chosen.max_length, chosen.max_keys) == (30, 30)


def test_layers_that_draw_a_pattern_once_draw_different_ones():
    seeds = [block.attn.core.seed for block in small("pola_deit_tiny", attention="bigbird").blocks]
    assert seeds == [0, 1]
    chosen = small("pola_deit_tiny", attention="bigbird", attention_options={"seed": 7})
    assert [block.attn.core.seed for block in chosen.blocks] == [7, 7]


def test_quadratic_mechanisms_get_the_reduced_keys_of_pvt():
    model = small("pola_pvt_tiny", attention="kernelized,hydra,softmax,linear")
    ratios = [stage.blocks[0].attn.key_reduction and stage.blocks[0].attn.key_reduction.ratio for stage in model.stages]
    assert ratios == [8, None, 2, None]


def test_softmax_takes_options_of_its_core():
    model = small("softmax_deit_tiny", attention_options={"scale": 5.0})
    assert model.blocks[0].attn.core.scale == 5.0
    assert model.blocks[0].attn.gate is None


def test_reduced_keys_are_refused_by_what_relates_the_tokens_of_one_sequence():
    with pytest.raises(ValueError, match="reduction is 2, but queries and keys of 'angular' must be the same tokens"):
        small("pola_pvt_tiny", attention="angular", reductions=(2, 1, 1, 1))
    assert small("pola_pvt_tiny", attention="efficient", reductions=(2, 1, 1, 1))(images()).shape == (2, 5)


class TwoMapCore(SoftmaxCore):
    """Another mechanism that attends in windows, with two maps."""

    def weights(self, q, k, **options):
        maps = super().weights(q, k, **options)
        return {"first": maps["softmax"], "second": maps["softmax"].square()}


def test_swin_attends_in_windows_with_any_mechanism_whose_facts_say_so(monkeypatch):
    monkeypatch.setitem(registry._CORES, "two_maps", TwoMapCore)
    torch.manual_seed(0)
    options = {"attention": "linear,softmax,two_maps,softmax", "attention_options": {"scale": 0.3}}
    model = small("pola_swin_tiny", **options).double().eval()
    layers = [stage.blocks[-1].attn for stage in model.stages]
    assert [type(layer) for layer in layers] == [AttentionLayer, WindowAttention, WindowAttention, WindowAttention]
    assert [type(layer.core) for layer in layers[1:]] == [SoftmaxCore, TwoMapCore, SoftmaxCore]
    assert [layer.core.scale for layer in layers[1:]] == [0.3, 0.3, 0.3]
    layer, sizes = layers[2], [(9, 9), (2, 9), (9, 9)]
    assert layer.shift > 0
    x = torch.randn(3, 81, layer.dim, dtype=torch.float64)
    maps = layer.maps(x, (9, 9), sizes=sizes)
    assert list(maps) == ["first", "second"]
    assert torch.equal(maps["second"], maps["first"].square())
    for i, size in enumerate(sizes):
        alone = layer.maps(x[i : i + 1], (9, 9), sizes=[size])["first"]
        assert torch.allclose(maps["first"].unflatten(0, (3, -1))[i], alone, rtol=1e-9, atol=1e-12)
