"""Figures of benchmarks as PNG files: lines on logarithmic axes, one per contender."""

from collections.abc import Mapping
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from polaformer.analysis.figures import new_figure, style
from polaformer.analysis.training_figures import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from polaformer.bench import runner

Line = Mapping[int, float | None]  # by number of tokens or pixels; None: not measured
MARKERS = "osD^vPX"


def save_times(path: Path, curves: Mapping[str, "runner.LengthCurve"], *, title: str) -> None:
    """Milliseconds against the number of tokens, slopes in the legend."""
    lines = {}
    for name, curve in curves.items():
        slope = curve.slope()
        label = name if slope is None else f"{name}: time ∝ $N^{{{slope:.2f}}}$"
        lines[label] = {n: point.median and 1e3 * point.median for n, point in curve.points.items()}
    with style():
        figure = new_figure(7.0, 4.6)
        axes = figure.subplots()
        _draw(axes, lines, most_labels=12)
        _label(axes, "number of tokens N", "time of one call (ms)")
        axes.legend(frameon=False, fontsize=8)
        axes.set_title(title, loc="left")
        figure.savefig(path)


def save_memory(path: Path, found: Mapping[int, Mapping[str, "runner.Measurement"]], *, peak: str, title: str) -> None:
    """MiB against the number of tokens: one panel per kind of memory, one line per contender.

    found: the measurements by number of tokens, then by contender; peak: the kind that is drawn, "allocated" or "resident".
    """
    kinds = {
        "saved": "saved for backward, including inputs",
        f"forward_{peak}": f"forward, {peak} beyond the inputs",
        f"both_{peak}": f"forward and backward, {peak}",
    }
    panels: dict[str, dict[str, dict[int, float | None]]] = {label: {} for label in kinds.values()}
    for kind, label in kinds.items():
        for length, rows in found.items():
            for name, one in rows.items():
                size = one.sizes.get(kind)
                panels[label].setdefault(name, {})[length] = None if size is None else size / 2**20
    _save_panels(path, panels, title, "number of tokens N", "MiB", size=(3.6 * len(panels), 4.6), sharey=True)


def save_images_per_second(path: Path, found: Mapping[tuple[str, int], Mapping[str, float | None]], *, title: str) -> None:
    """Images per second against the side of the image in pixels: one panel per model, one line per contender.

    found: by model and side, then by contender.
    """
    panels: dict[str, dict[str, dict[int, float | None]]] = {}
    for (model, side), speeds in found.items():
        for name, speed in speeds.items():
            panels.setdefault(model, {}).setdefault(name, {})[side] = speed
    size = (max(6.0, 3.6 * len(panels)), 4.4)
    _save_panels(path, panels, title, "side of the image (pixels)", "images per second", size=size)


def _save_panels(
    path: Path,
    panels: Mapping[str, Mapping[str, Line]],
    title: str,
    x_label: str,
    y_label: str,
    *,
    size: tuple[float, float],
    sharey: bool = False,
) -> None:
    """Panels side by side with one legend below; a name has the same colour in each of them."""
    with style():
        figure = new_figure(*size)
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        all_axes = figure.subplots(1, len(panels), sharey=sharey, squeeze=False)[0]
        for axes, (name, curves) in zip(all_axes, panels.items(), strict=True):
            _draw(axes, curves)
            _label(axes, x_label, y_label if axes is all_axes[0] else "")
            axes.set_title(name, loc="left")
        lines = {line.get_label(): line for axes in all_axes for line in axes.get_lines()}
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=min(len(lines), 4), frameon=False)
        figure.savefig(path)


def _draw(axes: "Axes", curves: Mapping[str, Line], most_labels: int = 6) -> None:
    """One line per contender on logarithmic axes; colours follow the order of the names, measured or not."""
    for (name, curve), colour, marker in zip(curves.items(), cycle(PALETTE), cycle(MARKERS), strict=False):
        points = [(x, y) for x, y in curve.items() if y is not None]
        axes.plot([x for x, _ in points], [y for _, y in points], color=colour, marker=marker, markersize=4.5, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({x for curve in curves.values() for x in curve})
    step = ceil(len(ticks) / most_labels)
    axes.set_xticks(ticks, labels=[_short(x) if i % step == 0 else "" for i, x in enumerate(ticks)])
    axes.minorticks_off()


def _label(axes: "Axes", x_label: str, y_label: str) -> None:
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 2000 * low else (1.0,)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(which="major", color="0.9")


def _short(number: int) -> str:
    """4096 as 4k, 1048576 as 1M, 224 and 1024 as they are."""
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if number >= 4096 and number % size == 0:
            return f"{number // size}{letter}"
    return str(number)
