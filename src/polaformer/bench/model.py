"""Whole models: images per second of ours, of the same model computed as published, of its softmax twin and of timm's.

# B batch
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.analysis.call_memory import saved_bytes
from polaformer.analysis.timing import quickest
from polaformer.attention import PolaAttention
from polaformer.attention.layer.gate import LinearGate
from polaformer.attention.layer.published_layer import as_published
from polaformer.backbones import Backbone, create_model
from polaformer.backbones.registry import softmax_twin
from polaformer.bench.contenders import COMPILED, compiled, noting_failure
from polaformer.bench.runner import BenchSettings, Cost, Measurement, seeded, time_in_turns

OURS, PUBLISHED, TWIN = "ours", "published form", "softmax twin"
LOGITS_TOLERANCE = 1e-4  # ours and the published form add in different orders, layer after layer
GRADIENTS_TOLERANCE = 1e-3
# Of the record of a row, besides the error of the logits: attributes of a Measurement.
KEYS = ("correct", "skipped", "gradients_error", "images_per_second", "saved_bytes", "timing", "speedup", "saved_ratio")
WHILE_BACKWARD = 1.5  # the peak of a training step relative to what is saved for backward, about

# timm's model of the same family and size; it has no PVT of the first version, and Swin at 384 pixels only as base.
TIMM = {f"swin_{size}": f"swin_{size}_patch4_window7_224" for size in ("tiny", "small", "base")}
TIMM |= {"swin_base_384": "swin_base_patch4_window12_384"}
TIMM |= {f"deit_{size}": f"deit_{size}_patch16_224" for size in ("tiny", "small", "base")}
TIMM |= {f"pvt_v2_b{number}": f"pvt_v2_b{number}" for number in range(6)}


def benchmark(
    size: int, name: str, settings: BenchSettings, *, with_compiled: bool = False, **options: Any
) -> tuple[dict[str, Measurement], list[str]]:
    """Rows of ours and its rivals, in float32, and notes: inference, or a training step (forward and backward).

    Checks that ours agrees with the same parameters computed as published, forecasts, and times all interleaved. options are
    further arguments of `create_model` for our models.
    """
    models = build(name, size, device=settings.device, **options)
    channels, generator = cast(Backbone, models[OURS]).in_chans, torch.Generator().manual_seed(0)
    images = torch.randn(settings.batch, channels, size, size, generator=generator).to(settings.device)
    steps = {key: Step(model.train(settings.backward), images, settings.backward) for key, model in models.items()}
    return compare(steps, settings, with_compiled=with_compiled)


def compare(
    steps: "dict[str, Step]", settings: BenchSettings, *, with_compiled: bool = False, checked: "Sequence[Step]" = ()
) -> tuple[dict[str, Measurement], list[str]]:
    """The rows of the steps, and notes: check, forecast, time all of them interleaved.

    checked: steps of ours and of the published form to compare instead of those that are timed.
    """
    blank = Measurement(work=settings.batch, tolerances=(LOGITS_TOLERANCE, GRADIENTS_TOLERANCE))
    notes, rows = list[str](), dict.fromkeys(steps, blank)
    pair = [replace(one, images=one.images[:2]) for one in checked or (steps[OURS], steps[PUBLISHED])]
    rows[OURS] = check(check(blank, *pair), *(replace(step, train=False) for step in pair))
    rows = {key: replace(row, skipped=forecast(steps[key], settings)) for key, row in rows.items()}
    if with_compiled and rows[PUBLISHED].skipped is None:
        steps[COMPILED] = step = replace(steps[PUBLISHED], model=cast(nn.Module, compiled(steps[PUBLISHED].model)))
        with noting_failure(COMPILED, notes):
            step()  # compiles
            rows[COMPILED] = check(rows[PUBLISHED], step, steps[PUBLISHED])  # as it is timed: others would compile again
    calls = {key: steps[key] for key, row in rows.items() if row.correct and row.skipped is None}
    for key, step in calls.items() if settings.backward else ():
        rows[key] = replace(rows[key], sizes={"saved": step.saved_bytes()})
    return time_in_turns({0: calls}, {0: rows}, OURS, settings, inverse=True)[0], notes


def check(row: Measurement, step: "Step", published: "Step") -> Measurement:
    """The row with how far the logits, or in a training step the gradients, are from those computed as published."""
    error = _relative(step(), published())
    return replace(row, gradients_error=error) if step.train else replace(row, error=error)


def as_record(row: Measurement) -> dict[str, Any]:
    """The row for JSON; ratios are those of ours to it, or of its time to that of ours."""
    return {"logits_error": row.error, **row.as_record(*KEYS)}


def forecast(step: "Step", settings: BenchSettings) -> str | None:
    """Why the step is not worth trying, judging by one image: too long or too much memory; None if it is."""
    one, batch = replace(step, images=step.images[:1]), len(step.images)
    needed = WHILE_BACKWARD * one.saved_bytes() if step.train else 0
    return Cost(1, quickest(one, settings.seconds / batch), needed).skip_reason(batch, batch, settings)


def build(name: str, size: int, *, device: str = "cpu", **options: Any) -> dict[str, nn.Module]:
    """Ours, the same computed as published, its softmax twin, and timm's if there is one; with random parameters.

    Without drop path, so that every call computes the same. Our attention is made to matter: with the usual initialisation it
    adds so little to the logits that an error in it would not show.
    """
    with seeded(0, "cpu"):
        ours = create_model(name, img_size=size, drop_path_rate=0.0, **options)
        make_attention_matter(ours)
        models = {OURS: ours, PUBLISHED: as_published(ours)}
        models[TWIN] = create_model(softmax_twin(name), img_size=size, drop_path_rate=0.0, **options)
        rival = TIMM.get(name.removeprefix("pola_"))
        if rival is not None:
            sized = {} if rival.startswith("pvt") else {"img_size": size}
            models[f"timm {rival}"] = timm.create_model(rival, pretrained=False, **sized)
    return {key: model.to(device) for key, model in models.items()}


@dataclass(frozen=True)
class Step:
    """A call without arguments: inference, or forward and backward."""

    model: nn.Module
    images: Tensor
    train: bool

    def __call__(self) -> Sequence[Tensor]:
        """The logits, or the gradients of all trained parameters."""
        if not self.train:
            with torch.inference_mode():
                return self.outputs()
        return torch.autograd.grad(self.loss(), self.trained, materialize_grads=True)

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that get gradients."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def outputs(self) -> Sequence[Tensor]:
        """What the model computes for the images."""
        return [self.model(self.images)]

    def loss(self) -> Tensor:
        """The cross-entropy as if all images were of the first class."""
        logits = self.model(self.images)
        return F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.long))

    def saved_bytes(self) -> int:
        """Bytes saved for the backward pass, without the weights, which stay anyway."""
        return saved_bytes(self.loss, apart_from=self.model.parameters())


def _relative(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The difference of all tensors together, relative to the norm of what is expected."""
    difference = torch.stack([(x - y).norm() for x, y in zip(found, expected, strict=True)]).norm()
    return float(difference / torch.stack([y.norm() for y in expected]).norm())


def make_attention_matter(model: nn.Module) -> None:
    """Uses projections that preserve the norm, and small random numbers for parameters that start from zero."""
    for layer in (module for module in model.modules() if isinstance(module, PolaAttention)):
        for projection in (layer.qkv, layer.proj, layer.gate):
            if isinstance(projection, nn.Linear | LinearGate):
                nn.init.normal_(projection.weight, std=layer.dim**-0.5)
        table = None if layer.key_positions is None else layer.key_positions.rows
        for parameter in (layer.core.power, layer.core.scale, table):
            if parameter is not None:
                nn.init.normal_(parameter, std=0.1)
