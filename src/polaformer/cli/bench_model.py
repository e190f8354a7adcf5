"""`polaformer bench model`: images per second of whole models, as ratios first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from polaformer.cli.bench_options import Bench, Report, Rounds
from polaformer.cli.bench_tables import IN_BRACKETS, mebibytes, milliseconds, number, ratio_text, skipped_text, table
from polaformer.cli.errors import UsageError
from polaformer.cli.output import busy_lines, counted, load, machine_lines, threads_text
from polaformer.errors import nearest

if TYPE_CHECKING:
    from polaformer.bench.model import ModelResult, ModelRow

    Found = dict[tuple[str, int], ModelResult]  # by model and image size

SMALLEST, LARGEST = 32, 4096  # sides of an image in pixels
ROWS = 4  # ours, the published form, the softmax twin, timm's
STEPS = {"inference": "inference", "train": "training step (forward and backward)"}
NOTE = "Parameters and images are random (seed 0), including our powers, scales and tables; no drop path."


@dataclass(frozen=True)
class Models:
    """The options of what is compared."""

    models: tuple[str, ...] = ("pola_swin_tiny", "pola_pvt_tiny", "pola_deit_tiny")
    """Names of our models, separated by spaces; `polaformer models "pola_*"` lists them."""
    sizes: tuple[int, ...] = (224,)
    """Sides of the square images in pixels; a model is built for the size that it is timed at."""
    batch: int = 4
    """Images per batch."""
    compile: bool = False
    """Also time torch.compile of the published form; compiling takes a minute or more per model and is not timed."""


@dataclass(frozen=True)
class BenchModel(Bench, Rounds, Models):
    """Time whole models against their published form, their softmax twins and timm's.

    All of them take turns in one run, in float32. Ours is timed only if it agrees with the same parameters computed by the
    authors' steps: logits and, in a training step, gradients; if it does not, the exit code is 1. A model whose rounds disagree
    too much gets no numbers, and the exit code is 75.

    Example: polaformer bench model --models pola_swin_tiny pola_pvt_tiny --sizes 224 448 --figure images.png
    """

    mode: Literal["inference", "train"] = "inference"
    """Inference alone, or a training step: forward and backward."""
    rounds: int = 9
    seconds: float = 40.0
    """Time per model and size: slow models get fewer rounds, and one that takes longer for a single call is skipped."""
    figure: Path | None = None
    """PNG file to draw images per second against size in; needs two or more --sizes."""

    def measure(self) -> Report:
        """Check the options and measure."""
        self.check()
        load("polaformer.bench.model")
        self.check_device()
        from polaformer.bench.machine import described
        from polaformer.bench.model import benchmark
        from polaformer.bench.runner import Settings

        cases = [(name, size) for name in dict.fromkeys(self.models) for size in sorted(set(self.sizes))]
        settings = Settings(self.mode == "train", self.rounds, self.seconds, self.device)
        options: dict[str, Any] = {"batch": self.batch, "with_compiled": self.compile}
        found: Found = {}
        calls = (ROWS + self.compile) * (self.rounds + 2)
        with described(self.threads) as machine, counted(calls, len(cases)) as begin:
            for name, size in cases:
                announced = replace(settings, on_call=begin(f"{name}, {size} pixels"))
                found[name, size] = benchmark(name, announced, size=size, **options)
        setting = f"{STEPS[self.mode]}, batch {self.batch}, float32, {threads_text(machine)}"
        record: dict[str, Any] = {"command": "bench model", "mode": self.mode, "batch": self.batch, "device": self.device}
        models = [{"model": name, "size": size} | result.as_record() for (name, size), result in found.items()]
        tables = [_ratios(found, setting), *(_absolutes(*case, found[case], setting) for case in cases)]
        notes = dict.fromkeys(note for result in found.values() for note in result.notes)
        record |= {"parameters": NOTE, "machine": machine, "models": models}
        shown: list[Table | str] = [*tables, *machine_lines(machine), NOTE, *notes]
        skipped = {f"{name}, {size} pixels": [row.skipped for row in one.rows.values()] for (name, size), one in found.items()}
        correct = all(row.is_correct for result in found.values() for row in result.rows.values())
        title = "\n".join([setting.capitalize(), *busy_lines(machine)])
        return Report(record, shown, lambda path: _draw(path, found, title), correct, skipped)

    def check(self) -> None:
        """Raise UsageError for options that make no sense."""
        needs = "draws images per second against size; give two or more --sizes, for instance --sizes 224 448 896"
        wrong = [size for size in self.sizes if not SMALLEST <= size <= LARGEST or size % 32]
        if wrong or not self.sizes:
            given = f"has {wrong[0]}" if wrong else "is empty"
            raise UsageError(f"--sizes {given}; give multiples of 32 from {SMALLEST} to {LARGEST}, as in --sizes 224 448")
        if self.batch < 1:
            raise UsageError(f"--batch is {self.batch}; give at least 1")
        load("polaformer.backbones")
        from polaformer.backbones import list_models

        known = list_models("pola_*")
        unknown = [name for name in self.models if name not in known]
        if unknown or not self.models:
            given = f"has {unknown[0]!r}; {nearest(unknown[0], known)}" if unknown else "is empty; "
            raise UsageError(f'--models {given}give names that `polaformer models "pola_*"` lists')
        self.check_common(self.rounds, figure_needs=None if len(set(self.sizes)) > 1 else needs)


def _draw(path: Path, found: "Found", title: str) -> None:
    from polaformer.analysis.bench_figures import save_images_per_second

    panels: dict[str, dict[str, dict[int, float | None]]] = {}
    for (name, size), result in found.items():
        for key, row in result.rows.items():
            panels.setdefault(name, {}).setdefault(_kind(key), {})[size] = row.images_per_second
    save_images_per_second(path, panels, title=title)


def _ratios(found: "Found", setting: str) -> Table:
    """How much faster ours is than each, a row per model and size."""
    labels = list(dict.fromkeys(_kind(key) for result in found.values() for key in result.rows if key != "ours"))
    with_saved = any(row.saved_bytes for result in found.values() for row in result.rows.values())
    columns = [*labels, *(f"bytes:\n{label}" for label in labels if with_saved)]
    caption = f"how many times longer the other takes: more than 1, ours is faster; {IN_BRACKETS}"
    caption += "; bytes: what ours saves for backward (without weights) relative to the other" if with_saved else ""
    rows = {}
    for (name, size), result in found.items():
        keys = {_kind(key): key for key in result.rows}
        saved = [number(result.saved_ratio(keys[label]) if label in keys else None) for label in labels if with_saved]
        rows[f"{name}, {size}"] = [*(_ratio(result, keys.get(label)) for label in labels), *saved]
    return table(f"Speed of ours relative to each, {setting}", columns, rows, first="model, pixels", caption=caption)


def _absolutes(name: str, size: int, result: "ModelResult", setting: str) -> Table:
    with_saved = any(row.saved_bytes for row in result.rows.values())
    columns = ["images/s", "median (ms)", "best (ms)", "rounds", "against published", *["saved (MiB)"] * with_saved]
    caption = "against published: relative difference of the logits" + (", of all gradients" if with_saved else "")
    rows = {}
    for key, row in result.rows.items():
        errors = ", ".join(f"{error:.1e}" for error in (row.logits_error, row.gradients_error) if error is not None)
        rows[key] = [*_times(row), errors, *[mebibytes(row.saved_bytes)] * with_saved]
    return table(f"{name} at {size} pixels, {setting}", columns, rows, caption=caption)


def _ratio(result: "ModelResult", key: str | None) -> str:
    if key is None:
        return "none"
    rows = [result.rows["ours"], result.rows[key]]
    if not all(row.is_correct for row in rows):
        return "incorrect"
    reason = next((row.skipped for row in rows if row.skipped), None)
    return skipped_text(reason) if reason else ratio_text(result.speedup(key), "skipped")


def _times(row: "ModelRow") -> Sequence[str]:
    if not row.is_correct:
        return "incorrect", "", "", ""
    if row.skipped is not None:
        return skipped_text(row.skipped), "", "", "0"
    return number(row.images_per_second) or "skipped", *milliseconds(row.timing)


def _kind(key: str) -> str:
    return "timm's" if key.startswith("timm ") else key
