"""`polaformer bench memory`: what a call needs, and what it saves for the backward pass, as ratios first."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from polaformer.cli.bench_options import Bench, Lengths, Report, Shape, Shapes, shape_text
from polaformer.cli.bench_tables import mebibytes, number, table
from polaformer.cli.output import counted

if TYPE_CHECKING:
    from polaformer.bench.memory import Answer

# What is measured, by the field of an answer.
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
class BenchMemory(Bench, Lengths, Shapes):
    """Measure the memory of the operator against the published form, linear attention and softmax.

    Bytes saved for backward, and the peak during forward alone and during forward and backward. Each contender at each shape is
    measured in a separate process, so that nothing is left over from others. If one dies, its row gives the reason.

    Example: polaformer bench memory --lengths 1024 2048 4096 --figure memory.png
    """

    seconds: float = 120.0
    """Time per process; one that takes longer is stopped, and its row says so."""
    figure: Path | None = None
    """PNG file to draw memory against the number of tokens in; needs --lengths."""

    def measure(self) -> Report:
        """Check the options and measure."""
        shapes = self.checked_shapes(self.shapes)
        needs = "draws memory against the number of tokens; give --lengths too, for instance --lengths 1024 2048 4096"
        self.check_common(figure_needs=None if self.lengths else needs)
        names, notes = self.contenders(self.without, for_memory=True)
        from polaformer.bench import memory
        from polaformer.bench.machine import fingerprint

        found: dict[Shape, dict[str, Answer]] = {}
        with counted(len(names), len(shapes)) as begin:
            for shape in shapes:
                tell, found[shape] = begin(shape_text(shape)), {}
                for name in names:
                    tell(name)
                    free = memory.available_bytes() if self.device == "cpu" else None
                    limit = None if free is None else free * 9 // 10
                    question = memory.Question(name, shape, self.device, self.threads, limit)
                    found[shape][name] = memory.probe(question, seconds=self.seconds)
        machine = fingerprint()
        record: dict[str, Any] = {"command": "bench memory", "device": self.device, "threads": self.threads}
        record |= {"machine": machine, "notes": [*notes, *self.saved_lines()], "shapes": []}
        for shape, answers in found.items():
            rows = {name: one._asdict() | {"correct": _is_correct(one)} for name, one in answers.items()}
            record["shapes"].append({"shape": shape, "rows": rows})
        where = f"\nMeasured on {machine['cpu']}, {machine['os']}, torch {machine['torch']}, Python {machine['python']}"
        tables = [*(_ratios(*one) for one in found.items()), *(_absolutes(*one) for one in found.items())]
        correct = all(_is_correct(one) for answers in found.values() for one in answers.values())
        return Report(record, [*tables, *EXPLAINED, where, *notes], lambda path: self._draw(path, found), correct)

    def _draw(self, path: Path, found: "dict[Shape, dict[str, Answer]]") -> None:
        from polaformer.analysis.bench_figures import save_memory

        peak = "allocated" if self.device == "cuda" else "resident"
        drawn = {
            "saved": "saved for backward, including inputs",
            f"forward_{peak}": f"forward, {peak} beyond the inputs",
            f"both_{peak}": f"forward and backward, {peak}",
        }
        names = list(next(iter(found.values())))
        panels = {
            title: {name: {shape[2]: _value(rows[name], kind) for shape, rows in found.items()} for name in names}
            for kind, title in drawn.items()
        }
        save_memory(path, panels, title=f"Memory of a call, {self.setting}")


def _ratios(shape: Shape, answers: "dict[str, Answer]") -> Table:
    from polaformer.bench.contenders import YARDSTICK

    def ratio(one: "Answer", kind: str) -> str:
        mine, other = _value(one, kind), _value(answers[YARDSTICK], kind)
        return "" if mine is None or not other else f"{mine / other:.3g}"

    rows = {name: _failure(one) or [ratio(one, kind) for kind in KINDS] for name, one in answers.items()}
    title = f"Memory relative to the published form, shape {shape_text(shape)}"
    caption = "less than 1: less memory; shapes are batch,heads,tokens,head width"
    return table(title, list(KINDS.values()), rows, caption=caption)


def _absolutes(shape: Shape, answers: "dict[str, Answer]") -> Table:
    given = next((one.inputs for one in answers.values() if one.inputs is not None), None)
    inputs = "" if given is None else f"; inputs and gradient of the output: {mebibytes(given)}"
    rows = {
        name: [*(_failure(one) or [mebibytes(_value(one, kind)) for kind in KINDS]), number(one.error, ".1e")]
        for name, one in answers.items()
    }
    return table(f"Shape {shape_text(shape)}, MiB{inputs}", [*KINDS.values(), "error vs float64"], rows)


def _failure(one: "Answer") -> list[str]:
    """Why nothing was measured, and empty cells; empty if something was."""
    reason = one.failed or ("" if _is_correct(one) else "incorrect")
    return [reason, *[""] * (len(KINDS) - 1)] if reason else []


def _value(one: "Answer", kind: str) -> int | None:
    return None if _failure(one) else getattr(one, kind)


def _is_correct(one: "Answer") -> bool:
    from polaformer.bench.op import TOLERANCE

    return one.failed is not None or (one.error is not None and one.error <= TOLERANCE)
