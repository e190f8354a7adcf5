"""Whole models: images per second of ours, of the same model computed as published, of its softmax twin and of timm's.

# B batch
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.attention import PolaAttention
from polaformer.attention.layer.gate import LinearGate
from polaformer.backbones import Backbone, create_model
from polaformer.bench.contenders import compiled
from polaformer.bench.forecast import quickest
from polaformer.bench.measure import Ratio, Timing, measure, noise, slowdown, speedup_record
from polaformer.bench.memory import available_bytes, saved_bytes
from polaformer.bench.op import cannot_compile
from polaformer.bench.published_layer import as_published

OURS, PUBLISHED, COMPILED, TWIN = "ours", "published form", "published, torch.compile", "softmax twin"
LOGITS_TOLERANCE = 1e-4  # ours and the published form add in different orders, layer after layer
GRADIENTS_TOLERANCE = 1e-3
WHILE_BACKWARD = 1.5  # the peak of a training step in what is saved for backward, about

# timm's model of the same family and size; it has no PVT of the first version, and Swin at 384 pixels for base alone.
TIMM = {f"swin_{size}": f"swin_{size}_patch4_window7_224" for size in ("tiny", "small", "base")}
TIMM |= {"swin_base_384": "swin_base_patch4_window12_384"}
TIMM |= {f"deit_{size}": f"deit_{size}_patch16_224" for size in ("tiny", "small", "base")}
TIMM |= {f"pvt_v2_b{number}": f"pvt_v2_b{number}" for number in range(6)}


@dataclass(frozen=True)
class ModelRow:
    """What was measured of one model at one size of image."""

    batch: int
    timing: Timing | None = None  # None where it is incorrect or was skipped
    skipped: str | None = None  # why it was not timed although nothing is wrong with it
    logits_error: float | None = None  # of ours and of what is compiled: relative difference from the published form …
    gradients_error: float | None = None  # … and that of the gradients of all parameters together, in a training step
    saved_bytes: int | None = None
    is_correct: bool = True

    @property
    def images_per_second(self) -> float | None:
        """By the median."""
        median = None if self.timing is None else self.timing.median
        return self.batch / median if median else None

    def as_record(self) -> dict[str, Any]:
        """For JSON."""
        record: dict[str, Any] = {"correct": self.is_correct, "skipped": self.skipped}
        record |= {"logits_error": self.logits_error, "gradients_error": self.gradients_error}
        record |= {"images_per_second": self.images_per_second, "saved_bytes": self.saved_bytes}
        return record | ({} if self.timing is None else self.timing.as_record())


class ModelResult(NamedTuple):
    """Everything measured of one model at one size."""

    rows: dict[str, ModelRow]
    notes: list[str]

    def speedup(self, name: str) -> Ratio | None:
        """How many times longer a rival takes than ours, from the rounds of its timing."""
        rival, ours = self.rows[name].timing, self.rows[OURS].timing
        return slowdown(rival, ours) if rival and ours else None

    def saved_ratio(self, name: str) -> float | None:
        """What ours saves for backward, in what the rival saves."""
        rival, ours = self.rows[name].saved_bytes, self.rows[OURS].saved_bytes
        return ours / rival if rival and ours else None

    def as_record(self) -> dict[str, Any]:
        """For JSON."""
        ratios = {name: speedup_record(self.speedup(name)) | {"saved_ratio": self.saved_ratio(name)} for name in self.rows}
        return {"rows": {name: row.as_record() | ratios[name] for name, row in self.rows.items()}, "notes": self.notes}


def benchmark(
    name: str,
    *,
    size: int = 224,
    batch: int = 4,
    train: bool = False,
    with_compiled: bool = False,
    rounds: int = 9,
    seconds: float = 40.0,
    device: str = "cpu",
    on_call: Callable[[str], None] | None = None,
    **options: Any,
) -> ModelResult:
    """Ours against its rivals in turns, in float32: inference, or a training step (forward and backward).

    Correctness first: ours must agree with the same parameters computed as published. What would take longer than `seconds`
    for one call, or more memory than is free, is skipped with the reason; so are all if the machine is too noisy. rounds,
    seconds and on_call are those of `measure`; options are further arguments of `create_model`, given to our models.
    """
    models = build(name, size, device=device, **options)
    pictures = random_images(batch, size, models[OURS], device)
    steps = {key: Step(model.train(train), pictures, train) for key, model in models.items()}
    rows = {key: ModelRow(batch, skipped=why_not(step, seconds)) for key, step in steps.items()}
    notes: list[str] = []
    if with_compiled and rows[PUBLISHED].skipped is None:
        notes += _add_compiled(steps, rows)
    rows[OURS] = _checked(rows[OURS], steps[OURS].of(2), steps[PUBLISHED].of(2))
    if COMPILED in rows:  # as it is timed: anything else would be compiled anew
        rows[COMPILED] = _checked(rows[COMPILED], steps[COMPILED], steps[PUBLISHED], logits_too=not train)
    calls = {key: step for key, step in steps.items() if rows[key].is_correct and rows[key].skipped is None}
    saved = {key: step.saved_bytes() for key, step in calls.items()} if train else {}
    timings = measure(calls, baseline=OURS, rounds=rounds, seconds=seconds, on_call=on_call) if calls else {}
    rows = {key: replace(row, timing=timings.get(key), saved_bytes=saved.get(key)) for key, row in rows.items()}
    rows |= {key: replace(rows[key], timing=None, skipped=reason) for key, reason in noise(timings, OURS).items()}
    return ModelResult(rows, notes)


def build(name: str, size: int, *, device: str = "cpu", seed: int = 0, **options: Any) -> dict[str, nn.Module]:
    """Ours, the same computed as published, its softmax twin, and timm's where there is one; random parameters.

    Without drop path, so that all compute the same at every call. Attention of ours is made to matter: as models are
    initialised it adds so little to the logits that a wrong one would not show.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ours = create_model(name, img_size=size, drop_path_rate=0.0, **options)
        _make_attention_matter(ours)
        models = {OURS: ours, PUBLISHED: as_published(ours)}
        models[TWIN] = create_model(name.replace("pola_", "softmax_"), img_size=size, drop_path_rate=0.0, **options)
        rival = TIMM.get(name.removeprefix("pola_"))
        if rival is not None:
            sized = {} if rival.startswith("pvt") else {"img_size": size}
            models[f"timm {rival}"] = timm.create_model(rival, pretrained=False, **sized)
    return {key: model.to(device) for key, model in models.items()}


