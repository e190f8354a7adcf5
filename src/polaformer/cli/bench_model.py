"""`polaformer bench model`: images per second of whole models, as ratios first."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from polaformer.cli import bench_options as options
from polaformer.cli.bench_tables import IN_BRACKETS, MEBI, exit_code, milliseconds, number, ratio_text, skipped_text
from polaformer.cli.errors import UsageError
from polaformer.cli.output import (
    busy_lines,
    counted,
    load,
    machine_lines,
    new_table,
    print_all,
    print_json,
    threads_text,
)
from polaformer.errors import nearest
from polaformer.regular_files import writing

if TYPE_CHECKING:
    from polaformer.bench.model import ModelResult, ModelRow

    Found = dict[tuple[str, int], ModelResult]  # by model and size of image

SMALLEST, LARGEST = 32, 4096  # sides of an image in pixels
ROWS = 4  # ours, the published form, the softmax twin, timm's
STEPS = {"inference": "inference", "train": "training step (forward and backward)"}
NOTE = "Parameters and images are random (seed 0), powers, scales and tables of ours among them; no drop path."


@dataclass(frozen=True)
class BenchModel:
    """Time whole models against the published form of them, their softmax twins and timm's.

    In turns, in one run, in float32. Ours is timed only if it agrees with the same parameters computed as the authors' code
    does, logits and, in a training step, gradients; if it does not, the exit code is 1. A model whose rounds disagree too much
    gets no number, and the exit code is 75.

    Example: polaformer bench model --models pola_swin_tiny pola_pvt_tiny --sizes 224 448 --figure images.png
    """

    models: tuple[str, ...] = ("pola_swin_tiny", "pola_pvt_tiny", "pola_deit_tiny")
    """Names of our models, with spaces between them; `polaformer models "pola_*"` lists them."""
    sizes: tuple[int, ...] = (224,)
    """Sides of the square images in pixels; models are made for the size that they are timed at."""
    batch: int = 4
    """Images in a batch."""
    mode: Literal["inference", "train"] = "inference"
    """Inference alone, or a training step: forward and backward."""
    compile: bool = False
    """Also time torch.compile of the published form; compiling takes a minute or more for a model and is not timed."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to compute."""
    rounds: int = 9
    """How often each is timed, at most."""
    seconds: float = 40.0
    """Time for each model and size: the slow get fewer rounds, and what takes longer for a single call is skipped."""
    threads: int | None = None
    """How many threads torch may use; its own choice unless given."""
    figure: Path | None = None
    """PNG file to draw images per second against size in; needs two or more --sizes."""
    json: bool = False
    """Print the result as JSON on stdout and nothing else there."""

    def run(self) -> int:
        """Checks the options, measures, prints."""
        self.check()
        load("polaformer.bench.model")
        options.check_device(self.device)
        from polaformer.bench.machine import described

        with described(self.threads) as machine:
            found = self._measure()
        if self.figure is not None:
            self._draw(found, machine)
        if self.json:
            print_json(self._record(found, machine))
        else:
            self._show(found, machine)
        rows = {f"{name}, {size} pixels": result.rows.values() for (name, size), result in found.items()}
        reasons = {where: [row.skipped for row in some] for where, some in rows.items()}
        return exit_code(reasons, correct=all(row.is_correct for some in rows.values() for row in some))

    def check(self) -> None:
        """Raises UsageError for options that make no sense."""
        options.check_repeats(self.rounds, self.seconds)
        options.check_threads(self.threads)
        if self.batch < 1:
            raise UsageError(f"--batch is {self.batch}; give at least 1")
        wrong = [size for size in self.sizes if not SMALLEST <= size <= LARGEST or size % 32]
        if wrong or not self.sizes:
            given = f"has {wrong[0]}" if wrong else "is empty"
            raise UsageError(f"--sizes {given}; give multiples of 32 from {SMALLEST} to {LARGEST}, as in --sizes 224 448")
        self._check_names()
        needs = "draws images per second against size; give two or more --sizes, for instance --sizes 224 448 896"
        options.check_figure(self.figure, possible=len(set(self.sizes)) > 1, needs=needs)

    def _check_names(self) -> None:
        load("polaformer.backbones")
        from polaformer.backbones import list_models

        known = list_models("pola_*")
        unknown = [name for name in self.models if name not in known]
        if unknown or not self.models:
            given = f"has {unknown[0]!r}" if unknown else "is empty"
            hint = nearest(unknown[0], known) if unknown else ""
            raise UsageError(f'--models {given}; {hint}give names that `polaformer models "pola_*"` lists')

    def _measure(self) -> "Found":
        from polaformer.bench.model import benchmark

        cases = [(name, size) for name in dict.fromkeys(self.models) for size in sorted(set(self.sizes))]
        settings: dict[str, Any] = {"rounds": self.rounds, "seconds": self.seconds, "device": self.device, "batch": self.batch}
        settings |= {"train": self.mode == "train", "with_compiled": self.compile}
        found: Found = {}
        with counted((ROWS + self.compile) * (self.rounds + 2), len(cases)) as begin:
            for name, size in cases:
                found[name, size] = benchmark(name, size=size, on_call=begin(f"{name}, {size} pixels"), **settings)
        return found

    def _setting(self, machine: dict[str, Any]) -> str:
        return f"{STEPS[self.mode]}, batch {self.batch}, float32, {threads_text(machine)}"

    def _show(self, found: "Found", machine: dict[str, Any]) -> None:
        setting = self._setting(machine)
        absolutes = [_absolutes(name, size, result, setting) for (name, size), result in found.items()]
        notes = [note for result in found.values() for note in result.notes]
        saved = [] if self.figure is None else [f"saved {self.figure.as_posix()}"]
        print_all(_ratios(found, setting), *absolutes, *machine_lines(machine), NOTE, *dict.fromkeys(notes), *saved)

    def _record(self, found: "Found", machine: dict[str, Any]) -> dict[str, Any]:
        records = [{"model": name, "size": size} | result.as_record() for (name, size), result in found.items()]
        settings = {"mode": self.mode, "batch": self.batch, "device": self.device, "parameters": NOTE}
        return {"command": "bench model", **settings, "machine": machine, "models": records}

    def _draw(self, found: "Found", machine: dict[str, Any]) -> None:
        from polaformer.analysis.bench_figures import save_images_per_second

        assert self.figure is not None
        panels: dict[str, dict[str, dict[int, float | None]]] = {}
        for (name, size), result in found.items():
            for key, row in result.rows.items():
                label = "timm's" if key.startswith("timm ") else key
                panels.setdefault(name, {}).setdefault(label, {})[size] = row.images_per_second
        title = "\n".join([self._setting(machine).capitalize(), *busy_lines(machine)])
        with writing(f"--figure {self.figure}"):
            save_images_per_second(self.figure, panels, title=title)


