"""The layer: what it computes, on grids and sequences, with masks and contexts, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from layers import GRID, pola, randomise, tokens
from polaformer import PolaAttention
from polaformer.attention import AttentionLayer, create, create_layer
from polaformer.attention.layer.token_table import resize_rows


def by_hand(layer, x, grid):
    """Steps 1 to 10 of the authors' layer at reduction 1, reimplemented with explicit N×N maps."""
    batch, num, dim = x.shape
    heads = layer.num_heads
    q, k, v = F.linear(x, layer.qkv.weight, layer.qkv.bias).split(dim, dim=-1)
    k = k + layer.key_positions.rows
    scale = F.softplus(layer.core.scale).reshape(-1)
    q, k, v = ((t.reshape(batch, num, heads, -1).transpose(1, 2)) for t in (q / scale, k / scale, v))
    power = (1 + layer.core.alpha * torch.sigmoid(layer.core.power))[:, None]
    plus, minus = (lambda t: t.relu() ** power), (lambda t: (-t).relu() ** power)
    same = plus(q) @ plus(k).mT + minus(q) @ minus(k).mT
    opposite = plus(q) @ minus(k).mT + minus(q) @ plus(k).mT
    half = (v.shape[-1] + 1) // 2
    out = torch.cat([w / w.sum(-1, keepdim=True) @ part for w, part in ((same, v[..., :half]), (opposite, v[..., half:]))], -1)
    image = v.mT.reshape(batch * heads, -1, *grid)
    out = out + layer.conv(image).reshape(batch, heads, -1, num).mT
    out = out.transpose(1, 2).reshape(batch, num, dim)
    return layer.proj(out * F.linear(x, layer.gate.weight, layer.gate.bias))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_the_layer_is_its_formula(heads):
    layer, x = pola(num_heads=heads, key_positions=GRID), tokens()
    torch.testing.assert_close(layer(x, grid=GRID), by_hand(layer, x, GRID))


def test_every_parameter_gets_a_gradient():
    layer = pola(key_positions=GRID, reduction=2)
    layer(tokens(), grid=GRID).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_gradients_of_the_whole_layer_in_float64():
    layer = pola(dim=4, key_positions=(2, 3))
    x = tokens(6, 4, batch=1).requires_grad_()
    names = [n for n, _ in layer.named_parameters()]

    def function(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,), {"grid": (2, 3)})

    assert torch.autograd.gradcheck(function, (x, *layer.parameters()), atol=1e-7, rtol=1e-5)


def test_eq10_the_layer_costs_what_the_formula_says():
    """5NC² + 4NCd + k²NC multiplications, and 4NC for the two denominators; the gate's NC are not matmuls."""
    num, dim, heads, kernel = 20, 12, 2, 5
    layer = PolaAttention(dim, heads, kernel_size=kernel)
    with FlopCounterMode(display=False) as counter:
        layer(tokens(num, dim, batch=1).float(), grid=GRID)
    macs = 5 * num * dim**2 + 4 * num * dim * (dim // heads) + kernel**2 * num * dim + 4 * num * dim
    assert counter.get_total_flops() == 2 * macs


def test_as_published_at_initialisation():
    layer = PolaAttention(64, 2, key_positions=GRID, reduction=2)
    assert (layer.core.exponent() == 3).all()
    assert (layer.key_positions.rows == 0).all()
    for linear in (layer.qkv, layer.proj, layer.gate):
        assert 0.015 < linear.weight.std() < 0.025
        assert (linear.bias == 0).all()
    names = {n for n, _ in layer.named_parameters()}
    assert names == {
        "qkv.weight", "qkv.bias", "proj.weight", "proj.bias", "gate.weight", "gate.bias", "conv.weight", "conv.bias",
        "core.power", "core.scale", "key_positions.rows",
        "key_reduction.conv.weight", "key_reduction.conv.bias", "key_reduction.norm.weight", "key_reduction.norm.bias",
    }  # fmt: skip


def test_on_a_sequence_the_convolution_is_one_dimensional():
    layer, x = pola(), tokens()
    _, _, v = layer.qkv(x).chunk(3, dim=-1)
    without = layer.proj(0 * v)
    layer.core.forward = lambda q, k, v, **_: torch.zeros_like(v)
    images = v.reshape(2, 20, 2, 6).permute(0, 2, 3, 1).flatten(0, 1)  # (B·heads, D, N)
    wanted = F.conv1d(images, layer.conv.weight[:, :, 2], layer.conv.bias, padding=2, groups=6)
    wanted = wanted.reshape(2, 2, 6, 20).permute(0, 3, 1, 2).flatten(2) * layer.gate(x, GRID)
    torch.testing.assert_close(layer(x) - without, layer.proj(wanted) - without)


def test_a_flat_kernel_has_the_parameters_of_a_convolution_over_sequences():
    layer = pola(dim=64, kernel_size=(1, 5))
    assert sum(p.numel() for p in layer.conv.parameters()) == 32 * 5 + 32
    assert layer(tokens(dim=64)).shape == (2, 20, 64)


def test_without_convolution_tokens_can_be_permuted():
    order = torch.randperm(20)
    layer, x = pola(conv=None), tokens()
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order])
    with_convolution = pola()
    assert not torch.allclose(with_convolution(x[:, order], grid=GRID), with_convolution(x, grid=GRID)[:, order])