def random_images(batch: int, size: int, model: nn.Module, device: str = "cpu") -> Tensor:
    """Normal pixels (B, channels, size, size), the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, cast(Backbone, model).in_chans, size, size, generator=generator).to(device)


@dataclass(frozen=True)
class Step:
    """A call without arguments: inference, or forward and backward."""

    model: nn.Module
    images: Tensor
    train: bool

    def __call__(self) -> object:
        """The logits, or the gradients of all parameters."""
        return self.gradients() if self.train else self.logits()

    def logits(self) -> Tensor:
        """Of all images, without what a derivative would need."""
        with torch.inference_mode():
            return self.model(self.images)

    def loss(self) -> Tensor:
        """As if all images were of the first class."""
        logits = self.model(self.images)
        return F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.long))

    def gradients(self) -> Sequence[Tensor]:
        """Of all parameters that are trained."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return torch.autograd.grad(self.loss(), trained, materialize_grads=True)

    def saved_bytes(self) -> int:
        """Kept for the backward pass, apart from the weights, which stay anyway."""
        return saved_bytes(self.loss, apart_from=self.model.parameters())

    def of(self, number: int) -> "Step":
        """The same with the first so many images alone."""
        return replace(self, images=self.images[:number])


def why_not(step: Step, seconds: float) -> str | None:
    """Why one call would take longer than `seconds` or more memory than is free, from a call with one image; None if not."""
    one, batch = step.of(1), len(step.images)
    needed = int(WHILE_BACKWARD * batch * one.saved_bytes()) if step.train else 0
    there_is = available_bytes()
    if there_is is not None and needed > there_is:
        return f"would need about {needed / 1e9:.0f} GB of memory, {there_is / 1e9:.0f} GB are free"
    expected = batch * quickest(one, seconds / batch)
    return f"would take about {expected:.2g} s" if expected > seconds else None


def _add_compiled(steps: dict[str, Step], rows: dict[str, ModelRow]) -> list[str]:
    """Adds the compiled form after the published one, compiled already; a line instead if that fails."""
    step = replace(steps[PUBLISHED], model=cast(nn.Module, compiled(steps[PUBLISHED].model)))
    try:
        step()
    except RuntimeError as error:
        return [cannot_compile(COMPILED, error)]
    steps[COMPILED], rows[COMPILED] = step, ModelRow(len(step.images))
    return []


def _checked(row: ModelRow, step: Step, published: Step, *, logits_too: bool = True) -> ModelRow:
    """The row with how far the model is from the published form."""
    logits = _relative([step.logits()], [published.logits()]) if logits_too else None
    gradients = _relative(step.gradients(), published.gradients()) if step.train else None
    found = ((logits, LOGITS_TOLERANCE), (gradients, GRADIENTS_TOLERANCE))
    # Written so that NaN does not pass.
    is_correct = all(error is None or error <= tolerance for error, tolerance in found)
    return replace(row, logits_error=logits, gradients_error=gradients, is_correct=is_correct)


def _relative(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The difference of all tensors together, relative to the size of the truth."""
    difference = torch.stack([(x - y).norm() for x, y in zip(found, truth, strict=True)]).norm()
    return float(difference / torch.stack([y.norm() for y in truth]).norm())


def _make_attention_matter(model: nn.Module) -> None:
    """Projections that keep the size of what they project, and small random numbers where parameters start from zero."""
    for layer in (module for module in model.modules() if isinstance(module, PolaAttention)):
        for projection in (layer.qkv, layer.proj, layer.gate):
            if isinstance(projection, nn.Linear | LinearGate):
                nn.init.normal_(projection.weight, std=layer.dim**-0.5)
        table = None if layer.key_positions is None else layer.key_positions.rows
        for parameter in (layer.core.power, layer.core.scale, table):
            if parameter is not None:
                nn.init.normal_(parameter, std=0.1)
