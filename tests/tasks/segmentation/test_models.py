"""The list of segmenters, and the paper's rows."""

import re
from pathlib import Path

import pytest
import torch

from polaformer.analysis.counting import count_pass
from polaformer.attention import facts
from polaformer.errors import SettingsError
from polaformer.recipes.camvid import SEMANTIC_FPN_NANO
from polaformer.tasks.detection.models import list_detectors
from polaformer.tasks.segmentation.job import describe
from polaformer.tasks.segmentation.models import list_segmenters
from polaformer.tasks.segmentation.published import RIVALS, ROWS

PAPER = Path(__file__).resolve().parents[4] / "shared" / "reference" / "paper.tex"


def counts(model):
    with torch.device("meta"):
        return count_pass(model.build(), model.forward)


def test_the_list_has_the_models_of_all_recipes_and_their_softmax_twins():
    """Those of the paper at both sizes, the small one at its own."""
    models = list_segmenters("*", ()).models
    pola = [f"{row.segmenter}-{row.model}".replace("_", "-") for row in ROWS]
    names = [name.replace("pola", kind) for name in pola for kind in ("pola", "softmax")]
    both = [(name, size) for name in names for size in ([512, 512], [512, 2048])]
    nano = [(f"semantic-fpn-{kind}-pvt-nano", [360, 480]) for kind in ("pola", "softmax")]
    assert [(model.name, model.about["size"]) for model in models] == both + nano
    assert {model.about["attention"] for model in models} == {"pola", "softmax", "pola,pola,softmax,softmax"}


@pytest.mark.parametrize(
    ("pattern", "millions"), [("semantic-fpn-softmax-pvt-tiny", 16.98), ("upernet-softmax-swin-tiny", 59.94)]
)
def test_parameters_and_multiplications_are_counted(pattern, millions):
    small, large = (counts(model) for model in list_segmenters(pattern, ()).models)
    assert small.params == large.params == pytest.approx(millions * 1e6, rel=1e-3)
    assert small.macs > 3e10
    assert 3.98 * small.macs < large.macs < 5 * small.macs  # the maps of softmax grow with the square


def test_the_small_model_is_that_of_its_recipe():
    [model, _] = list_segmenters("*-nano", ()).models
    with torch.device("meta"):
        wanted = {name: one.shape for name, one in describe(SEMANTIC_FPN_NANO, 11).build().state_dict().items()}
        assert {name: one.shape for name, one in model.build().state_dict().items()} == wanted


def test_upernet_has_the_published_multiplications():
    """Of Swin's paper, in billions, for 512×2048 pixels; whose counter is another one."""
    [_, large] = list_segmenters("upernet-softmax-swin-tiny", ()).models
    assert counts(large).macs / 1e9 == pytest.approx(945, abs=1)


@pytest.mark.parametrize("list_models", [list_segmenters, list_detectors])
@pytest.mark.parametrize("mechanism", ["linformer", "synthesizer"])
def test_other_mechanisms_are_counted_also_with_parameters_per_token(list_models, mechanism):
    models = [model for model in list_models("*-pola-pvt-tiny", (mechanism,)).models if "retinanet" not in model.name]
    assert {model.about["attention"] for model in models} == {mechanism}
    params = [counts(model).params for model in models]
    assert not facts(mechanism).needs_length or len(params) == 1 or params[1] > params[0]
    assert min(params) > 1.5e7


def test_in_swin_other_mechanisms_are_in_the_first_two_stages():
    [model, _] = list_segmenters("upernet-*", ("focused",)).models
    with torch.device("meta"):
        assert model.build().backbone.attention == ("focused", "focused", "softmax", "softmax")


@pytest.mark.parametrize(
    ("pattern", "attention", "message"),
    [
        ("mask*", (), r'no model matches \'mask\*\'; try "\*", "upernet-\*"'),
        ("*", ("polar",), "--attention has 'polar'; did you mean 'pola'"),
    ],
)
def test_unknown_names_are_refused(pattern, attention, message):
    with pytest.raises(SettingsError, match=message):
        list_segmenters(pattern, attention)


@pytest.mark.skipif(not PAPER.is_file(), reason="the paper is not beside this checkout")
def test_rows_are_those_of_the_paper():
    """The last number of each method in the table of detection and segmentation."""
    table = PAPER.read_text().split(r"\label{tab:detection and semantic}")[1].split(r"\end{tabular}")[0]
    printed = [float(one) for one in re.findall(r"\\multirow\{-?[23]\}\{\*\}\{(?:\\textbf\{)?(\d\d\.\d)", table)]
    assert sorted(printed) == sorted([*(row.miou for row in ROWS), *RIVALS.values()])