def test_the_deformable_branch_starts_as_a_plain_convolution_and_then_deforms():
    layer, x = pola(conv="deformable"), tokens()
    deform = layer.conv.deform
    image = torch.randn(3, 6, *GRID, dtype=torch.float64)
    moved = layer.conv(image)
    nn.init.zeros_(layer.conv.offsets.weight)
    nn.init.zeros_(layer.conv.offsets.bias)
    plain = F.conv2d(image, deform.weight, deform.bias, padding=2, groups=6)
    torch.testing.assert_close(layer.conv(image), plain)
    assert not torch.allclose(moved, plain)
    assert layer(x, grid=GRID).isfinite().all()
    assert (PolaAttention(12, 2, conv="deformable").conv.offsets.weight == 0).all()


@pytest.mark.parametrize("gate", ["linear", "matrix"])
@pytest.mark.parametrize("init", ["default", "kaiming_uniform", "zeros", "normal", "uniform", "ones"])
def test_a_models_own_initialisation_does_not_overwrite_the_gate(gate, init):
    layer = PolaAttention(64, 2, gate=gate, gate_init=init, key_positions=(8, 8))
    weight = layer.gate.weight if gate == "linear" else layer.gate.rows
    before = weight.detach().clone()

    def own_initialisation(module):
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.constant_(module.weight, 7.0)

    nn.Sequential(layer).apply(own_initialisation)
    assert (layer.qkv.weight == 7).all()
    assert torch.equal(weight, before)
    spread = {"zeros": 0.0, "ones": 0.0, "normal": 1.0, "uniform": 12**-0.5, "kaiming_uniform": 64**-0.5 / 3**0.5}
    spread["default"] = 0.02 if gate == "linear" else spread["kaiming_uniform"]
    assert before.std().item() == pytest.approx(spread[init], rel=0.1, abs=1e-6)
    assert before.mean().item() == pytest.approx({"ones": 1.0, "uniform": 0.5}.get(init, 0.0), abs=0.05)
    if gate == "linear":
        assert layer.gate.bias.abs().max() <= (0.0 if init == "default" else 64**-0.5)


@pytest.mark.parametrize("gate_init", ["default", "kaiming_uniform", "ones"])
@pytest.mark.parametrize("init", ["default", "zeros", "ones", "linear"])
def test_the_bias_of_a_linear_gate_starts_as_asked(init, gate_init):
    options = {"gate": "linear", "gate_init": gate_init, "gate_bias_init": init}
    for layer in (PolaAttention(64, 2, **options), create_layer("softmax", 64, 2, **options)):
        bias = layer.gate.bias.detach()
        if init == "linear" or (init == "default" and gate_init != "default"):
            assert bias.std().item() == pytest.approx(64**-0.5 / 3**0.5, rel=0.3)
            assert bias.abs().max() <= 64**-0.5
        else:
            assert (bias == (1.0 if init == "ones" else 0.0)).all()


