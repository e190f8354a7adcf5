"""All attention mechanisms in one figure: time and memory against the number of tokens, one group per column."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polaformer.analysis.bench_figures import MARKERS, Line
from polaformer.analysis.figures import new_figure, style
from polaformer.analysis.training_figures import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from polaformer.bench import runner

IN_ALL: dict[str, dict[str, Any]] = {
    "softmax": {"color": "black", "linestyle": "--", "linewidth": 1.5, "marker": "x", "zorder": 3},
    "pola": {"color": PALETTE[0], "linewidth": 4, "marker": "o", "zorder": 1.5},  # below the others, which it would hide
}
GROUPS = {
    "rivals of the paper's Table 1": ("efficient", "hydra", "enhanced", "angular", "focused", "mobile"),
    "feature maps": ("linear", "performer", "cosformer", "hedgehog"),
    "low rank and sampling": ("linformer", "nystrom", "skyformer", "informer"),
    "sparse and full": ("local", "longformer", "bigbird", "reformer", "kernelized", "synthesizer"),
}
MAX_LABELS = 5  # per axis, which is narrow


def grouped(names: Sequence[str]) -> dict[str, list[str]]:
    """The names in each of GROUPS, without those of IN_ALL; names that are in no group go to the last one."""
    found = {title: [name for name in members if name in names] for title, members in GROUPS.items()}
    placed = {name for members in GROUPS.values() for name in members} | set(IN_ALL)
    found[list(GROUPS)[-1]] += [name for name in names if name not in placed]
    return found


def save_mechanisms(path: Path, mechanisms: Mapping[str, "runner.LengthCurve"], *, title: str) -> None:
    """Time above, memory below, against the number of tokens on logarithmic axes; softmax and pola in every panel."""
    times = {name: {n: point.median for n, point in one.points.items()} for name, one in mechanisms.items()}
    memory = {name: {n: point.sizes.get("forward") for n, point in one.points.items()} for name, one in mechanisms.items()}
    with style():
        figure = new_figure(12.0, 7.4)
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        rows = figure.subplots(3, len(GROUPS), height_ratios=(3, 3, 0.9), squeeze=False)
        for row, curves, scale in ((rows[0], times, 1e3), (rows[1], memory, 2.0**-20)):
            for axes, names in zip(row, grouped(list(times)).values(), strict=True):
                _draw(axes, [name for name in (*names, *IN_ALL) if name in curves], curves, scale)
            _share_y(row)
        for column, name in zip(rows.T, GROUPS, strict=True):
            column[0].set_title(name, loc="left")
            column[1].set_xlabel("number of tokens N")
            column[2].axis("off")
            column[2].legend(*column[0].get_legend_handles_labels(), loc="upper center", ncols=2, frameon=False, fontsize=9)
        rows[0][0].set_ylabel("time of one call (ms)")
        rows[1][0].set_ylabel("peak memory of forward (MiB)")
        figure.savefig(path)


def _draw(axes: "Axes", names: Sequence[str], curves: Mapping[str, Line], scale: float) -> None:
    """One line per mechanism; colours follow the order of the names."""
    looks = zip(cycle(PALETTE[1:]), cycle(MARKERS), strict=False)
    for name in names:
        look = IN_ALL[name] if name in IN_ALL else dict(zip(("color", "marker"), next(looks), strict=True))
        points = [(n, scale * y) for n, y in curves[name].items() if y]
        axes.plot([n for n, _ in points], [y for _, y in points], markersize=4, label=name, **look)
    axes.set(xscale="log", yscale="log")
    lengths = sorted({n for curve in curves.values() for n in curve})
    step = -(-len(lengths) // MAX_LABELS)
    axes.set_xticks(lengths, labels=[f"{n}" if i % step == 0 else "" for i, n in enumerate(lengths)])
    axes.minorticks_off()
    axes.grid(which="major", color="0.9")
    axes.set_axisbelow(True)


def _share_y(row: Sequence["Axes"]) -> None:
    """One range for all panels of a row, with tick labels on the first only."""
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    low, high = min(axes.get_ylim()[0] for axes in row), max(axes.get_ylim()[1] for axes in row)
    for axes in row:
        axes.set_ylim(low, high)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}") if axes is row[0] else NullFormatter())
