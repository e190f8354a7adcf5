"""`polaformer bench memory`: what a call needs, and what it keeps for the backward pass, as ratios first."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from polaformer.cli import bench_options as options
from polaformer.cli.bench_options import Shape, shape_text
from polaformer.cli.bench_tables import MEBI, number
from polaformer.cli.errors import INCORRECT
from polaformer.cli.output import counted, new_table, print_all, print_json
from polaformer.regular_files import writing

if TYPE_CHECKING:
    from polaformer.bench.memory_probe import Answer

    Found = dict[Shape, dict[str, Answer]]

# What is measured, by the field of an answer.
KINDS = {
    "saved": "saved for backward",
    "forward_allocated": "forward, allocated",
    "forward_resident": "forward, resident",
    "both_allocated": "both, allocated",
    "both_resident": "both, resident",
}
EXPLAINED = (
    "Saved: tensors that autograd keeps, each storage once, inputs among them. Allocated: the peak of live bytes of PyTorch's",
    "allocator beyond the inputs. Resident: growth of the process's peak resident memory, which also sees what a kernel",
    "allocates itself; it counts pages that were written to, and some MiB of it belong to libraries. Both: forward and",
    "backward. Each contender at each shape was measured in a process of its own, after a warm-up.",
)


@dataclass(frozen=True)
class BenchMemory:
    """Measure the memory of the operator against the published form, linear attention and softmax.

    What is saved for backward, and the peak during forward alone and during forward and backward: each contender at each shape
    in a process of its own, so that nothing is left over from others. One that dies says so in its place.

    Example: polaformer bench memory --lengths 1024 2048 4096 --figure memory.png
    """

    shapes: tuple[str, ...] = options.SHAPES
    """Batch, heads, tokens and head width, with commas; several with spaces between them."""
    lengths: tuple[int, ...] = ()
    """Numbers of tokens to measure at instead of --shapes."""
    batch: int = 1
    """Batch size for --lengths."""
    heads: int = 4
    """Number of heads for --lengths."""
    width: int = 32
    """Head width for --lengths."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to compute."""
    without: tuple[str, ...] = ()
    """Rows to leave out, by a part of their name; for instance --without compile materialised."""
    seconds: float = 120.0
    """Time for each process; one that takes longer is stopped, and says so."""
    threads: int | None = None
    """How many threads torch may use; its own choice unless given."""
    figure: Path | None = None
    """PNG file to draw memory against the number of tokens in; needs --lengths."""
    json: bool = False
    """Print the result as JSON on stdout and nothing else there."""

    def run(self) -> int:
        """Checks the options, measures, prints."""
        shapes = self.checked_shapes()
        contenders, notes = options.contenders_for(self.device, self.without, for_memory=True)
        found = self._measure(shapes, list(contenders))
        if self.figure is not None:
            self._draw(found)
            notes = [*notes, f"saved {self.figure.as_posix()}"]
        if self.json:
            print_json(self._record(found, notes))
        else:
            self._show(found, notes)
        return 0 if all(_is_correct(one) for answers in found.values() for one in answers.values()) else INCORRECT

    def checked_shapes(self) -> list[Shape]:
        """The shapes as numbers; raises UsageError for any option that makes no sense."""
        shapes = options.shapes_of(self.shapes, self.lengths, self.batch, self.heads, self.width)
        options.check_seconds(self.seconds)
        options.check_threads(self.threads)
        needs = "draws memory against the number of tokens; give --lengths too, for instance --lengths 1024 2048 4096"
        options.check_figure(self.figure, possible=bool(self.lengths), needs=needs)
        return shapes

    def _measure(self, shapes: list[Shape], names: list[str]) -> "Found":
        from polaformer.bench.memory_probe import Question
        from polaformer.bench.memory_probing import free_memory, probe

        found: Found = {}
        with counted(len(names), len(shapes)) as begin:
            for shape in shapes:
                tell, found[shape] = begin(shape_text(shape)), {}
                for name in names:
                    tell(name)
                    limit = free_memory() if self.device == "cpu" else None
                    question = Question(name, shape, self.device, self.threads, limit)
                    found[shape][name] = probe(question, seconds=self.seconds)
        return found

    def _show(self, found: "Found", notes: list[str]) -> None:
        from polaformer.bench.machine import fingerprint

        machine = fingerprint()
        where = f"\nMeasured on {machine['cpu']}, {machine['os']}, torch {machine['torch']}, Python {machine['python']}"
        absolutes = [_absolutes(shape, answers) for shape, answers in found.items()]
        print_all(*(_ratios(shape, answers) for shape, answers in found.items()), *absolutes, *EXPLAINED, where, *notes)

    def _record(self, found: "Found", notes: list[str]) -> dict[str, Any]:
        from polaformer.bench.machine import fingerprint

        rows = [
            {"shape": shape, "rows": {name: one._asdict() | {"correct": _is_correct(one)} for name, one in answers.items()}}
            for shape, answers in found.items()
        ]
        settings = {"device": self.device, "threads": self.threads, "machine": fingerprint(), "notes": notes}
        return {"command": "bench memory", **settings, "shapes": rows}

    def _draw(self, found: "Found") -> None:
        from polaformer.analysis.bench_figures import save_memory

        assert self.figure is not None
        peak = "allocated" if self.device == "cuda" else "resident"
        names = list(next(iter(found.values())))
        drawn = {
            "saved": "saved for backward, inputs among it",
            f"forward_{peak}": f"forward, {peak} beyond the inputs",
            f"both_{peak}": f"forward and backward, {peak}",
        }
        panels = {
            drawn[kind]: {name: {shape[2]: _value(answers[name], kind) for shape, answers in found.items()} for name in names}
            for kind in drawn
        }
        title = f"Memory of a call, batch {self.batch}, {self.heads} heads of width {self.width}, float32"
        with writing(f"--figure {self.figure}"):
            save_memory(self.figure, panels, title=title)


