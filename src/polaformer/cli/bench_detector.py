"""`polaformer bench detector`: a detector at high resolution, as ratios first."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from polaformer.cli.bench_model import Case, OfModels, check_sides
from polaformer.tasks.detection.detector_facts import DetectorName


@dataclass(frozen=True)
class BenchDetector(OfModels):
    """Time detectors with our backbones against their published form and their softmax twins.

    The backbone inside the detector and the whole detector are timed, each with its rivals interleaved in one run, in float32,
    on images without padding. What the backbone computes, and in a training step its gradients, must agree with the authors'
    computation on the same parameters; if they do not, the exit code is 1. If the rounds vary too much, a table has no
    numbers, and the exit code is 75.

    Example: polaformer bench detector --mode train --threads 1

    Example: polaformer bench detector --detector retinanet --models pola_pvt_small --size 640 960
    """

    detector: DetectorName = "mask-rcnn"
    """The detector around the backbones."""
    models: tuple[str, ...] = ("pola_pvt_tiny",)
    """Names of our backbones, separated by spaces; `polaformer models "pola_[ps]*"` lists them."""
    size: tuple[int, int] = (800, 1216)
    """Height and width of the images in pixels, multiples of 32."""
    batch: int = 1
    rounds: int = 7
    seconds: float = 120.0
    """Seconds per model and part: slow calls get fewer rounds, and a single call that takes longer is skipped."""
    figure: ClassVar[Path | None] = None  # type: ignore[misc]  # nothing is drawn, so there is no such option
    command = "bench detector"
    note = f"{OfModels.note} All get the same random objects, regions and detections; agreement is checked for the backbone."

    def cases(self) -> list[Case]:
        """Every backbone, inside the detector and with all of it."""
        check_sides("--size", self.size, "800 1216")
        self.check_common()
        self.load("polaformer.bench.detector")
        from polaformer.backbones import list_models
        from polaformer.bench.detector import PARTS, benchmark

        self.check_models(list_models("pola_[ps]*"), 'polaformer models "pola_[ps]*"')
        pixels, about = "×".join(map(str, self.size)), {"detector": self.detector, "size": self.size}
        return [
            Case(f"{self.detector} with {name}, {text}", pixels, about | {"model": name, "part": part}, job)
            for name in dict.fromkeys(self.models)
            for part, text in PARTS.items()
            for job in [partial(benchmark, part, self.detector, name, self.size)]
        ]
