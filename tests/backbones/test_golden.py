"""Against tensors computed with the authors' code: whole models, reduced and full-size, and the resizing of a checkpoint."""

import json

import pytest
import torch
from safetensors.torch import load_file

import polaformer
from polaformer.backbones.fitting import fit
from published import draw, published_groups, published_state_dict

LOGITS_FP32, LOGITS_FP64 = 2e-5, 1e-9  # relative to the largest
RIVALS_FP32 = 2e-6

REDUCED = {
    "model_pvt_reduced_sr1111": (
        "pola_pvt_tiny",
        {"dims": (16, 32, 48, 64), "num_heads": (1, 2, 3, 4), "mlp_ratios": 4, "depths": (2, 1, 2, 1)},
    ),
    "model_pvt_reduced_sr8421": (
        "pola_pvt_tiny",
        {
            "dims": (16, 32, 48, 64),
            "num_heads": (1, 2, 3, 4),
            "mlp_ratios": 4,
            "depths": (2, 1, 2, 1),
            "reductions": (8, 4, 2, 1),
        },
    ),
    "model_swin_reduced_LLSS": (
        "pola_swin_tiny",
        {"dims": (24, 48, 96, 192), "num_heads": (2, 2, 4, 4), "depths": (2, 2, 2, 2), "attention": "LLSS"},
    ),
}
FULL_SIZE = {
    "fullsize_pola_pvt_tiny_sr1111": ("pola_pvt_tiny", {}),
    "fullsize_pola_pvt_large_sr1111": ("pola_pvt_large", {}),
    "fullsize_pola_pvt_tiny_sr8421": ("pola_pvt_tiny", {"reductions": (8, 4, 2, 1)}),
    "fullsize_pvt_tiny_softmax": ("softmax_pvt_tiny", {}),
    "fullsize_pola_swin_tiny_224": ("pola_swin_tiny", {}),
    "fullsize_pola_swin_small_384": ("pola_swin_small_384", {}),
    "fullsize_swin_tiny_softmax_224": ("softmax_swin_tiny", {}),
    "rivals/fullsize_flatten_pvt_tiny_sr1111": ("pola_pvt_tiny", {"attention": "focused"}),
    "rivals/fullsize_flatten_pvt_v2_b0_sr1111": ("pola_pvt_v2_b0", {"attention": "focused"}),
    "fullsize_DERIVED_pola_pvt_v2_b0_sr1111": ("pola_pvt_v2_b0", {}),
    "fullsize_DERIVED_pola_pvt_v2_b1_sr1111": ("pola_pvt_v2_b1", {}),
    "fullsize_DERIVED_pola_pvt_v2_b2_sr1111": ("pola_pvt_v2_b2", {}),
}


def close(given, wanted, tolerance):
    wanted = wanted.to(given.dtype)
    assert given.shape == wanted.shape
    assert (given - wanted).abs().max() <= tolerance * wanted.abs().max()


def stage_tokens(model, x):
    return model.forward_intermediates(x, output_fmt="NLC", intermediates_only=True)


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("name", REDUCED)
def test_a_reduced_model_equals_the_authors(golden, name):
    tensors = load_file(golden / f"{name}.safetensors")
    model_name, options = REDUCED[name]
    model = polaformer.create_model(model_name, num_classes=10, **options).eval()
    published = {k.removeprefix("state_dict."): v for k, v in tensors.items() if k.startswith("state_dict.")}
    polaformer.load_checkpoint(model, published)
    x = tensors["input"].requires_grad_()
    logits = model(x)
    close(logits, tensors["logits"], LOGITS_FP32)
    for index, tokens in enumerate(stage_tokens(model, x), start=1):
        close(tokens, tensors[f"feature.stage{index}"], LOGITS_FP32)

    (logits * tensors["logit_weights"]).sum().backward()
    close(x.grad, tensors["grad_input"], 1e-4)
    gradients = published_groups(model, lambda parameter: parameter.grad)
    norms = {k.removeprefix("grad_norm."): v for k, v in tensors.items() if k.startswith("grad_norm.")}
    assert gradients.keys() == norms.keys()
    for key, norm in norms.items():
        assert gradients[key].norm().item() == pytest.approx(norm.item(), rel=1e-4, abs=1e-5 * max(norms.values()).item()), key
    close(model.double()(x.detach().double()), tensors["logits_f64"], LOGITS_FP64)


