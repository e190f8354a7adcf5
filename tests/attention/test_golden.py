"""The layers against tensors produced by the PolaFormer authors' code and by the code of other mechanisms' authors."""

import pytest
import torch
from safetensors.torch import load_file

from oracle import relative_error
from polaformer.attention import AttentionLayer, PolaAttention, create, create_layer

# file → grid, heads, reduction
POLA = {
    "attn_pvt_sr1": ((6, 6), 2, 1),
    "attn_pvt_sr1_nonsquare": ((4, 6), 4, 1),
    "attn_pvt_sr2": ((8, 8), 2, 2),
    "attn_swin_window": ((7, 7), 2, 1),
}
FLATTEN = {"rivals/flatten_pvt_sr1": ((6, 6), 2, 1), "rivals/flatten_pvt_sr2": ((8, 8), 2, 2)}
SOFTMAX = {"rivals/softmax_pvt_sr1": ((6, 6), 2, 1), "rivals/softmax_pvt_sr2": ((8, 8), 2, 2)}


def build(name):
    if name in POLA:
        grid, heads, reduction = POLA[name]
        return PolaAttention(32, heads, key_positions=grid, reduction=reduction, eps=1e-6), grid
    if name in FLATTEN:
        grid, heads, reduction = FLATTEN[name]
        return create_layer("focused", 32, heads, tokens=grid, reduction=reduction), grid
    grid, heads, reduction = SOFTMAX[name]
    core = create("softmax", num_heads=heads, head_dim=32 // heads)
    return AttentionLayer(32, heads, core, reduction=reduction), grid


def load(golden, name):
    """The layer with the file's parameters, its grid, and everything in the file."""
    data = load_file(golden / f"{name}.safetensors")
    layer, grid = build(name)
    layer.load_state_dict({k.removeprefix("param."): v for k, v in data.items() if k.startswith("param.")}, strict=True)
    return layer, grid, data


def published_names(layer, kind):
    """Our parameters, or their gradients, under the authors' names and in their shapes; both the PVT and the Swin form."""
    ours = {n: p.grad if kind == "grad" else p.detach() for n, p in layer.named_parameters()}
    renamed = {
        "core.power": ("power", lambda x: x[None, :, None]),
        "core.scale": ("scale", lambda x: x.reshape(1, 1, -1)),
        "key_positions.rows": ("positional_encoding", lambda x: x[None]),
    }
    moved = {"conv.": "dwc.", "key_reduction.conv.": "sr.", "key_reduction.norm.": "norm."}
    out = {}
    for name, tensor in ours.items():
        if name in renamed:
            published, change = renamed[name]
            out[published] = change(tensor)
        elif any(name.startswith(prefix) for prefix in moved):
            prefix = next(p for p in moved if name.startswith(p))
            out[name.replace(prefix, moved[prefix], 1)] = tensor
        else:
            out[name] = tensor
    for part in ("weight", "bias"):
        q, k, v = out.pop(f"qkv.{part}").chunk(3)
        gate = out.pop(f"gate.{part}", q[:0])
        out |= {f"q.{part}": q, f"kv.{part}": torch.cat([k, v]), f"qg.{part}": torch.cat([q, gate])}
        out[f"qkvg.{part}"] = torch.cat([q, k, v, gate])
    return out


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("name", POLA)
def test_the_layer_reproduces_the_authors_layer(golden, name):
    check_the_layer_reproduces_the_authors_layer(golden, name)


@pytest.mark.parametrize("name", [*FLATTEN, *SOFTMAX])
def test_the_layer_reproduces_a_rivals_layer(golden, name):
    check_the_layer_reproduces_the_authors_layer(golden, name)


def check_the_layer_reproduces_the_authors_layer(golden, name):
    layer, grid, data = load(golden, name)
    x = data["input"].clone().requires_grad_()
    out = layer(x, grid=grid)
    (out * data["grad_output"]).sum().backward()
    assert relative_error(out, data["output"]) <= 2e-6
    assert (out - data["output"]).abs().max() <= 2e-6 * data["output"].abs().max()
    assert relative_error(x.grad, data["grad_input"]) <= 2e-6

    gradients = published_names(layer, "grad")
    wanted = {k.removeprefix("grad_param."): v for k, v in data.items() if k.startswith("grad_param.")}
    assert len(wanted) >= 4
    for parameter, gradient in wanted.items():
        assert relative_error(gradients[parameter], gradient) <= 1e-5, parameter


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("name", POLA)
def test_the_layer_reproduces_the_authors_layer_in_float64(golden, name):
    check_the_layer_reproduces_the_authors_layer_in_float64(golden, name)


@pytest.mark.parametrize("name", [*FLATTEN, *SOFTMAX])
def test_the_layer_reproduces_a_rivals_layer_in_float64(golden, name):
    check_the_layer_reproduces_the_authors_layer_in_float64(golden, name)


def check_the_layer_reproduces_the_authors_layer_in_float64(golden, name):
    layer, grid, data = load(golden, name)
    x = data["input"].double().requires_grad_()
    out = layer.double()(x, grid=grid)
    (gradient,) = torch.autograd.grad((out * data["grad_output"].double()).sum(), x)
    assert relative_error(out, data["output_f64"]) <= 1e-10
    assert relative_error(gradient, data["grad_input_f64"]) <= 1e-10


# file → mechanism, heads, the published names of q, k, v (joint or separate) and of the output projection
OTHERS = {
    "rivals/efficient_attention": ("efficient", 2, ("queries", "keys", "values"), "reprojection"),
    "rivals/hydra_attention": ("hydra", 4, ("qkv",), "out"),
    "rivals/linear_angular": ("angular", 2, ("qkv",), "proj"),
    "rivals/mobile_attention": ("mobile", 4, ("query_projection", "key_projection", "value_projection"), "out_projection"),
}


def rival(golden, name, dtype):
    """The layer with the file's parameters, the file's tensors as (B, N, C), and the gradients of its parameters."""
    data = load_file(golden / f"{name}.safetensors")
    mechanism, heads, inputs, output = OTHERS[name]
    layer = create_layer(mechanism, 32, heads, tokens=36)
    state = {}
    for kind in ("weight", "bias"):
        rows = [data[f"param.{part}.{kind}"] for part in inputs]
        state[f"qkv.{kind}"] = torch.cat([row.flatten(1) if kind == "weight" else row for row in rows])
        state[f"proj.{kind}"] = data[f"param.{output}.{kind}"].reshape(layer.proj.get_parameter(kind).shape)
    if "param.dconv.weight" in data:
        state["dconv.weight"] = data["param.dconv.weight"]
    layer.load_state_dict(state, strict=True)
    tokens = {
        key: x.flatten(2).mT if x.ndim == 4 else x for key, x in data.items() if not key.startswith(("param", "grad_param"))
    }
    gradients = {key.removeprefix("grad_param."): x for key, x in data.items() if key.startswith("grad_param.")}
    return layer.to(dtype), tokens, gradients


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(("dtype", "ending", "tolerance"), [(torch.float32, "", 2e-6), (torch.float64, "_f64", 1e-9)])
def test_a_rivals_layer_reproduces_its_authors_layer(golden, name, dtype, ending, tolerance):
    layer, data, gradients = rival(golden, name, dtype)
    x = data["input"].to(dtype).requires_grad_()
    out = layer(x)
    if name == "rivals/efficient_attention":
        out = out + x  # their module adds its input; ours leaves that to the block
    (out * data["grad_output"].to(dtype)).sum().backward()
    assert relative_error(out, data[f"output{ending}"]) <= tolerance
    assert relative_error(x.grad, data[f"grad_input{ending}"]) <= tolerance
    _, _, inputs, output = OTHERS[name]
    for kind in ("weight", "bias"):
        wanted = torch.cat([gradients[f"{part}.{kind}"].flatten(1 if kind == "weight" else 0) for part in inputs])
        assert relative_error(layer.qkv.get_parameter(kind).grad, wanted) <= 1e-5
        wanted = gradients[f"{output}.{kind}"]
        assert relative_error(layer.proj.get_parameter(kind).grad.reshape(wanted.shape), wanted) <= 1e-5
    if name == "rivals/linear_angular":
        assert relative_error(layer.conv.weight.grad, gradients["dconv.weight"]) <= 1e-5
