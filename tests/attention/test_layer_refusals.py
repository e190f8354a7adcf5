"""What the layer refuses, at construction and when called."""

import re

import pytest
import torch

from layers import GRID, tokens
from polaformer import PolaAttention
from polaformer.attention import AttentionLayer, create


def test_a_core_made_for_other_heads_is_refused():
    with pytest.raises(ValueError, match=r"the core has 2 heads of width 32, but dim 64 and 4 heads give width 16"):
        AttentionLayer(64, 4, create("softmax", num_heads=2, head_dim=32))
    with pytest.raises(TypeError, match=r"core is a str; create one by polaformer.attention.create"):
        AttentionLayer(64, 4, "softmax")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 13}, "dim 13 is not divisible by 2 heads; give a multiple of 2"),
        ({"num_heads": 0}, "num_heads is 0; give an integer ≥ 1"),
        ({"num_heads": 12}, "head width is 1, but each polarity needs a channel of v; use fewer heads"),
        ({"conv": "dense"}, "conv is 'dense'; choose one of depthwise, channelwise, deformable, sequence, None"),
        ({"kernel_size": 4}, "kernel_size is 4; give an odd number"),
        ({"kernel_size": (1, 2, 3)}, "kernel_size is (1, 2, 3)"),
        ({"gate": "sigmoid"}, "gate is 'sigmoid'; choose one of linear, matrix, None"),
        ({"gate_init": "xavier"}, "gate_init is 'xavier'; choose one of default, kaiming_uniform"),
        ({"gate_bias_init": "normal"}, "gate_bias_init is 'normal'; choose one of default, zeros, ones, linear"),
        ({"gate": None, "gate_bias_init": "ones"}, "gate_bias_init is 'ones', but it needs gate 'linear' and qkv_bias"),
        ({"qkv_bias": False, "gate_bias_init": "ones"}, "gate_bias_init is 'ones', but it needs gate 'linear' and qkv_bias"),
        ({"gate": "matrix"}, "gate 'matrix' has one row per token; give their number as key_positions"),
        ({"polarity": "none"}, "polarity is 'none'; choose one of both, same, positive, subtract"),
        ({"reduction": 0}, "reduction is 0; give an integer ≥ 1"),
        ({"key_positions": (0, 4)}, "key_positions' height or width is 0; give an integer ≥ 1"),
        ({"key_positions": 16, "reduction": 2}, "reduction and deformable convolution need a grid"),
        ({"key_positions": 16, "conv": "deformable"}, "reduction and deformable convolution need a grid"),
        ({"proj_drop": 1.5}, "proj_drop is 1.5"),
        ({"num_prefix_tokens": -1}, "num_prefix_tokens is -1"),
        ({"num_prefix_tokens": 1.0}, "num_prefix_tokens is 1.0; give an integer"),
        ({"num_heads": 2.0}, "num_heads is 2.0; give an integer"),
        ({"num_heads": True}, "num_heads is True; give an integer"),
        ({"dim": "12"}, "dim is '12'; give an integer"),
        ({"kernel_size": 5.0}, "kernel_size is 5.0; give an odd number"),
        ({"kernel_size": None}, "kernel_size is None; give an odd number"),
        ({"key_positions": (16,)}, "key_positions is (16,); give (height, width)"),
        ({"key_positions": 16.0}, "key_positions is 16.0; give an integer"),
        ({"key_positions": (4.0, 5)}, "height or width is 4.0; give an integer"),
        ({"alpha": float("inf")}, "alpha is inf"),
        ({"alpha": -1.0}, "alpha is -1.0"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"backend": "fast"}, "backend is 'fast'"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PolaAttention(**({"dim": 12, "num_heads": 2} | options))


@pytest.mark.parametrize(
    ("settings", "call", "error", "message"),
    [
        ({}, {"x": tokens()[0]}, ValueError, "x has shape (20, 12); give (batch, tokens, 12)"),
        ({}, {"x": tokens(dim=8)}, ValueError, "x has shape (2, 20, 8); give (batch, tokens, 12)"),
        ({}, {"x": [[1.0]]}, TypeError, "x is a list; give a torch.Tensor"),
        ({}, {"x": tokens().long()}, TypeError, "x has dtype torch.int64; give a floating-point tensor"),
        ({}, {"x": tokens().float()}, TypeError, "x has dtype torch.float32 but the layer torch.float64"),
        ({}, {"x": tokens().to("meta")}, ValueError, "x is on meta but the layer on cpu"),
        ({}, {"grid": (4, 5, 7)}, ValueError, "grid is (4, 5, 7); give (height, width) of the tokens"),
        ({}, {"grid": (-4, -5)}, ValueError, "grid is (-4, -5); give (height, width)"),
        ({}, {"grid": (4.0, 5.0)}, ValueError, "two positive integers"),
        ({}, {"grid": 20}, ValueError, "grid is 20; give (height, width)"),
        ({}, {"mask": [[True]]}, TypeError, "mask is a list; give a boolean torch.Tensor"),
        ({}, {"context": tokens(9).float()}, TypeError, "context has dtype torch.float32 but the layer torch.float64"),
        ({"key_positions": 20, "num_prefix_tokens": 3}, {"context": tokens(2)}, ValueError, "must hold the 3 prefix tokens"),
        ({}, {"grid": (4, 4)}, ValueError, "x has 20 tokens but grid (4, 4) with 0 prefix tokens has 16"),
        ({"num_prefix_tokens": 1}, {"grid": GRID}, ValueError, "grid (4, 5) with 1 prefix tokens has 21"),
        ({"num_prefix_tokens": 21}, {}, ValueError, "must hold the 21 prefix tokens; x has 20 tokens"),
        (
            {"key_positions": GRID},
            {},
            ValueError,
            "has a table of key positions for a grid, which is undefined on a sequence",
        ),
        (
            {"key_positions": 20},
            {"grid": GRID},
            ValueError,
            "key_positions was given as a number of tokens",
        ),
        ({"reduction": 2}, {}, ValueError, "has a key reduction, which is undefined on a sequence; give grid"),
        ({"conv": "deformable"}, {}, ValueError, "has a deformable convolution, which is undefined on a sequence"),
        (
            {},
            {"mask": torch.ones(2, 19, dtype=torch.bool)},
            ValueError,
            "mask has shape (2, 19) but keys come from (2, 20)",
        ),
        ({}, {"mask": torch.ones(2, 20)}, TypeError, "mask has dtype torch.float32; give a boolean mask"),
        ({}, {"context": tokens(9, 8)}, ValueError, "context has shape (2, 9, 8); give (batch, tokens, 12)"),
        ({}, {"context": tokens(9, batch=3)}, ValueError, "context has 3 samples but x has 2"),
        ({"reduction": 2}, {"grid": GRID, "context": tokens(9)}, ValueError, "a context of 9 tokens has no grid to reduce"),
        ({"key_positions": GRID}, {"grid": GRID, "context": tokens(9)}, ValueError, "the table of key positions has 20 rows"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_calls_that_do_not_fit_are_refused(settings, call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        PolaAttention(12, 2, **settings).double()(**({"x": tokens()} | call))
