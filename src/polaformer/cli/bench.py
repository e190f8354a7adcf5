"""`polaformer bench …`: speed on this machine, as ratios first."""

import os
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from polaformer.cli.errors import INCORRECT, UsageError
from polaformer.cli.output import load, machine_lines, new_table, print_all, print_json, progress_bar

if TYPE_CHECKING:
    from polaformer.bench.op import Row

Shape = tuple[int, int, int, int]
WIDEST = 1024
MOST_PRODUCTS = 10**12  # in one call of softmax attention: tens of seconds on two cores
TENSORS = 16  # of a shape's size that are alive at the same time, at least
Found = dict[Shape, dict[str, "Row"]]


@dataclass(frozen=True)
class BenchOp:
    """Time the operator against the published form, ELU + 1 linear attention and softmax.

    All of them in turns, in one run, in float32 on the CPU. A number is shown only for what agrees with a slow float64 form,
    output and gradients; if one does not, the exit code is 1.

    Example: polaformer bench op --shapes 4,4,3136,32 8,3,196,64 --mode both
    """

    shapes: tuple[str, ...] = ("4,4,3136,32", "8,3,196,64", "1,8,16384,32")
    """Batch, heads, tokens and head width, with commas; several with spaces between them."""
    mode: Literal["forward", "both"] = "forward"
    """The forward pass alone, or forward and backward together."""
    rounds: int = 15
    """How often each is timed, at most."""
    seconds: float = 10.0
    """Time for each shape: the slow get fewer rounds, and what takes longer than this for a single call is skipped."""
    threads: int | None = None
    """How many threads torch may use; its own choice unless given."""
    json: bool = False
    """Print the result as JSON on stdout and nothing else there."""

    def run(self) -> int:
        """Checks the options, measures, prints."""
        shapes = self.checked_shapes()
        load("polaformer.bench")
        from polaformer.bench.machine import fingerprint, processor_use, share_of_others, using_threads

        with using_threads(self.threads):
            before = processor_use()
            found = self._measure(shapes)
            machine = fingerprint() | {"used_by_others": share_of_others(before, processor_use())}
        if self.json:
            print_json({"command": "bench op", "mode": self.mode, "machine": machine, "shapes": _as_records(found)})
        else:
            _show(found, self.mode, machine)
        return 0 if all(row.correct for rows in found.values() for row in rows.values()) else INCORRECT

    def checked_shapes(self) -> list[Shape]:
        """The shapes as numbers; raises UsageError for any option that makes no sense."""
        if not self.shapes:
            raise UsageError("--shapes is empty; give at least one, for instance --shapes 4,4,3136,32")
        if self.rounds < 1:
            raise UsageError(f"--rounds is {self.rounds}; give at least 1")
        if not (self.seconds > 0 and isfinite(self.seconds)):
            raise UsageError(f"--seconds is {self.seconds}; give a positive number")
        cores = os.cpu_count() or 1
        if self.threads is not None and not 1 <= self.threads <= cores:
            raise UsageError(f"--threads is {self.threads}; give 1 to {cores}, or leave it out for torch's own choice")
        return list(dict.fromkeys(_parse_shape(text) for text in self.shapes))

    def _measure(self, shapes: list[Shape]) -> Found:
        from polaformer.bench.op import CONTENDERS, benchmark

        found: Found = {}
        calls = len(CONTENDERS) * (self.rounds + 1)
        with progress_bar() as bar:
            task = bar.add_task("", total=calls * len(shapes))
            for index, shape in enumerate(shapes):
                bar.update(task, description=f"{_text(shape)}: checking")

                def tell(name: str, text: str = _text(shape)) -> None:
                    bar.update(task, description=f"{text}: {name}", advance=1)

                found[shape] = benchmark(
                    shape, backward=self.mode == "both", rounds=self.rounds, seconds=self.seconds, on_call=tell
                )
                bar.update(task, completed=calls * (index + 1))
            bar.update(task, description="done")
        return found


def _parse_shape(text: str) -> Shape:
    try:
        batch, heads, tokens, width = (int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--shapes has {text!r}; give four whole numbers with commas: batch,heads,tokens,head width, as in 4,4,3136,32"
        ) from None
    if min(batch, heads, tokens) < 1 or not 2 <= width <= WIDEST:
        raise UsageError(
            f"--shapes has {text!r}; batch, heads and tokens must be at least 1, the head width between 2 and {WIDEST}"
        )
    if batch * heads * tokens**2 * width > MOST_PRODUCTS:
        raise UsageError(
            f"--shapes has {text!r}; everything is called at least once, and softmax with so many tokens would take too long: "
            f"keep batch·heads·tokens²·width below {MOST_PRODUCTS:.0e}"
        )
    needed, there_is = TENSORS * 4 * batch * heads * tokens * width, _memory()
    if there_is is not None and needed > there_is:
        raise UsageError(
            f"--shapes has {text!r}, which needs about {needed / 1e9:.0f} GB, but this machine has {there_is / 1e9:.0f} GB; "
            "give a smaller one"
        )
    return batch, heads, tokens, width


def _memory() -> int | None:
    """The machine's memory in bytes, where the system tells."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None


def _text(shape: Shape) -> str:
    return ",".join(str(size) for size in shape)


def _show(found: Found, mode: str, machine: dict[str, Any]) -> None:
    passes = "forward pass" if mode == "forward" else "forward and backward pass"
    print_all(
        _ratios(found, passes), *(_absolutes(shape, rows, passes) for shape, rows in found.items()), *machine_lines(machine)
    )


def _ratios(found: Found, passes: str) -> Table:
    table = new_table(
        f"Speed relative to the published form, {passes}",
        "shape",
        *(_text(shape) for shape in found),
        caption="more than 1: faster; shapes are batch,heads,tokens,head width",
    )
    for name in next(iter(found.values())):
        table.add_row(name, *(_ratio(rows[name]) for rows in found.values()))
    return table


def _absolutes(shape: Shape, rows: "dict[str, Row]", passes: str) -> Table:
    table = new_table(f"Shape {_text(shape)}, {passes}", "", "median (ms)", "best (ms)", "rounds", "error vs float64")
    for name, row in rows.items():
        table.add_row(name, *_times(row), f"{row.error:.1e}")
    return table


def _ratio(row: "Row") -> str:
    if row.timing is None:
        return "incorrect"
    if not row.timing.samples:
        return f"skipped: one call took {row.timing.first:.1f} s"
    return "–" if row.speedup is None else f"{row.speedup:.2f}"


def _times(row: "Row") -> tuple[str, str, str]:
    if row.timing is None:
        return "incorrect", "", ""
    median, best = row.timing.median, row.timing.best
    if median is None or best is None:
        return "skipped", "", "0"
    return f"{1e3 * median:.2f}", f"{1e3 * best:.2f}", str(len(row.timing.samples))


def _as_records(found: Found) -> list[dict[str, Any]]:
    return [{"shape": shape, "rows": {name: row.as_record() for name, row in rows.items()}} for shape, rows in found.items()]
