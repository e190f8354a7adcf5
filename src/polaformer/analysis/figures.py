"""Figures as PNG files. matplotlib is imported only when one is drawn, and its global state is not used."""

from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from polaformer.analysis.sharpness import Sharpness
from polaformer.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, safe for colour-blind readers.
COLOURS = {"softmax": "#D55E00", "linear": "#999999", "polarity, same sign": "#0072B2", "polarity, opposite sign": "#56B4E9"}
STYLE: Any = {"font.size": 9.0, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9.0}


def save_sharpness(path: Path, found: Sequence[Sharpness], image: Tensor, *, query: tuple[int, int], title: str) -> None:
    """Plots the entropy of every mechanism, and below it where the pixel `query` (row, column) of the first image attends.

    image (height, width): the first image; its pixels are the tokens of `found`. The maps are those of head 1.
    """
    shown = [one for one in found if one.power in (None, 1.0, 3.0, 5.0) and one.mechanism != "polarity, opposite sign"]
    shown += [one for one in found if one.power == 3.0 and one.mechanism == "polarity, opposite sign"]
    with style():
        figure = new_figure(9.5, 6.3)
        figure.suptitle(title, fontsize=10)
        above, below = figure.subfigures(2, 1, height_ratios=(2.1, 1))
        _draw_entropies(above.subplots(), found)
        _draw_rows(below, shown, image, query)
        figure.savefig(path)


def save_times(
    path: Path, lengths: Sequence[int], times: dict[str, Sequence[float | None]], slopes: dict[str, float | None], *, title: str
) -> None:
    """Plots seconds per forward pass against the number of tokens on log-log axes: a line per mechanism, slopes in the legend.

    times and slopes have the same keys, the names in the legend; None marks a length that was not measured.
    """
    with style():
        figure = new_figure(6.4, 4.4)
        axes = figure.subplots()
        styles = zip(times, ("#0072B2", "#D55E00", "#009E73"), "osD", strict=False)
        for name, colour, marker in styles:
            points = [(n, 1e3 * t) for n, t in zip(lengths, times[name], strict=True) if t is not None]
            growth = "" if slopes[name] is None else f": time ∝ $N^{{{slopes[name]:.2f}}}$"
            axes.loglog(*zip(*points, strict=True), color=colour, marker=marker, label=name + growth)
        _label_times(axes)
        axes.set_title(title, loc="left")
        figure.savefig(path)


def _draw_entropies(axes: "Axes", found: Sequence[Sharpness]) -> None:
    """Draws bars of the mean entropy, error bars from the 5th to the 95th percentile of the rows, uniform attention dashed."""
    positions = range(len(found))[::-1]
    means = [one.mean for one in found]
    low, high = ([float(one.entropy.flatten().quantile(level)) for one in found] for level in (0.05, 0.95))
    spread = [[m - a for m, a in zip(means, low, strict=True)], [b - m for m, b in zip(means, high, strict=True)]]
    axes.barh(positions, means, color=[COLOURS[one.mechanism] for one in found], height=0.7)
    axes.errorbar(means, positions, xerr=spread, fmt="none", ecolor="black", elinewidth=1, capsize=2)
    uniform = log(found[0].weights.shape[-1])
    for position, one in zip(positions, found, strict=True):
        axes.text(1.02 * uniform, position, f"{one.mean:.2f}", va="center")
    axes.axvline(uniform, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(positions, [_name(one) for one in found])
    axes.set_xlim(0, 1.1 * uniform)
    axes.set_xlabel(f"positive sequence entropy of a row (nats); dashed: uniform attention, ln {found[0].weights.shape[-1]}")
    axes.set_title("Lower is sharper. Bars and numbers: mean over all rows; error bars: 5th to 95th percentile", loc="left")


def _draw_rows(figure: Any, shown: Sequence[Sharpness], image: Tensor, query: tuple[int, int]) -> None:
    """Draws the image with the query marked, then the query's row of each map as a heatmap, all on one colour scale."""
    from matplotlib.colors import PowerNorm

    row, column = query
    maps = [one.weights[0, 0, row * image.shape[1] + column].reshape(image.shape) for one in shown]
    largest = max(float(weights.max()) for weights in maps)
    axes = figure.subplots(1, len(shown) + 1)
    axes[0].imshow(image.tolist(), cmap="gray_r")
    axes[0].set_title("the image\n□ the query")
    for panel, one, weights in zip(axes[1:], shown, maps, strict=True):
        drawn = panel.imshow(weights.tolist(), cmap="viridis", norm=PowerNorm(0.5, vmin=0, vmax=largest))
        panel.set_title(_name(one).replace(", ", "\n").replace(" (", "\n("))
    for panel in axes:
        panel.plot(column, row, marker="s", markersize=9, color="none", markeredgecolor="#D55E00")
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set_visible(True)
    bar = figure.colorbar(drawn, ax=list(axes), label="attention weight", shrink=0.9)
    figure.supxlabel("one row of each map, head 1: where the marked pixel attends (square-root colour scale)", fontsize=9)
    bar.set_ticks([0, largest / 16, largest / 4, largest], labels=["0", *(f"{largest / n:.2g}" for n in (16, 4, 1))])
    bar.minorticks_off()


def _label_times(axes: "Axes") -> None:
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("number of tokens N")
    axes.set_ylabel("time of one forward pass (ms)")
    axes.grid(which="major", color="0.9")
    axes.legend(frameon=False)


def _name(one: Sharpness) -> str:
    mechanism = {"softmax": "softmax", "linear": "linear (ELU + 1)"}.get(one.mechanism, one.mechanism)
    return mechanism if one.power is None else f"{mechanism}, p = {one.power:g}"


def style() -> Any:
    """The matplotlib context for drawing figures; raises MissingExtraError without matplotlib."""
    require("train", "matplotlib")
    import matplotlib

    return matplotlib.rc_context(STYLE)


def new_figure(width: float, height: float) -> Any:
    """An empty figure, its size in inches, that is rendered with Agg and needs no display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained")
