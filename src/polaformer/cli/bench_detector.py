"""`polaformer bench detector`: a detector at high resolution, as ratios first."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from polaformer.cli.bench_model import STEPS, tables
from polaformer.cli.bench_options import Report, Timed, records
from polaformer.cli.errors import UsageError
from polaformer.cli.output import machine_lines, threads_text
from polaformer.errors import nearest

NOTE = (
    "Parameters, images, objects and regions are random, the regions the same for all; no drop path. Agreement is checked for "
    "the backbone."
)
MAX_SIDE = 4096


@dataclass(frozen=True)
class BenchDetector(Timed):
    """Time detectors around our backbones against their published form and their softmax twins.

    The backbone inside the detector and the whole detector are timed, each with its rivals interleaved in one run, in float32,
    on images without padding. What the backbone computes, and in a training step its gradients, must agree with the authors'
    computation on the same parameters; if they do not, the exit code is 1. If the rounds vary too much, a table has no
    numbers, and the exit code is 75.

    Example: polaformer bench detector --mode train --threads 1

    Example: polaformer bench detector --detector retinanet --models pola_pvt_small --size 640 960
    """

    detector: Literal["retinanet", "mask-rcnn", "cascade-mask-rcnn"] = "mask-rcnn"
    """The detector around the backbones."""
    models: tuple[str, ...] = ("pola_pvt_tiny",)
    """Names of our backbones, separated by spaces; `polaformer models "pola_p*"` lists them."""
    size: tuple[int, int] = (800, 1216)
    """Height and width of the images in pixels, multiples of 32."""
    batch: int = 1
    """Images per batch."""
    mode: Literal["inference", "train"] = "inference"
    """Inference alone, or a training step: forward and backward."""
    rounds: int = 7
    seconds: float = 120.0
    """Time per model and part: slow ones get fewer rounds, and one that takes longer for a single call is skipped."""
    figure: Path | None = None
    """Not supported by this benchmark; leave it out."""

    def measure(self) -> Report:
        """Checks the options and measures."""
        self.check()
        from polaformer.bench.detector import Part, benchmark

        parts: tuple[Part, Part] = ("backbone", "detector")
        cases = [(part, name) for name in dict.fromkeys(self.models) for part in parts]
        jobs = {f"{name}, {part}": partial(benchmark, part, self.detector, name, self.size) for part, name in cases}
        results, machine = self.time(jobs, 3 * (self.rounds + 2), batch=self.batch)
        pixels = "×".join(map(str, self.size))
        setting = f"{STEPS[self.mode]}, batch {self.batch}, float32, {threads_text(machine)}"
        record: dict[str, Any] = {"command": "bench detector", "mode": self.mode, "batch": self.batch, "device": self.device}
        record |= {"detector": self.detector, "size": list(self.size), "parameters": NOTE, "machine": machine}
        rows = {case: found for case, (found, _) in zip(cases, results.values(), strict=True)}
        record["models"] = [{"model": name, "part": part, "rows": records(found)} for (part, name), found in rows.items()]
        titled = {
            (f"{self.detector} with {name}, {'its backbone' if part == 'backbone' else 'whole'}", pixels): found
            for (part, name), found in rows.items()
        }
        shown = [*tables(titled, setting), *machine_lines(machine), NOTE]
        return Report(record, shown, lambda _: None, dict(zip(jobs, rows.values(), strict=True)))

    def check(self) -> None:
        """Raises UsageError for options that make no sense."""
        wrong = [side for side in self.size if not 32 <= side <= MAX_SIDE or side % 32]
        if wrong:
            raise UsageError(f"--size has {wrong[0]}; give multiples of 32 up to {MAX_SIDE}, as in --size 800 1216")
        if self.batch < 1:
            raise UsageError(f"--batch is {self.batch}; give at least 1")
        self.check_common("is not drawn by this command; leave it out")
        self.load("polaformer.bench.detector")
        from polaformer.backbones import list_models

        known = [name for name in list_models("pola_*") if "deit" not in name]
        unknown = [name for name in self.models if name not in known]
        if unknown or not self.models:
            given = f"has {unknown[0]!r}; {nearest(unknown[0], known)}" if unknown else "is empty; "
            raise UsageError(f"--models {given}choose from {', '.join(known)}")
