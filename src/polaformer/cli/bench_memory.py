"""`polaformer bench memory`: what a call needs, and what it saves for the backward pass, as ratios first."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from polaformer.cli.bench_options import OfOperator, Report, records, run_jobs, shape_text
from polaformer.cli.bench_tables import cell, mebibytes, number, table

if TYPE_CHECKING:
    from polaformer.bench.runner import Measurement

# What is measured, by the field of a measurement.
KINDS = {
    "saved": "saved for backward",
    "forward_allocated": "forward, allocated",
    "forward_resident": "forward, resident",
    "both_allocated": "both, allocated",
    "both_resident": "both, resident",
}
EXPLAINED = (
    "Saved: tensors that autograd saves, including inputs, each storage once. Allocated: the peak of live bytes of PyTorch's",
    "allocator beyond the inputs. Resident: growth of the process's peak resident memory, which includes what a kernel",
    "allocates itself; it counts pages that were written to, and some MiB of it belong to libraries. Both: forward and",
    "backward. Each contender at each shape was measured in a separate process, after a warm-up.",
)


@dataclass(frozen=True)
class BenchMemory(OfOperator):
    """Measure the memory of the operator against the published form, linear attention and softmax.

    Reports the bytes saved for backward, and the peak memory of forward alone and of forward and backward. Each contender at
    each shape is measured in a separate process, so that nothing is left over from others. Results are checked first; if one is
    incorrect, it gets no numbers, and the exit code is 1. One that would take too long or need too much memory is skipped, with
    the reason; so is one whose process fails.

    Example: polaformer bench memory --lengths 1024 2048 4096 --figure memory.png
    """

    seconds: float = 120.0
    """Time per process; one that takes longer is stopped, and its row says so."""
    figure: Path | None = None
    """Plot memory against the number of tokens into this PNG file; needs --lengths."""
    command = "bench memory"

    def measure(self) -> Report:
        """Checks the options and measures."""
        shapes, contenders, notes = self.prepared("memory", for_memory=True)
        from polaformer.analysis.bench_figures import save_memory
        from polaformer.analysis.machine import fingerprint
        from polaformer.bench.memory import as_record, benchmark
        from polaformer.bench.runner import BenchSettings

        jobs = {shape_text(shape): partial(benchmark, shape, contenders) for shape in shapes}
        settings = BenchSettings(seconds=self.seconds, device=self.device, threads=self.threads)
        found = run_jobs(jobs, settings, 2 * len(contenders))
        machine = fingerprint()
        listed = [{"shape": shape, "rows": records(found[shape_text(shape)], as_record)} for shape in shapes]
        setting = {"command": self.command, "device": self.device, "threads": self.threads}
        record = {**setting, "machine": machine, "notes": notes, "shapes": listed}
        where = f"\nMeasured on {machine['cpu']}, {machine['os']}, torch {machine['torch']}, Python {machine['python']}"
        peak, title = "allocated" if self.device == "cuda" else "resident", f"Memory of a call, {self.setting}, float32"
        draw = partial(save_memory, found={shape[2]: found[shape_text(shape)] for shape in shapes}, peak=peak, title=title)
        return Report(record, [*_tables(found), *EXPLAINED, where, *notes], found, draw)


def _tables(found: "dict[str, dict[str, Measurement]]") -> list[Table]:
    """Ratios at all shapes, then absolute numbers."""
    from polaformer.bench.contenders import BASELINE

    def text(kind: str, unit: int | None, form: str, one: "Measurement") -> str:
        """The bytes in a unit; in the first column why there are none."""
        size = one.sizes.get(kind)
        value = number(size / unit if size is not None and unit else None, form)
        return cell(one, value) if kind == "saved" else value

    caption = "less than 1: less memory; shapes are batch,heads,tokens,head width"
    ratios, absolutes = [], []
    for shape, answers in found.items():
        columns = {title: partial(text, kind, answers[BASELINE].sizes.get(kind), ".3g") for kind, title in KINDS.items()}
        ratios.append(table(f"Memory relative to the published form, shape {shape}", columns, answers, caption=caption))
        given = next((one.sizes["inputs"] for one in answers.values() if "inputs" in one.sizes), None)
        inputs = "" if given is None else f"; inputs and gradient of the output: {mebibytes(given)}"
        columns = {title: partial(text, kind, 2**20, ".4g") for kind, title in KINDS.items()}
        error = {"error vs float64": lambda one: number(one.error, ".1e")}
        absolutes.append(table(f"Shape {shape}, MiB{inputs}", columns | error, answers))
    return ratios + absolutes