def test_the_matrix_gate_is_a_free_factor_for_each_token_and_channel():
    layer, x = pola(gate="matrix", key_positions=GRID), tokens()
    gated = layer(x, grid=GRID)
    factors = layer.gate.rows.detach().clone()
    nn.init.ones_(layer.gate.rows)
    layer.proj, projection = nn.Identity(), layer.proj
    torch.testing.assert_close(projection(layer(x, grid=GRID) * factors), gated)
    assert layer(tokens(6), grid=(2, 3)).shape == (2, 6, 12)


def test_without_a_gate_nothing_is_multiplied():
    layer, x = pola(gate=None), tokens()
    gated = pola(gate="linear")
    gated.load_state_dict(layer.state_dict() | {"gate.weight": torch.zeros(12, 12), "gate.bias": torch.ones(12)})
    torch.testing.assert_close(layer(x, grid=GRID), gated(x, grid=GRID))


def test_the_key_table_is_added_to_keys_alone():
    layer, x = pola(key_positions=GRID), tokens()
    plain = pola(key_positions=None)
    state = layer.state_dict()
    rows = state.pop("key_positions.rows")
    plain.load_state_dict(state)
    assert not torch.allclose(layer(x, grid=GRID), plain(x, grid=GRID))
    nn.init.zeros_(layer.key_positions.rows)
    torch.testing.assert_close(layer(x, grid=GRID), plain(x, grid=GRID))
    assert rows.shape == (20, 12)


def test_the_key_table_is_resized_bicubically_to_other_grids():
    layer = pola(key_positions=GRID)
    other = pola(key_positions=(6, 3))
    image = layer.key_positions.rows.detach().T.reshape(1, 12, *GRID)
    resized = F.interpolate(image.float(), size=(6, 3), mode="bicubic", align_corners=False).double()
    other.load_state_dict(layer.state_dict() | {"key_positions.rows": resized[0].flatten(1).T})
    x = tokens(18)
    torch.testing.assert_close(layer(x, grid=(6, 3)), other(x, grid=(6, 3)), rtol=1e-6, atol=1e-6)


def test_resizing_is_as_exact_as_the_table():
    layer = pola(dim=4, conv=None, gate=None, key_positions=[2, 3])
    rows, x = layer.key_positions.rows, tokens(12, 4, batch=1)
    assert layer.key_positions((2, 3)) is rows
    run = lambda rows: torch.func.functional_call(layer, {"key_positions.rows": rows}, (x,), {"grid": (3, 4)})  # noqa: E731
    assert torch.autograd.gradcheck(run, (rows.detach().requires_grad_(),), atol=1e-7, rtol=1e-5)


def test_resizing_to_the_same_size_changes_nothing():
    rows = torch.randn(20, 3)
    torch.testing.assert_close(resize_rows(rows, GRID, GRID), rows)


def test_a_table_for_sequences_follows_the_length():
    layer = pola(key_positions=20)
    assert layer.key_positions.rows.shape == (20, 12)
    assert layer(tokens(20)).shape == (2, 20, 12)
    assert layer(tokens(31)).shape == (2, 31, 12)


def test_reduction_attends_to_one_key_for_each_square():
    layer, x = pola(key_positions=(4, 6), reduction=2), tokens(24)
    maps = layer.maps(x, grid=(4, 6))
    assert maps["same"].shape == (2, 2, 24, 6)
    assert layer.key_positions.rows.shape == (6, 12)


def test_a_grid_that_the_reduction_does_not_divide_is_padded_not_cropped():
    layer, x = pola(reduction=2, conv=None), tokens(15)
    out = layer(x, grid=(3, 5))
    changed = x.clone()
    changed[:, -1] += 1.0  # the last corner, which cropping would drop from the keys
    others = slice(0, 14)
    assert not torch.allclose(layer(changed, grid=(3, 5))[:, others], out[:, others])
    image = F.pad(x.mT.unflatten(-1, (3, 5)), (0, 1, 0, 1))
    padded = image.flatten(2).mT
    torch.testing.assert_close(layer(padded, grid=(4, 6)).unflatten(1, (4, 6))[:, :3, :5].flatten(1, 2), out)


