"""The benchmark of detectors: the same work for all, numbers only for what agrees with the published form."""

import pytest
import torch

from polaformer.bench import detector as bench_detector
from polaformer.bench.detector import BackboneStep, DetectorStep, benchmark, build
from polaformer.bench.model import OURS, PUBLISHED, TWIN
from polaformer.bench.runner import BenchSettings
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


def test_all_heads_do_the_same_work() -> None:
    """As many regions with and without objects for each: proposals of random weights would differ."""
    images, found = torch.randn(1, 3, *SIZE), []
    for model in build("mask-rcnn", "pola_pvt_tiny").values():
        stage = model.heads.stage
        stage.roi.mask_predictor.register_forward_hook(lambda module, inputs, output: found.append(len(output)))
        stage.roi.box_predictor.register_forward_hook(lambda module, inputs, output: found.append(len(output[0])))
        DetectorStep(model, images, True).loss()
    assert len(set(found[::2])) == len(set(found[1::2])) == 1
    assert found[0] == NARROW["num_samples"]
    assert found[1] > 0


def test_the_backbone_is_differentiated_alone() -> None:
    model = build("mask-rcnn", "pola_pvt_tiny")[OURS]
    step = BackboneStep(model, torch.randn(1, 3, *SIZE), True)
    assert len(step.trained) == len(list(model.features.parameters()))
    assert len(step()) == len(step.trained)
