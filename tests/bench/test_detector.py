"""The benchmark of detectors: the same work for all, numbers only for what agrees with the published form."""

from dataclasses import fields

import pytest
import torch

from polaformer.bench import detector as bench_detector
from polaformer.bench.detector import NUM_DETECTIONS, NUM_REGIONS, BackboneStep, DetectorStep, benchmark, build
from polaformer.bench.model import OURS, PUBLISHED, TWIN
from polaformer.bench.runner import BenchSettings
from polaformer.cli.bench_detector import BenchDetector
from polaformer.tasks.detection.description import DetectorDescription

SIZE = (64, 96)
NARROW = {"width": 8, "box_width": 16, "mask_width": 8, "num_samples": 64}


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(**about: object) -> DetectorDescription:
        return DetectorDescription(**NARROW | about)  # type: ignore[arg-type]

    monkeypatch.setattr(bench_detector, "DetectorDescription", narrow)


@pytest.mark.parametrize("part", ["backbone", "detector"])
def test_all_are_timed_and_ours_agrees_with_the_published_form(part: bench_detector.Part) -> None:
    settings = BenchSettings(rounds=1, seconds=60.0, backward=True)
    rows, _ = benchmark(part, "mask-rcnn", "pola_pvt_tiny", SIZE, settings)
    assert list(rows) == [OURS, PUBLISHED, TWIN]
    assert (rows[OURS].error or 1.0) < 1e-4
    assert (rows[OURS].gradients_error or 1.0) < 1e-3
    assert all((row.images_per_second or 0) > 0 and (row.saved_bytes or 0) > 0 for row in rows.values())


@pytest.mark.parametrize(("detector", "training"), [("mask-rcnn", True), ("mask-rcnn", False), ("cascade-mask-rcnn", False)])
def test_all_heads_do_the_same_work(detector: str, training: bool) -> None:
    """As many regions with and without objects for each: proposals and detections of random weights would differ."""
    images, found = torch.randn(1, 3, *SIZE), {}
    for name, model in build(detector, "pola_pvt_tiny").items():
        model.train(training)
        found[name] = calls = list[tuple[str, int]]()
        for stage in [model.heads.stage] if detector == "mask-rcnn" else model.heads.stages:
            stage.roi.mask_predictor.register_forward_hook(lambda _, given, out, calls=calls: calls.append(("mask", len(out))))
            stage.roi.box_predictor.register_forward_hook(lambda _, given, out, calls=calls: calls.append(("box", len(out[0]))))
        step = DetectorStep(model, images, training)
        step.loss() if training else step.outputs()
    assert found[OURS] == found[PUBLISHED] == found[TWIN]
    num_stages = 1 if detector == "mask-rcnn" else 3
    assert len(found[OURS]) == 2 * num_stages
    boxes, masks = ([number for kind, number in found[OURS] if kind == one] for one in ("box", "mask"))
    if training:
        assert boxes[0] == NARROW["num_samples"]
        assert min(masks) > 0
    else:
        assert (boxes, masks) == ([NUM_REGIONS] * num_stages, [NUM_DETECTIONS] * num_stages)


def test_the_backbone_is_differentiated_alone() -> None:
    model = build("mask-rcnn", "pola_pvt_tiny")[OURS]
    step = BackboneStep(model, torch.randn(1, 3, *SIZE), True)
    assert len(step.trained) == len(list(model.features.parameters()))
    assert len(step()) == len(step.trained)


def test_a_figure_that_is_not_drawn_is_no_option() -> None:
    assert "figure" not in {option.name for option in fields(BenchDetector)}