def test_a_reduced_key_exists_if_any_of_its_pixels_does():
    layer, x = pola(reduction=2), tokens(24)
    mask = torch.zeros(2, 4, 6, dtype=torch.bool)
    mask[:, 1, 1] = mask[:, 2:, 2:4] = True
    weights = layer.maps(x, grid=(4, 6), mask=mask.flatten(1))["same"]
    seen = (weights.sum(dim=(1, 2)) > 0).tolist()
    assert seen == [[True, False, False, False, True, False]] * 2


def test_prefix_tokens_skip_the_convolution():
    layer, x = pola(num_prefix_tokens=1), tokens(21)
    layer.core.forward = lambda q, k, v, **_: torch.zeros_like(q)
    out = layer(x, grid=GRID)
    torch.testing.assert_close(out[:, 0], layer.proj.bias.expand(2, -1))
    without_prefix = pola(num_prefix_tokens=0)
    without_prefix.load_state_dict(layer.state_dict())
    without_prefix.core.forward = layer.core.forward
    torch.testing.assert_close(out[:, 1:], without_prefix(x[:, 1:], grid=GRID))


def test_prefix_tokens_alone_are_convolved_in_a_sequence_and_pass_by_elsewhere():
    for conv, same in (("sequence", True), ("depthwise", False)):
        layer, plain = pola(num_prefix_tokens=2, conv=conv), pola(conv=conv)
        plain.load_state_dict(layer.state_dict())
        x = tokens(2)
        assert torch.equal(layer(x), plain(x)) == same
        assert plain(x[:, :0]).shape == (len(x), 0, x.shape[2])


def test_prefix_tokens_bypass_the_reduction_and_keep_their_table_rows():
    layer, x = pola(num_prefix_tokens=2, reduction=2, key_positions=(4, 6)), tokens(26)
    assert layer.key_positions.rows.shape == (2 + 6, 12)
    assert layer.maps(x, grid=(4, 6))["same"].shape == (2, 2, 26, 8)
    assert torch.equal(layer.key_positions((5, 5))[:2], layer.key_positions.rows[:2])
    assert layer(tokens(2 + 35), grid=(5, 7)).shape == (2, 37, 12)
    mask = torch.ones(2, 26, dtype=torch.bool)
    mask[:, 1] = False
    assert (layer.maps(x, grid=(4, 6), mask=mask)["same"][..., 1] == 0).all()


@pytest.mark.parametrize("polarity", ["both", "same", "positive", "subtract"])
@pytest.mark.parametrize("options", [{}, {"reduction": 2}, {"num_prefix_tokens": 1}, {"key_positions": GRID}], ids=str)
def test_maps_are_what_forward_applies(options, polarity):
    layer = pola(conv=None, gate=None, polarity=polarity, **options)
    x = tokens(20 + options.get("num_prefix_tokens", 0))
    mask = torch.rand(x.shape[:2]) > 0.2
    seen = {}
    core = layer.core.forward
    layer.core.forward = lambda q, k, v, **kw: core(q, k, seen.setdefault("v", v), **kw)
    out = layer(x, grid=GRID, mask=mask)
    maps, v = layer.maps(x, grid=GRID, mask=mask), seen["v"]
    parts = [maps["same"] @ v[..., :3], maps["opposite"] @ v[..., 3:]] if polarity == "both" else [maps[polarity] @ v]
    torch.testing.assert_close(out, layer.proj(torch.cat(parts, -1).transpose(1, 2).flatten(2)), rtol=1e-8, atol=1e-8)


def test_the_projection_is_dropped_out_in_training_only():
    layer, x = pola(proj_drop=0.5), tokens()
    dropped = (layer.train()(x) == 0).double().mean()
    assert 0.3 < dropped < 0.7
    assert (layer.eval()(x) != 0).all()


@pytest.mark.parametrize("name", ["softmax", "linear"])
def test_the_layer_takes_any_core(name):
    core = create(name, num_heads=2, head_dim=6)
    layer = randomise(AttentionLayer(12, 2, core, conv="depthwise", gate="linear", reduction=2)).double()
    mask = torch.rand(2, 20) > 0.3
    assert layer(tokens(), grid=GRID, mask=mask).isfinite().all()
    assert layer.maps(tokens(), grid=GRID, mask=mask)[name].shape == (2, 2, 20, 6)


