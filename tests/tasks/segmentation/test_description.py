"""The description of a segmenter in a weights file, and the parameters of the published segmenters."""

import json
from dataclasses import asdict

import pytest
import torch

from polaformer.errors import SettingsError
from polaformer.tasks.segmentation.description import SegmenterDescription, needs_two_images
from polaformer.tasks.segmentation.fcn import FCN
from segmenters import SEGMENTERS, describe


@pytest.mark.parametrize(
    ("options", "printed", "decimals"),
    [
        ({"segmenter": "upernet", "backbone": "softmax_swin_tiny"}, "60", 0),  # Swin's paper
        ({"segmenter": "semantic-fpn", "backbone": "softmax_pvt_tiny"}, "17.0", 1),  # PVT's paper
        ({"segmenter": "semantic-fpn", "backbone": "softmax_pvt_small"}, "28.2", 1),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else None,
)
def test_softmax_twins_have_the_published_numbers_of_parameters(options, printed, decimals):
    """In millions, for the 150 classes of ADE20K; with UPerNet's auxiliary head."""
    with torch.device("meta"):
        found = sum(one.numel() for one in SegmenterDescription(num_classes=150, **options).build().parameters())
    assert f"{found / 1e6:.{decimals}f}" == printed


def test_defaults_are_the_published_ones():
    with torch.device("meta"):
        fpn, upernet = (
            SegmenterDescription(segmenter=name, backbone="pola_pvt_tiny", num_classes=150).build() for name in SEGMENTERS
        )
    assert fpn.head.pyramid.outputs[0].out_channels == 256
    assert fpn.head.classifier.conv_seg.in_channels == 128
    assert fpn.auxiliary is None
    assert upernet.head.classifier.conv_seg.in_channels == 512
    assert (upernet.auxiliary_weight, upernet.auxiliary.classifier.conv_seg.in_channels) == (0.4, 256)
    heads = [fpn.head, upernet.head, upernet.auxiliary]
    assert [head.classifier.dropout.p for head in heads] == [0.1] * 3


@pytest.mark.parametrize("segmenter", SEGMENTERS)
@pytest.mark.parametrize("auxiliary", [None, True, False])
def test_the_auxiliary_head_is_upernets_unless_chosen(segmenter, auxiliary):
    description = describe(segmenter, auxiliary=auxiliary)
    expected = segmenter == "upernet" if auxiliary is None else auxiliary
    assert description.has_auxiliary == expected == isinstance(description.build().auxiliary, FCN)


@pytest.mark.parametrize("segmenter", SEGMENTERS)
def test_a_description_survives_json_and_builds_the_same_segmenter(segmenter):
    options = {"dims": (8, 8, 8, 8), "depths": 1, "num_heads": 1, "attention": "SSLL", "attention_options": {"gate": None}}
    description = describe(segmenter, backbone_options=options)
    again = SegmenterDescription.from_json(description.to_json())
    assert again.to_json() == description.to_json()
    state = description.build().state_dict()
    again.build().load_state_dict(state, strict=True)
    assert not any(again.misfits(state))
    other = SegmenterDescription(**(asdict(again) | {"num_classes": 4}))
    assert other.misfits(state).different


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segmenter": "uper-net"}, "segmenter is 'uper-net'; did you mean 'upernet'"),
        ({"segmenter": None}, "choose one of semantic-fpn, upernet"),
        ({"backbone": "pola_deit_tiny"}, "single stride"),
        ({"num_classes": 0}, "num_classes is 0; give an integer from 1 to 255"),
        ({"num_classes": 256}, "num_classes is 256; give an integer from 1 to 255"),
        ({"head_width": 0}, "head_width is 0; give an integer from 1 to 8192"),
        ({"auxiliary_width": None}, "auxiliary_width is None; give an integer"),
        ({"auxiliary": 1}, "auxiliary is 1; choose one of True, False, None"),
        ({"dropout": 1}, "dropout is 1; give a number from 0 to 0.99"),
        ({"dropout": float("nan")}, "dropout is nan"),
        ({"segmenter": "upernet", "fpn_width": 64}, "fpn_width is 64, but the pyramid of upernet has head_width channels"),
        ({"backbone_options": {"num_classes": 5}}, "num_classes, which a segmenter sets itself"),
        ({"backbone_options": {"patch_size": 2}}, r"but segmenters need \(4, 8, 16, 32\)"),
        ({"box_width": 3}, "segmenter: unknown key 'box_width'"),
    ],
    ids=str,
)
def test_implausible_descriptions_are_refused(changes, message):
    values = {"segmenter": "semantic-fpn", "backbone": "pola_pvt_tiny", "num_classes": 3} | changes
    with pytest.raises(SettingsError, match=message):
        SegmenterDescription.from_json(json.dumps(values))


def test_missing_keys_are_listed():
    with pytest.raises(SettingsError, match="3 problems") as error:
        SegmenterDescription.from_json("{}")
    assert error.value.problems == [f"segmenter: {name} is missing" for name in ("backbone", "num_classes", "segmenter")]


@pytest.mark.parametrize("segmenter", SEGMENTERS)
@pytest.mark.parametrize("size", [(64, 64), (33, 32), (32, 32), (20, 32)], ids=str)
def test_what_needs_two_images_cannot_train_on_one(segmenter, size):
    description = describe(segmenter, auxiliary=False)
    model, images = description.build().train(), torch.randn(1, 3, *size)
    if needs_two_images(description, size):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            model(images)
    else:
        model(images)
    assert needs_two_images(description) == (segmenter == "upernet")
    model(torch.randn(2, 3, *size))
