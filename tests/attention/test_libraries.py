"""Mechanisms against stored outputs of other libraries; the stored tensors against the libraries, if installed."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file

import libraries
from polaformer import attention

OPTIONS = {
    "nystrom": {"num_landmarks": 6},
    "local": {"block": 4},
    "longformer": {"window": (4, 4)},
    "bigbird": {"block": 4, "num_random": 2},
    "reformer": {"chunk": 4},
    "performer": {"num_features": 20},
    "linformer": {"max_length": 16, "rank": 4},
}
# Where not 1e-9: float32; an inverse with another starting point; weights rounded to float32.
TOLERANCES = {"local": 1e-5, "nystrom-library": 1e-5, "longformer": 1e-6}


def to_make_again():
    """Cases whose library is installed; all if `make test-oracles` sets ORACLES, so that a missing library is an error."""
    known = libraries.CASES.items()
    return [name for name, (library, _) in known if "ORACLES" in os.environ or find_spec(library.replace("-", "_"))]


def tolerance(name):
    return next((value for start, value in TOLERANCES.items() if name.startswith(start)), 1e-9)


def create(name, data):
    """Our core with the random draws or parameters of the library."""
    kind, options = name.split("-")[0], {}
    if kind == "reformer":
        options["num_hashes"] = data["rotations"].shape[2]
    if name == "performer-published":
        options["as_published"] = True
    heads, width = data["q"].shape[1], data["q"].shape[3]
    core = attention.create(kind, num_heads=heads, head_dim=width, **OPTIONS[kind], **options).to(data["q"].dtype)
    if "projection" in data:
        core.projection.data.copy_(data["projection"])
    if "blocks" in data:
        core.random_blocks = lambda num_blocks: data["blocks"]
    if "rotations" in data:
        assert core.bucket_factors(data["q"].shape[2]) == data["buckets"].tolist()
        core.rotations = lambda size, like: data["rotations"]
    return core


@pytest.mark.parametrize("name", libraries.CASES)
def test_a_mechanism_equals_what_its_library_computed(name):
    """Except masked queries, for which even the libraries disagree."""
    data = load_file(libraries.FOLDER / f"{name}.safetensors")
    found = libraries.joined(create(name, data)(data["q"], data["k"], data["v"], mask=data.get("mask")))
    found = F.linear(found, data["out.weight"], data["out.bias"]) if "out.weight" in data else found
    is_self = data["q"].shape[2] == data["k"].shape[2]
    shown = data["mask"] if is_self and "mask" in data else torch.ones(found.shape[:2], dtype=torch.bool)
    torch.testing.assert_close(found[shown], data["wanted"][shown], rtol=tolerance(name), atol=tolerance(name))


def test_every_stored_file_belongs_to_a_case_and_says_what_made_it():
    assert {path.stem for path in libraries.FOLDER.iterdir()} == set(libraries.CASES)
    assert sum(path.stat().st_size for path in libraries.FOLDER.iterdir()) < 2**19
    for name, (library, _) in libraries.CASES.items():
        with safe_open(libraries.FOLDER / f"{name}.safetensors", "pt") as file:
            about = file.metadata()
        assert about["library"] == library
        assert about["version"]
        assert about["command"] == f"python tests/libraries.py {name}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", to_make_again())
def test_a_library_still_computes_what_is_stored(name):
    """Up to rounding, which differs between processors; `make test-oracles` installs the libraries."""
    stored, made = load_file(libraries.FOLDER / f"{name}.safetensors"), libraries.made(name)
    assert set(made) == set(stored)
    close = 1e-5 if name.startswith("local") else 1e-6 if name == "longformer" else 1e-10
    for key, tensor in made.items():
        torch.testing.assert_close(tensor, stored[key], rtol=close, atol=close, msg=lambda text, key=key: f"{key}: {text}")


def test_the_make_target_makes_every_case_again_even_if_a_library_is_missing(monkeypatch):
    monkeypatch.setattr(f"{__name__}.find_spec", lambda _: None)
    monkeypatch.delenv("ORACLES", raising=False)
    assert to_make_again() == []
    target = (Path(__file__).parents[2] / "Makefile").read_text().partition("\ntest-oracles:")[2].partition("\n\n")[0]
    assert "ORACLES=all " in target
    monkeypatch.setenv("ORACLES", "all")
    assert to_make_again() == list(libraries.CASES)