@pytest.mark.parametrize("each_backend", [pytest.param("torch", marks=pytest.mark.long), "cpu"], indirect=True)
@pytest.mark.parametrize("name", FULL_SIZE)
def test_a_full_size_model_equals_the_authors(golden, each_backend, name):
    tensors = load_file(golden / f"{name}.safetensors")
    model_name, options = FULL_SIZE[name]
    model = polaformer.create_model(model_name, num_classes=10, **options).eval()
    polaformer.load_checkpoint(model, published_state_dict(model))
    x, tolerance = draw(12345, (1, 3, *model.img_size)).float(), RIVALS_FP32 if name.startswith("rivals/") else LOGITS_FP32
    with torch.no_grad():
        close(model(x), tensors["logits"], tolerance)
        for index, tokens in enumerate(stage_tokens(model, x), start=1):
            close(tokens.mean(dim=1).squeeze(), tensors[f"feature_mean.stage{index}"].squeeze(), tolerance)
            close(tokens.std(dim=1).squeeze(), tensors[f"feature_std.stage{index}"].squeeze(), tolerance)
        close(model.double()(x.double()), tensors["logits_f64"], LOGITS_FP64)


@pytest.mark.usefixtures("each_backend")
def test_resizing_from_224_to_384_equals_the_authors(golden):
    tensors = load_file(golden / "resize_swin_224_to_384.safetensors")
    model = polaformer.create_model(
        "pola_swin_tiny_384", num_classes=10, dims=(8, 16, 32, 64), depths=(1, 1, 2, 2), num_heads=2
    ).eval()
    published = {k.removeprefix("state_dict_224."): v for k, v in tensors.items() if k.startswith("state_dict_224.")}
    loaded = polaformer.load_checkpoint(model, published)
    after = {k.removeprefix("after."): v for k, v in tensors.items() if k.startswith("after.")}
    assert len(loaded.resized) == len(after)
    assert "stages.0.blocks.0.attn.key_positions.rows: 56×56 → 96×96" in loaded.resized
    ours = published_groups(model, lambda parameter: parameter.detach())
    for key, table in after.items():
        close(ours[key], table, 1e-6)
    with torch.no_grad():
        close(model(draw(12345, (1, 3, 384, 384)).float()), tensors["logits_384"], LOGITS_FP32)


def published_shapes(golden):
    return json.loads((golden / "official_keys.json").read_text())


@pytest.mark.parametrize("name", ["tiny", "small", "medium", "large"])
def test_a_released_pvt_loads_strictly(golden, name):
    check_loads_strictly(f"pola_pvt_{name}", published_shapes(golden)[f"pola_pvt_{name}"])


@pytest.mark.parametrize("name", ["tiny", "small", "base", "small_384", "base_384"])
def test_a_released_swin_loads_strictly(golden, name):
    check_loads_strictly(f"pola_swin_{name}", published_shapes(golden)[f"pola_swin_{name}"])


def check_loads_strictly(name, shapes):
    """A state dict with exactly these keys and shapes: through load_checkpoint, and through load_state_dict directly."""
    state = {key: torch.zeros(shape, dtype=getattr(torch, dtype)) for key, (shape, dtype) in shapes.items()}
    state["head.bias"] = torch.arange(1000.0)
    model = polaformer.create_model(name)
    loaded = polaformer.load_checkpoint(model, state)
    assert loaded == ([], [])
    assert torch.equal(model.head.bias, state["head.bias"])
    assert all(not parameter.any() for key, parameter in model.named_parameters() if key != "head.bias")
    again = polaformer.create_model(name)
    again.load_state_dict(state, strict=True)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert fit(state, model).state.keys() == model.state_dict().keys()
