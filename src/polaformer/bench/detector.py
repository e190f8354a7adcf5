"""A detector with our backbone, the same computed as published, and with the softmax twin: its backbone, and all of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from polaformer.attention.layer.published_layer import as_published
from polaformer.backbones.registry import softmax_twin
from polaformer.bench.model import OURS, PUBLISHED, TWIN, Step, compare, make_attention_matter
from polaformer.bench.runner import BenchSettings, Measurement, seeded
from polaformer.ops.grid import Grid
from polaformer.tasks.detection.description import DetectorDescription
from polaformer.tasks.detection.detector import Detector, Heads
from polaformer.tasks.detection.detector_facts import DetectorName
from polaformer.tasks.detection.stage import RoIStage

Part = Literal["backbone", "detector"]
PARTS: dict[Part, str] = {"backbone": "its backbone", "detector": "whole"}
NUM_CLASSES, NUM_OBJECTS = 80, 8
NUM_REGIONS, NUM_DETECTIONS = 1000, 100  # of an image


def benchmark(
    part: Part, detector: DetectorName, backbone: str, size: Grid, settings: BenchSettings
) -> tuple[dict[str, Measurement], list[str]]:
    """Rows of ours and its rivals on random images of that (height, width), and notes.

    What the backbone computes must agree with the same parameters computed as published.
    """
    models = build(detector, backbone, settings.device)
    images = torch.randn(settings.batch, 3, *size, generator=torch.Generator().manual_seed(0)).to(settings.device)
    for model in models.values():
        model.train(settings.backward)
    inside = {key: BackboneStep(model, images, settings.backward) for key, model in models.items()}
    whole = {key: DetectorStep(model, images, settings.backward) for key, model in models.items()}
    checked = (inside[OURS], inside[PUBLISHED])
    return compare({**inside} if part == "backbone" else {**whole}, settings, checked=checked)


def build(detector: DetectorName, backbone: str, device: str = "cpu") -> dict[str, Detector]:
    """Ours, the same computed as published, and its softmax twin; with random parameters, without drop path."""

    def described(name: str) -> DetectorDescription:
        options = {"drop_path_rate": 0.0}
        return DetectorDescription(detector=detector, backbone=name, num_classes=NUM_CLASSES, backbone_options=options)

    with seeded(0, "cpu"):
        ours = described(backbone).build()
        make_attention_matter(ours)
        twin = described(softmax_twin(backbone)).build()
    published = as_published(ours)
    assert isinstance(published, Detector)
    for model in (ours, published, twin):
        with_same_regions(model)
    return {key: model.to(device) for key, model in {OURS: ours, PUBLISHED: published, TWIN: twin}.items()}


def with_same_regions(model: Detector) -> None:
    """Makes the model propose and detect the same random boxes as all others, after it has computed its own.

    Proposals and detections of random weights differ by chance, and the mask head costs more for more of them.
    """
    proposals = cast(Heads, model.heads).proposals
    if proposals is None:
        return
    rpn, last = proposals.rpn, [one for one in model.heads.modules() if isinstance(one, RoIStage)][-1]
    propose, detect = rpn.filter_proposals, last.roi.postprocess_detections

    def filter_proposals(boxes: Tensor, objectness: Tensor, sizes: list[Grid], per_level: list[int]) -> Any:
        propose(boxes, objectness, sizes, per_level)
        found = same_boxes(NUM_REGIONS, sizes, boxes)
        return found, [one.new_ones(len(one)) for one in found]

    def postprocess_detections(logits: Tensor, deltas: Tensor, proposals: list[Tensor], sizes: list[Grid]) -> Any:
        detect(logits, deltas, proposals, sizes)
        found = same_boxes(NUM_DETECTIONS, sizes, deltas)
        labels = torch.arange(NUM_DETECTIONS, device=deltas.device) % NUM_CLASSES + 1  # 0 is background
        return found, [one.new_ones(len(one)) for one in found], [labels] * len(found)

    rpn.filter_proposals, last.roi.postprocess_detections = filter_proposals, postprocess_detections


@dataclass(frozen=True)
class BackboneStep(Step):
    """A call of the backbone inside a detector."""

    model: Detector

    def outputs(self) -> Sequence[Tensor]:
        """The feature maps."""
        return self.model.features(self.images, None)

    def loss(self) -> Tensor:
        """The mean of the squares of all maps."""
        return torch.stack([one.square().mean() for one in self.outputs()]).sum()

    @property
    def trained(self) -> list[Tensor]:
        """The parameters of the backbone."""
        return list(self.model.features.parameters())


@dataclass(frozen=True)
class DetectorStep(Step):
    """A call of a whole detector: detections, or the losses of random objects and their gradients."""

    model: Detector

    def outputs(self) -> Sequence[Tensor]:
        """The boxes that are detected."""
        return [found.boxes for found in self.model(self.images, None, self._sizes)]

    def loss(self) -> Tensor:
        """The sum of the losses; each call of each model samples the same regions."""
        with seeded(0, self.images.device.type):
            targets = [random_objects(self._sizes[0], self.images.device) for _ in self._sizes]
            return torch.stack(list(self.model(self.images, None, self._sizes, targets).values())).sum()

    @property
    def _sizes(self) -> list[Grid]:
        return [(self.images.shape[2], self.images.shape[3])] * len(self.images)


def same_boxes(number: int, sizes: Sequence[Grid], like: Tensor) -> list[Tensor]:
    """Random boxes (number, 4) of each image, the same in every call."""
    with seeded(1, like.device.type):
        return [random_boxes(number, size).to(like) for size in sizes]


def random_boxes(number: int, size: Grid) -> Tensor:
    """(number, 4), within an image of that (height, width)."""
    limit = torch.tensor([size[1], size[0]])
    corners = torch.rand(number, 2) * 0.5 * limit
    return torch.cat([corners, corners + (0.1 + 0.3 * torch.rand(number, 2)) * limit], dim=1)


def random_objects(size: Grid, device: torch.device) -> dict[str, Tensor]:
    """Objects of an image with random boxes, which their masks fill."""
    boxes = random_boxes(NUM_OBJECTS, size)
    masks = torch.zeros(NUM_OBJECTS, *size, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
        mask[top:bottom, left:right] = 1
    labels = torch.randint(NUM_CLASSES, (NUM_OBJECTS,))
    return {"boxes": boxes.to(device), "labels": labels.to(device), "masks": masks.to(device)}
