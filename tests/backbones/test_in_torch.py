"""Compiled, exported, in half precision."""

import pytest
import torch

import polaformer
from models import SMALL, images, small

FAMILIES = ["pola_deit_tiny", "pola_pvt_tiny", "pola_pvt_v2_b0", "pola_swin_tiny"]
# Compiling a hierarchy takes most of a minute: the plain transformer represents all in the default suite.
COMPILED = [pytest.param(name, marks=() if name == "pola_deit_tiny" else pytest.mark.long) for name in FAMILIES]


@pytest.mark.parametrize("name", COMPILED)
def test_torch_compile_in_one_graph(name):
    """In float64, as fp32 would hide mistakes in rounding; but for Swin, which takes minutes to compile in float64."""
    dtype, rtol, atol = (torch.float32, 1e-3, 1e-5) if "swin" in name else (torch.float64, 1e-7, 1e-10)
    model, x = small(name).to(dtype), images().to(dtype)
    compiled = torch.compile(model, fullgraph=True)
    assert torch.allclose(compiled(x), model(x), rtol=10 * atol, atol=10 * atol)
    compiled(x).sum().backward()
    by_compiled = {key: p.grad.clone() for key, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    model(x).sum().backward()
    largest = max(g.abs().max() for g in by_compiled.values())
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(by_compiled[key], parameter.grad, rtol=rtol, atol=atol * largest), key


@pytest.mark.parametrize("name", ["pola_deit_tiny", pytest.param("pola_pvt_v2_b0", marks=pytest.mark.long)])
def test_torch_compile_takes_another_size(name):
    """The second size is compiled with symbols for the sides, which must not take forever, and serves a third."""
    model = small(name)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for size in ((64, 64), (96, 80), (128, 96)):
            x = images(1, *size)
            assert torch.allclose(compiled(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", COMPILED)
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
