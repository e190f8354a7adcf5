"""`polaformer bench model`: images per second of whole models, as ratios first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.table import Table

from polaformer.cli.bench_options import Report, Timed, records
from polaformer.cli.bench_tables import IN_BRACKETS, TIMES, Columns, cell, mebibytes, number, ratio_text, table
from polaformer.cli.errors import UsageError
from polaformer.cli.output import figure_title, machine_lines
from polaformer.errors import nearest

if TYPE_CHECKING:
    from polaformer.bench.runner import BenchSettings, Measurement

MIN_SIDE, MAX_SIDE = 32, 4096  # of an image, in pixels
NUM_ROWS = 4  # of a table: ours, the published form, the softmax twin, timm's


class Case(NamedTuple):
    """One table of a benchmark of models: its title, the size of the images, keys of its record, and what is measured."""

    title: str
    pixels: Any  # the side of square images, or height×width
    about: dict[str, Any]
    job: "Callable[[BenchSettings], tuple[dict[str, Measurement], list[str]]]"


@dataclass(frozen=True)
class OfModels(Timed):
    """The options of benchmarks of models."""

    models: tuple[str, ...] = ()
    """Names of our models, separated by spaces; `polaformer models "pola_*"` lists them."""
    batch: int = 4
    """Images per batch."""
    mode: Literal["inference", "train"] = "inference"
    """Inference alone, or a training step: forward and backward."""
    note = "Parameters and images are random (seed 0), including our powers, scales and tables; no drop path."

    def cases(self) -> list[Case]:
        """What is measured; raises UsageError for options that make no sense."""
        raise NotImplementedError

    def measure(self) -> Report:
        """Checks the options and measures."""
        cases = self.cases()
        from polaformer.analysis.bench_figures import save_images_per_second
        from polaformer.bench.model import as_record

        jobs = {f"{case.title}, {case.pixels} pixels": case.job for case in cases}
        results, record = self.time(jobs, NUM_ROWS * (self.rounds + 2), batch=self.batch)
        setting, machine = self.in_words(f"batch {self.batch}", record["machine"]), record["machine"]
        found = [(case, *result) for case, result in zip(cases, results.values(), strict=True)]
        models = [case.about | {"rows": records(rows, as_record), "notes": notes} for case, rows, notes in found]
        record |= {"parameters": self.note, "models": models}
        noted = dict.fromkeys(note for *_, notes in found for note in notes)
        by_table = {(case.title, case.pixels): rows for case, rows, _ in found}
        shown = [*tables(by_table, setting), *machine_lines(machine), self.note, *noted]
        speeds = {at: {_kind(key): row.images_per_second for key, row in rows.items()} for at, rows in by_table.items()}
        draw = partial(save_images_per_second, found=speeds, title=figure_title(setting.capitalize(), machine))
        return Report(record, shown, {label: rows for label, (rows, _) in results.items()}, draw)

    def check_models(self, known: Sequence[str], listed: str) -> None:
        """Raises UsageError for unknown models and impossible batches; listed: how to list the known ones."""
        if self.batch < 1:
            raise UsageError(f"--batch is {self.batch}; give at least 1")
        unknown = [name for name in self.models if name not in known]
        if unknown or not self.models:
            given = f"has {unknown[0]!r}; {nearest(unknown[0], known)}" if unknown else "is empty; "
            raise UsageError(f"--models {given}give names that `{listed}` lists")


def check_sides(option: str, sides: Sequence[int], example: str) -> None:
    """Raises UsageError for sides of images that are not multiples of 32, or too large."""
    wrong = [side for side in sides if not MIN_SIDE <= side <= MAX_SIDE or side % 32]
    if wrong or not sides:
        given = f"has {wrong[0]}" if wrong else "is empty"
        raise UsageError(f"{option} {given}; give multiples of 32 from {MIN_SIDE} to {MAX_SIDE}, as in {option} {example}")


@dataclass(frozen=True)
class BenchModel(OfModels):
    """Time whole models against their published form, their softmax twins and timm's models.

    All models are timed in interleaved rounds, in float32. Our model is timed only if its logits, and in a training step
    its gradients, agree with the authors' computation on the same parameters; if they do not, the exit code is 1. A model that
    would take too long or need too much memory is skipped, with the reason. If the rounds of a model vary too much, it gets no
    numbers, and the exit code is 75.

    Example: polaformer bench model --models pola_swin_tiny pola_pvt_tiny --sizes 224 448 --figure images.png
    """

    models: tuple[str, ...] = ("pola_swin_tiny", "pola_pvt_tiny", "pola_deit_tiny")
    sizes: tuple[int, ...] = (224,)
    """Sides of the square images in pixels, multiples of 32 up to 4096; a model is built for the size that it is timed at."""
    compile: bool = False
    """Also time torch.compile of the published form; compiling takes a minute or more per model and is not timed."""
    rounds: int = 9
    seconds: float = 40.0
    figure: Path | None = None
    """Plot images per second against size into this PNG file; needs two or more --sizes."""
    command = "bench model"

    def cases(self) -> list[Case]:
        """Every model at every size."""
        check_sides("--sizes", self.sizes, "224 448")
        sizes = sorted(set(self.sizes))
        needs = "draws images per second against size; give two or more --sizes, for instance --sizes 224 448 896"
        self.load("polaformer.bench.model")
        from polaformer.backbones import list_models
        from polaformer.bench.model import benchmark

        self.check_models(list_models("pola_*"), 'polaformer models "pola_*"')
        self.check_common("" if len(sizes) > 1 else needs)
        return [
            Case(name, size, {"model": name, "size": size}, partial(benchmark, size, name, with_compiled=self.compile))
            for name in dict.fromkeys(self.models)
            for size in sizes
        ]


def tables(found: "dict[tuple[str, Any], dict[str, Measurement]]", setting: str) -> list[Table | str]:
    """How much faster ours is than each, a row per model and size; then absolute numbers of each."""
    rows = {f"{name}, {size}": {_kind(key): row for key, row in one.items()} for (name, size), one in found.items()}
    labels = dict.fromkeys(key for one in rows.values() for key in one if key != "ours")
    with_saved = any(row.saved_bytes for one in rows.values() for row in one.values())

    def ratio(label: str, rows: "dict[str, Measurement]") -> str:
        if label not in rows:
            return "none"
        reasons = [cell(row, "") for row in (rows["ours"], rows[label])]
        return next(filter(None, reasons), ratio_text(rows[label].speedup))

    def saved(label: str, rows: "dict[str, Measurement]") -> str:
        return number(rows[label].saved_ratio if label in rows else None)

    columns: Columns = {label: partial(ratio, label) for label in labels}
    shown, caption = COLUMNS, f"how many times longer the other takes: more than 1, ours is faster; {IN_BRACKETS}"
    errors = "against published: relative difference of the outputs"
    if with_saved:
        columns = {**columns, **{f"bytes:\n{label}": partial(saved, label) for label in labels}}
        shown, errors = {**COLUMNS, **SAVED}, f"{errors}, of all gradients"
        caption += "; bytes: what ours saves for backward (without weights) relative to the other"
    ratios = table(f"Speed of ours relative to each, {setting}", columns, rows, first="model, pixels", caption=caption)
    absolute = [table(f"{name} at {size} pixels, {setting}", shown, one, caption=errors) for (name, size), one in found.items()]
    return [ratios, *absolute]


def _errors(row: "Measurement") -> str:
    return ", ".join(f"{error:.1e}" for error in (row.error, row.gradients_error) if error is not None)


def _kind(key: str) -> str:
    return "timm's" if key.startswith("timm ") else key


COLUMNS: Columns = {"images/s": lambda row: cell(row, number(row.images_per_second)), **TIMES, "against published": _errors}
SAVED: Columns = {"saved (MiB)": lambda row: mebibytes(row.saved_bytes)}
