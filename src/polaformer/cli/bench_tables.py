"""How the benchmarks show what they found: cells with a number or the reason why there is none, and tables of them."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from polaformer.cli.output import new_table

if TYPE_CHECKING:
    from polaformer.analysis.timing import Ratio
    from polaformer.bench.runner import Measurement

PASSES = {
    "forward": "forward pass",
    "both": "forward and backward pass",
    "inference": "inference",
    "train": "training step (forward and backward)",
}
IN_BRACKETS = "in brackets the 95 % interval of the median over rounds, all rounds where there are fewer than 6"
Columns = Mapping[str, Callable[[Any], str]]  # by title: the cell of a row
TIMES: Columns = {
    "median (ms)": lambda row: "" if not row.correct or row.skipped else number(row.median and 1e3 * row.median) or "skipped",
    "best (ms)": lambda row: number(row.timing.best and 1e3 * row.timing.best) if row.timing else "",
    "rounds": lambda row: "" if not row.correct else str(len(row.timing.samples) if row.timing else 0),
}


def table(title: str, columns: Columns, *sections: Mapping[str, Any], first: str = "", caption: str | None = None) -> Table:
    """A table with a line per row, by name, the sections divided by lines; first: the title of the column of names."""
    found = new_table(title, first, *columns, caption=caption)
    for section in sections:
        found.add_section()
        for name, row in section.items():
            found.add_row(name, *(text(row) for text in columns.values()))
    return found


def cell(row: "Measurement", text: str) -> str:
    """The text, or why there is no number."""
    if not row.correct:
        return "incorrect"
    if row.skipped is not None:
        return skipped_text(row.skipped)
    return text if row.timing is None or row.timing.samples else f"skipped: one call took {row.timing.first:.1f} s"


def skipped_text(reason: str) -> str:
    """Why there is no number."""
    from polaformer.bench.runner import TOO_NOISY

    return reason if reason.startswith(TOO_NOISY) else f"skipped: {reason}"


def ratio_text(ratio: "Ratio | None", missing: str = "–") -> str:
    """The median and its interval; the interval alone if it is too wide."""
    if ratio is None:
        return missing
    interval = f"{ratio.low:.3g}–{ratio.high:.3g}"
    return f"noisy: {interval}" if ratio.is_noisy else f"{ratio.median:.2f} ({interval})"


def number(value: float | None, form: str = ".2f") -> str:
    """The number, or an empty string."""
    return "" if value is None else format(value, form)


def mebibytes(size: int | None, form: str = ".4g") -> str:
    """Bytes in MiB, or an empty string."""
    return number(None if size is None else size / 2**20, form)
