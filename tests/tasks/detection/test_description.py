"""The description of a detector in a weights file, and the parameters of the published detectors."""

import json
from dataclasses import asdict

import pytest
import torch

from detectors import DETECTORS, SWIN_CASCADE, describe
from polaformer.errors import SettingsError
from polaformer.tasks.detection.description import DetectorDescription


def num_parameters(**options):
    with torch.device("meta"):
        return sum(one.numel() for one in DetectorDescription(num_classes=80, **options).build().parameters())


@pytest.mark.parametrize(
    ("options", "printed", "decimals"),
    [
        # Swin's repository of detection
        ({"detector": "mask-rcnn", "backbone": "softmax_swin_tiny"}, "48", 0),
        (SWIN_CASCADE | {"backbone": "softmax_swin_tiny"}, "86", 0),
        # Tables of the PVT paper
        ({"detector": "retinanet", "backbone": "softmax_pvt_tiny"}, "23.0", 1),
        ({"detector": "mask-rcnn", "backbone": "softmax_pvt_tiny"}, "32.9", 1),
        ({"detector": "retinanet", "backbone": "softmax_pvt_small"}, "34.2", 1),
        ({"detector": "mask-rcnn", "backbone": "softmax_pvt_small"}, "44.1", 1),
    ],
    ids=lambda value: "-".join((value["detector"], value["backbone"])) if isinstance(value, dict) else None,
)
def test_softmax_twins_have_the_published_numbers_of_parameters(options, printed, decimals):
    """In millions, for the 80 classes of COCO."""
    assert f"{num_parameters(**options) / 1e6:.{decimals}f}" == printed


@pytest.mark.parametrize("detector", DETECTORS)
def test_a_description_survives_json_and_builds_the_same_detector(detector):
    description = describe(
        detector,
        backbone_options={
            "dims": (8, 8, 8, 8),
            "depths": 1,
            "num_heads": 1,
            "attention": "SSLL",
            "attention_options": {"gate": None},
        },
    )
    again = DetectorDescription.from_json(description.to_json())
    assert again.to_json() == description.to_json()
    state = description.build().state_dict()
    again.build().load_state_dict(state, strict=True)
    assert not any(again.misfits(state))
    other = DetectorDescription(**(asdict(again) | {"num_classes": 5}))
    assert other.misfits(state).different


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"detector": "mask_rcnn"}, "detector is 'mask_rcnn'; did you mean 'mask-rcnn'"),
        ({"detector": ["mask-rcnn"]}, "choose one of retinanet, mask-rcnn, cascade-mask-rcnn"),
        ({"backbone": "pola_deit_tiny"}, "single stride"),
        ({"backbone": 3}, "backbone is 3"),
        ({"num_classes": 0}, "num_classes is 0; give an integer from 1"),
        ({"num_classes": True}, "num_classes is True"),
        ({"num_classes": 10**9}, "num_classes is 1000000000; give an integer from 1 to 100000"),
        ({"width": "256"}, "width is '256'"),
        ({"width": 10**6}, "width is 1000000; give an integer from 1 to 8192"),
        ({"score_threshold": 2}, "score_threshold is 2; give a number from 0 to 1"),
        ({"anchor_scale": float("nan")}, "anchor_scale is nan"),
        ({"box_loss": "l2"}, "box_loss is 'l2'"),
        ({"class_agnostic": 1}, "class_agnostic is 1"),
        ({"backbone_options": [1]}, "give a mapping from argument names to values"),
        ({"backbone_options": {"num_classes": 5}}, "num_classes, which a detector sets itself"),
        ({"backbone_options": {"dimms": [1]}}, "unexpected keyword argument 'dimms'; did you mean 'dims'"),
        ({"backbone_options": {"dims": [8, 8, 8, 10**9]}}, "give numbers up to 65536"),
        ({"backbone_options": {"img_size": 10**8}}, "give numbers up to 65536"),
        ({"backbone_options": {"attention_options": {"alpha": 1e30}}}, "give numbers up to 65536"),
        ({"backbone_options": {"depths": [2, 2, 1000, 2]}}, "give at most 1000 blocks"),
        ({"backbone_options": {"patch_size": 2}}, r"have strides \(2, 4, 8, 16\), but detectors need \(4, 8, 16, 32\)"),
        ({"backbone_options": {"dims": "wide"}}, "backbone pola_pvt_tiny: "),
        ({"detector": "retinanet", "box_head": "4conv1fc"}, "box_head is '4conv1fc', but retinanet has no regions"),
    ],
    ids=str,
)
def test_implausible_descriptions_are_refused(changes, message):
    values = {"detector": "mask-rcnn", "backbone": "pola_pvt_tiny", "num_classes": 3} | changes
    with pytest.raises(SettingsError, match=message):
        DetectorDescription.from_json(json.dumps(values))


def test_all_problems_are_listed_at_once():
    with pytest.raises(SettingsError, match="2 problems") as error:
        DetectorDescription(detector="retina", backbone="pola_pvt_tiny", num_classes=-1)
    assert len(error.value.problems) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is a list; give a JSON object"),
        ("{}", "detector is missing"),
        (
            '{"detector": "retinanet", "backbone": "pola_pvt_tiny", "num_classes": 1, "widht": 3}',
            "unknown key 'widht'; did you mean 'width'",
        ),
    ],
    ids=["half", "deep", "list", "empty", "unknown key"],
)
def test_other_texts_are_refused(text, message):
    with pytest.raises(SettingsError, match=message):
        DetectorDescription.from_json(text)