def _ratios(shape: Shape, answers: "dict[str, Answer]") -> Table:
    from polaformer.bench.contenders import YARDSTICK

    caption = "less than 1: less memory; shapes are batch,heads,tokens,head width"
    title = f"Memory relative to the published form, shape {shape_text(shape)}"
    table = new_table(title, "", *KINDS.values(), caption=caption)
    for name, one in answers.items():
        table.add_row(name, *_cells(one, answers[YARDSTICK]))
    return table


def _absolutes(shape: Shape, answers: "dict[str, Answer]") -> Table:
    given = next((one.inputs for one in answers.values() if one.inputs is not None), None)
    inputs = "" if given is None else f"; inputs and incoming gradient: {given / MEBI:.4g}"
    table = new_table(f"Shape {shape_text(shape)}, MiB{inputs}", "", *KINDS.values(), "error vs float64")
    for name, one in answers.items():
        table.add_row(name, *_cells(one, None), number(one.error, ".1e"))
    return table


def _cells(one: "Answer", yardstick: "Answer | None") -> list[str]:
    """What was measured, in MiB or in what the yardstick needs; or, once, why nothing was."""
    if one.failed is not None or not _is_correct(one):
        return [one.failed or "incorrect", *[""] * (len(KINDS) - 1)]
    if yardstick is None:
        return [number(_in_mebi(_value(one, kind)), ".4g") for kind in KINDS]
    pairs = [(_value(one, kind), _value(yardstick, kind)) for kind in KINDS]
    return ["" if mine is None or not other else f"{mine / other:.3g}" for mine, other in pairs]


def _value(one: "Answer", kind: str) -> int | None:
    return one._asdict()[kind] if one.failed is None and _is_correct(one) else None


def _in_mebi(number_of_bytes: int | None) -> float | None:
    return None if number_of_bytes is None else number_of_bytes / MEBI


def _is_correct(one: "Answer") -> bool:
    from polaformer.bench.op import TOLERANCE

    return one.failed is not None or (one.error is not None and one.error <= TOLERANCE)
