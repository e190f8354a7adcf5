"""`polaformer demo operator`: what the operator does, measured on this machine in under two minutes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from polaformer.cli.errors import UsageError
from polaformer.cli.output import figure_title, load, prepare_folder, print_json, steps, threads_text, to_json
from polaformer.extras import require
from polaformer.regular_files import writing

if TYPE_CHECKING:
    from torch import Tensor

    from polaformer.analysis.agreement import Difference
    from polaformer.analysis.sharpness import Sharpness
    from polaformer.analysis.timing import Timing

DTYPES = ("float32", "float64")
MAGNITUDES = (1.0, 1e-20, 1e20)
POWER = 3.0  # of the comparison at these magnitudes: the initial power of a layer
NUM_DIGITS = 32
QUERY = (2, 2)  # row and column of the pixel whose attention is drawn: on the stroke of the first digit
MAX_LENGTH = 32768  # softmax takes time quadratic in it: beyond this a single call outlasts the demo
SHAPE = (2, 4, 128, 32)  # of the comparison with the quadratic form
NUM_HEADS, WIDTH = 8, 32  # of the timings
FORMS = ("ours", "published")
QUERIES_AND_KEYS = (
    f"the first {NUM_DIGITS} handwritten digits of scikit-learn, 8×8 pixels, one token per pixel: its 3×3 neighbourhood, row "
    "and column, each standardised; q and k are two fixed random normal projections of these tokens, not trained (4 heads of "
    "width 32, variance about 1)"
)


class Findings(NamedTuple):
    """Everything that the demo measured."""

    agreement: "dict[str, dict[str, Difference]]"  # by dtype, then by tensor
    safety: "dict[float, dict[str, dict[str, Difference]]]"  # by magnitude, then by form, then by tensor
    images: "Tensor"  # (B, 8, 8)
    sharpness: "list[Sharpness]"
    timings: "dict[int, dict[str, Timing]]"  # by length, then "polarity" and "softmax"
    machine: dict[str, Any]

    def times(self) -> tuple[list[int], dict[str, Sequence[float | None]], dict[str, float | None]]:
        """The lengths, the median seconds at each length by mechanism, and the exponents with which they grow."""
        from polaformer.analysis.timing import slope

        lengths, timings = list(self.timings), self.timings.values()
        seconds: dict[str, Sequence[float | None]] = {
            "polarity attention": [one["polarity"].median for one in timings],
            "scaled_dot_product_attention": [one["softmax"].median for one in timings],
        }
        return lengths, seconds, {name: slope(lengths, medians) for name, medians in seconds.items()}


@dataclass(frozen=True)
class DemoOperator:
    """Show what polarity attention does: exactness, safety, sharpness, and time against length.

    Prints tables, draws two figures (PNG) and writes results.json; takes under a minute on two cores.

    Example: polaformer demo operator --out operator --lengths 256 512 1024 2048
    """

    out: Path = Path("operator")
    """Directory for the figures and results.json; created if it does not exist."""
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    """Numbers of tokens to time attention at; two or more, separated by spaces."""
    seed: int = 0
    """Seed of all random inputs."""
    json: bool = False
    """Print the result as JSON on stdout, and nothing else."""

    def run(self) -> int:
        """Checks the options, measures, draws and prints."""
        self.check()
        require("train", "matplotlib", "sklearn")
        prepare_folder(self.out, "--out")
        with steps(self.plan()) as begin:
            findings = self._measure(begin)
            begin("drawing")
            figures = self._draw(findings)
        self._report(findings, figures)
        return 0

    def check(self) -> None:
        """Raises UsageError for options that make no sense."""
        wrong = [length for length in self.lengths if not 1 <= length <= MAX_LENGTH]
        if wrong:
            raise UsageError(f"--lengths has {wrong[0]}; give integers from 1 to {MAX_LENGTH}")
        if len(set(self.lengths)) < 2:
            given = " ".join(str(length) for length in self.lengths) or "nothing"
            raise UsageError(f"--lengths is {given}; a slope needs at least two different lengths, as in --lengths 256 1024")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed is {self.seed}; give an integer from 0 to 2^63 - 1")

    def plan(self) -> dict[str, float]:
        """The steps and the seconds that each is expected to take on two cores."""
        return (
            {"loading PyTorch": 2.0}
            | {f"agreement in {dtype}": 0.7 for dtype in DTYPES}
            | {f"safety at magnitude {size:g}": 1.2 for size in MAGNITUDES}
            | {"sharpness": 1.0}
            | {f"time at {length} tokens": 0.3 + 5 * (length / 4096) ** 2 for length in sorted(self.lengths)}
            | {"drawing": 2.0}
        )

    def _measure(self, begin: Callable[[str], None]) -> Findings:
        begin("loading PyTorch")
        load("polaformer.analysis.agreement", "polaformer.analysis.timing", "polaformer.ops.polarity.operator")
        load("polaformer.analysis", "sklearn.datasets", "matplotlib.backends.backend_agg")
        agreement, safety = {}, {}
        for dtype in DTYPES:
            begin(f"agreement in {dtype}")
            agreement[dtype] = _agreement("ours", seed=self.seed, dtype=dtype)
        for size in MAGNITUDES:
            begin(f"safety at magnitude {size:g}")
            safety[size] = {form: _agreement(form, seed=self.seed, magnitude=size, power=POWER) for form in FORMS}
        begin("sharpness")
        images, sharpness = _sharpness(self.seed)
        return Findings(agreement, safety, images, sharpness, *self._time(begin))

    def _time(self, begin: Callable[[str], None]) -> "tuple[dict[int, dict[str, Timing]], dict[str, Any]]":
        from polaformer.analysis.machine import described

        timings = {}
        # Several threads wait for each other at every step; a single other program is then enough to spoil the curve.
        with described(threads=1) as machine:
            for length in sorted(set(self.lengths)):
                begin(f"time at {length} tokens")
                timings[length] = time_at(length, seed=self.seed)
        return timings, machine

    def _draw(self, findings: Findings) -> list[Path]:
        from polaformer.analysis import figures

        sharpness, times = self.out / "sharpness.png", self.out / "time.png"
        setting = f"Forward pass, batch 1, {NUM_HEADS} heads of width {WIDTH}, float32, {threads_text(findings.machine)}"
        with writing(f"--out {self.out}"):
            figures.save_sharpness(
                sharpness,
                findings.sharpness,
                findings.images[0],
                query=QUERY,
                title=f"Sharpness of attention between the pixels of {NUM_DIGITS} handwritten digits, random projections",
            )
            figures.save_times(times, *findings.times(), title=figure_title(setting, findings.machine))
        return [sharpness, times]

    def _report(self, findings: Findings, figures: list[Path]) -> None:
        from polaformer.cli import operator_tables

        result = operator_tables.as_record(findings, self.seed) | {"figures": [path.as_posix() for path in figures]}
        results = self.out / "results.json"
        with writing(str(results)):
            results.write_text(to_json(result), encoding="utf-8")
        if self.json:
            print_json(result)
        else:
            operator_tables.show(findings, [*figures, results])


def _agreement(
    form: str, *, seed: int, dtype: str = "float32", magnitude: float = 1.0, power: float | None = None
) -> "dict[str, Difference]":
    """How far a form is from the explicit N×M form in float64."""
    import torch

    from polaformer.analysis.agreement import differences, random_inputs
    from polaformer.ops.polarity import reference
    from polaformer.ops.polarity.operator import polarity_attention

    inputs = random_inputs(SHAPE, dtype=getattr(torch, dtype), seed=seed, magnitude=magnitude, power=power)
    attention = polarity_attention if form == "ours" else reference.published_polarity_attention
    return differences(attention, reference.polarity_attention, inputs)


def time_at(length: int, *, rounds: int = 15, seconds: float = 6.0, seed: int = 0) -> "dict[str, Timing]":
    """One forward pass of "polarity" attention and one of "softmax" (SDPA), interleaved, batch 1, fp32."""
    import torch
    import torch.nn.functional as F

    from polaformer.analysis.agreement import random_inputs
    from polaformer.analysis.timing import measure
    from polaformer.ops.polarity.operator import polarity_attention

    q, k, v, power, _ = random_inputs((1, NUM_HEADS, length, WIDTH), seed=seed)
    calls = {"polarity": lambda: polarity_attention(q, k, v, power), "softmax": lambda: F.scaled_dot_product_attention(q, k, v)}
    with torch.inference_mode():
        return measure(calls, baseline="softmax", rounds=rounds, seconds=seconds)


def _sharpness(seed: int) -> "tuple[Tensor, list[Sharpness]]":
    from polaformer.analysis.sharpness import compare, digit_images, pixel_tokens, random_queries_and_keys

    images = digit_images(NUM_DIGITS)
    return images, compare(*random_queries_and_keys(pixel_tokens(images), seed=seed))
