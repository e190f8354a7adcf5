"""The defaults of every mechanism: those of the published runs we compare with, and those stated in the guide."""

import inspect
import re
from pathlib import Path

import pytest

from polaformer import attention

REQUIRED = inspect.Parameter.empty  # no default
DEFAULTS = {
    "angular": {},
    "bigbird": {"block": 64, "num_random": 3, "window": 3, "seed": 0},
    "cosformer": {"max_length": None},
    "efficient": {},
    "enhanced": {},
    "focused": {"focusing_factor": 3.0, "eps": 1e-6},
    "hedgehog": {},
    "hydra": {},
    "informer": {"factor": None, "as_published": False},
    "kernelized": {"dropout": 0.0},
    "linear": {"as_published": False},
    "linformer": {"max_length": REQUIRED, "rank": 128, "as_published": False},
    "local": {"block": 64, "as_published": False},
    "longformer": {"window": 512},
    "mobile": {},
    "nystrom": {"num_landmarks": 128, "iterations": 6, "as_published": False},
    "performer": {"num_features": 128, "as_published": False},
    "pola": {"alpha": 4.0, "polarity": "both", "learn_scale": True, "shared_power": False, "eps": 0.0, "backend": "auto"},
    "reformer": {"chunk": 64, "num_hashes": 2, "num_buckets": None},
    "skyformer": {"num_landmarks": 128, "gamma": 0.1, "iterations": 6, "as_published": False},
    "softmax": {"scale": None, "dropout": 0.0},
    "synthesizer": {"max_length": REQUIRED, "max_keys": None},
}


def core_of(name):
    needs_length = attention.facts(name).needs_length
    return attention.create(name, num_heads=2, head_dim=4, **({"max_length": 8} if needs_length else {}))


def test_the_table_has_every_mechanism():
    assert sorted(DEFAULTS) == attention.names()


@pytest.mark.parametrize("name", DEFAULTS)
def test_options_and_their_defaults(name):
    core = core_of(name)
    parameters = inspect.signature(type(core)).parameters
    assert {option: parameters[option].default for option in attention.option_names(name)} == DEFAULTS[name]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("bigbird", {"block": 64, "num_random": 3, "window": 3, "seed": 0}),
        ("linformer", {"rank": 128}),
        ("local", {"block": 64}),
        ("longformer", {"before": 255, "after": 256}),
        ("nystrom", {"num_landmarks": 128, "iterations": 6}),
        ("performer", {"num_features": 128}),
        ("reformer", {"chunk": 64, "num_hashes": 2}),
        ("skyformer", {"num_landmarks": 128, "gamma": 0.1, "iterations": 6}),
        ("synthesizer", {"max_length": 8, "max_keys": 8}),
    ],
)
def test_a_core_keeps_its_defaults(name, kept):
    core = core_of(name)
    assert {key: getattr(core, key) for key in kept} == kept


def test_the_guide_names_the_defaults_that_hold():
    guide = (Path(__file__).resolve().parents[2] / "docs" / "guide.md").read_text()
    section = guide.split("## Mechanisms")[1].split("## ")[0]
    rows = re.findall(r"^\| `(\w+)`[ ¹²³⁴]*\|[^|]*\|[^|]*\|([^|]*)\|[^|]*\|$", section, flags=re.M)
    named = {(name, option): float(value) for name, row in rows for option, value in re.findall(r"`(\w+)` \(([\d.]+)", row)}
    assert len(named) == 17
    assert named == {(name, option): DEFAULTS[name][option] for name, option in named}