def test_softmax_layer_is_multi_head_attention():
    layer = randomise(AttentionLayer(12, 2, create("softmax", num_heads=2, head_dim=6))).double()
    twin = nn.MultiheadAttention(12, 2, batch_first=True).double()
    twin.load_state_dict({
        "in_proj_weight": layer.qkv.weight, "in_proj_bias": layer.qkv.bias,
        "out_proj.weight": layer.proj.weight, "out_proj.bias": layer.proj.bias,
    })  # fmt: skip
    x, mask = tokens(), torch.rand(2, 20) > 0.3
    torch.testing.assert_close(layer(x, mask=mask)[mask], twin(x, x, x, key_padding_mask=~mask)[0][mask])


@pytest.mark.parametrize("form", ["pvt", "swin"])
def test_strict_loading_accepts_the_authors_names_inside_a_model(form):
    layer = pola(key_positions=GRID, reduction=2 if form == "pvt" else 1)
    ours = layer.state_dict()
    published = {
        "attn.power": ours["core.power"].reshape(1, 2, 1, 6),
        "attn.scale": ours["core.scale"].reshape(1, 1, 12),
        "attn.positional_encoding": ours["key_positions.rows"][None],
    }
    for kind in ("weight", "bias"):
        q, k, v = ours[f"qkv.{kind}"].chunk(3)
        gate = ours[f"gate.{kind}"]
        published |= {f"attn.proj.{kind}": ours[f"proj.{kind}"], f"attn.dwc.{kind}": ours[f"conv.{kind}"]}
        if form == "pvt":
            published |= {f"attn.qg.{kind}": torch.cat([q, gate]), f"attn.kv.{kind}": torch.cat([k, v])}
            published |= {
                f"attn.sr.{kind}": ours[f"key_reduction.conv.{kind}"],
                f"attn.norm.{kind}": ours[f"key_reduction.norm.{kind}"],
            }
        else:
            published[f"attn.qkvg.{kind}"] = torch.cat([q, k, v, gate])
    given = dict(published)
    other = nn.ModuleDict({"attn": pola(key_positions=GRID, reduction=2 if form == "pvt" else 1)})
    other.load_state_dict(published, strict=True)
    assert published.keys() == given.keys()
    torch.testing.assert_close(other["attn"](tokens_ := tokens(), grid=GRID), layer(tokens_, grid=GRID))


def test_strict_loading_reports_published_tensors_that_do_not_fit():
    layer = pola()
    state = layer.state_dict()
    state["power"] = torch.zeros(1, 3, 1, 6)
    del state["core.power"]
    with pytest.raises(RuntimeError, match=r"size mismatch for core.power: .*\[1, 3, 1, 6\]"):
        layer.load_state_dict(state)


def test_a_channelwise_convolution_has_a_filter_per_channel_and_a_depthwise_one_repeats_them():
    """With the same filters in every head the two are equal, by the native kernel and by calling the module."""
    shared = PolaAttention(8, 2, kernel_size=3).double().eval()
    separate = PolaAttention(8, 2, kernel_size=3, conv="channelwise").double().eval()
    assert separate.conv.weight.shape == (8, 1, 3, 3)
    state = shared.state_dict()
    state |= {name: state[name].repeat(2, *[1] * (state[name].ndim - 1)) for name in ("conv.weight", "conv.bias")}
    separate.load_state_dict(state)
    x = torch.randn(2, 12, 8, dtype=torch.float64)
    wanted = shared(x, grid=(3, 4))
    assert torch.allclose(separate(x, grid=(3, 4)), wanted, rtol=0, atol=1e-12)
    separate.conv.register_forward_hook(lambda module, inputs, output: output)
    assert torch.allclose(separate(x, grid=(3, 4)), wanted, rtol=0, atol=1e-12)


def test_a_shared_power_is_the_same_for_all_heads():
    layer = PolaAttention(8, 2, shared_power=True)
    assert layer.core.power.shape == (1, 4)
    with torch.no_grad():
        layer.core.power.normal_()
    assert torch.equal(layer.core.exponent()[0], layer.core.exponent()[1])
    layer(torch.randn(1, 5, 8)).sum().backward()
    assert layer.core.power.grad.shape == (1, 4)
    with pytest.raises(TypeError, match="shared_power is 1; give True or False"):
        PolaAttention(8, 2, shared_power=1)
