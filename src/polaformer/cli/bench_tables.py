"""How the benchmarks show what they found: cells with a number or the reason why there is none, and tables of them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from polaformer.cli.output import new_table

if TYPE_CHECKING:
    from polaformer.bench.measure import Ratio, Timing

PASSES = {"forward": "forward pass", "both": "forward and backward pass"}
IN_BRACKETS = "in brackets the 95 % interval of the median over rounds, all rounds where there are fewer than 6"


def table(
    title: str, columns: Sequence[str], *sections: Mapping[str, Sequence[str]], first: str = "", caption: str | None = None
) -> Table:
    """A table with a row per name, the sections divided by lines; first: the title of the column of names."""
    found = new_table(title, first, *columns, caption=caption)
    for section in sections:
        found.add_section()
        for name, cells in section.items():
            found.add_row(name, *cells)
    return found


def cell(text: str, *, correct: bool, skipped: str | None, timing: "Timing | None") -> str:
    """The text, or why there is no number."""
    if not correct:
        return "incorrect"
    if skipped is not None:
        return skipped_text(skipped)
    return text if timing is None or timing.samples else f"skipped: one call took {timing.first:.1f} s"


def skipped_text(reason: str) -> str:
    """Why there is no number."""
    from polaformer.bench.measure import TOO_NOISY

    return reason if reason.startswith(TOO_NOISY) else f"skipped: {reason}"


def ratio_text(ratio: "Ratio | None", missing: str = "–") -> str:
    """The median and its interval; the interval alone if it is too wide."""
    if ratio is None:
        return missing
    interval = f"{ratio.low:.3g}–{ratio.high:.3g}"
    return f"noisy: {interval}" if ratio.is_noisy else f"{ratio.median:.2f} ({interval})"


def milliseconds(timing: "Timing | None") -> tuple[str, str, str]:
    """Median, best and number of rounds."""
    if timing is None or timing.median is None or timing.best is None:
        return "skipped", "", "0"
    return f"{1e3 * timing.median:.2f}", f"{1e3 * timing.best:.2f}", str(len(timing.samples))


def number(value: float | None, form: str = ".2f") -> str:
    """The number, or an empty string."""
    return "" if value is None else format(value, form)


def mebibytes(size: int | None, form: str = ".4g") -> str:
    """Bytes in MiB, or an empty string."""
    return "" if size is None else format(size / 2**20, form)