def _ratios(found: "Found", setting: str) -> Table:
    """How much faster ours is than each, a row a model and size."""
    labels = list(dict.fromkeys(_kind(key) for result in found.values() for key in result.rows if key != "ours"))
    with_saved = any(row.saved_bytes for result in found.values() for row in result.rows.values())
    columns = [*labels, *(f"bytes:\n{label}" for label in labels)] if with_saved else labels
    caption = f"how many times longer the other takes: more than 1, ours is faster; {IN_BRACKETS}"
    caption += "; bytes: what ours saves for backward (weights apart) in what the other saves" if with_saved else ""
    table = new_table(f"Speed of ours relative to each, {setting}", "model, pixels", *columns, caption=caption)
    for (name, size), result in found.items():
        by_kind = {_kind(key): key for key in result.rows}
        cells = [_ratio(result, by_kind.get(label)) for label in labels]
        bytes_ = [number(result.saved_ratio(by_kind[label]) if label in by_kind else None) for label in labels]
        table.add_row(f"{name}, {size}", *cells, *(bytes_ if with_saved else []))
    return table


def _absolutes(name: str, size: int, result: "ModelResult", setting: str) -> Table:
    with_saved = any(row.saved_bytes for row in result.rows.values())
    columns = ("images/s", "median (ms)", "best (ms)", "rounds", "against published")
    saved = ("saved (MiB)",) if with_saved else ()
    caption = "against published: relative difference of the logits" + (", of all gradients" if with_saved else "")
    table = new_table(f"{name} at {size} pixels, {setting}", "", *columns, *saved, caption=caption)
    for key, row in result.rows.items():
        mebi = [number(None if row.saved_bytes is None else row.saved_bytes / MEBI, ".4g")] if with_saved else []
        table.add_row(key, *_times(row), _errors(row), *mebi)
    return table


def _ratio(result: "ModelResult", key: str | None) -> str:
    if key is None:
        return "none"
    if not result.rows["ours"].is_correct or not result.rows[key].is_correct:
        return "incorrect"
    row = next((result.rows[name] for name in ("ours", key) if result.rows[name].skipped), None)
    return skipped_text(row.skipped) if row else ratio_text(result.speedup(key), "skipped")


def _times(row: "ModelRow") -> Sequence[str]:
    if not row.is_correct:
        return "incorrect", "", "", ""
    if row.skipped is not None or row.timing is None:
        return skipped_text(row.skipped), "", "", "0"
    return number(row.images_per_second, ".2f") or "skipped", *milliseconds(row.timing)


def _errors(row: "ModelRow") -> str:
    found = [error for error in (row.logits_error, row.gradients_error) if error is not None]
    return ", ".join(f"{error:.1e}" for error in found)


def _kind(key: str) -> str:
    return "timm's" if key.startswith("timm ") else key
