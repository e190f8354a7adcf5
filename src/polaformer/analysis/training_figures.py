"""Figures of training runs as PNG bytes: learning curves, confusion matrices, predictions, attention maps, entropies."""

import io
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil, log
from typing import TYPE_CHECKING, Any

from torch import Tensor

from polaformer.analysis.attention_maps import BlockRow
from polaformer.analysis.figures import COLOURS, new_figure, style
from polaformer.tasks.figures import Curves, PredictedImage
from polaformer.training.metric import Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Journal = Sequence[Mapping[str, Any]]  # as polaformer.training.journal.read returns it

# Okabe and Ito's palette, as in polaformer.analysis.figures.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
RIGHT, WRONG = "#009E73", "#D55E00"
STREAMS = {
    "same": COLOURS["polarity, same sign"],
    "opposite": COLOURS["polarity, opposite sign"],
    "softmax": COLOURS["softmax"],
    "linear": COLOURS["linear"],
}
MAX_CLASSES_NUMBERED = 20  # in a confusion matrix with numbers in its cells …
MAX_CLASSES_IN_MATRIX = 100  # … and in any matrix
NUM_PAIRS = 20
BLOCKS_PER_LINE = 6
MAX_NAME_LENGTH = 15


def draw_learning_curves(journals: Mapping[str, Journal], metric: Metric) -> bytes:
    """Draws training loss against epochs, then the validation metric against epochs and against time; one line per run."""
    with _drawing():
        figure = _padded_figure(10.0, 3.5 if len(journals) > 1 else 3.2)
        loss, by_epoch, by_time = figure.subplots(1, 3)
        unit, seconds = _unit_of_time(
            [one["wall"]["seconds"] for journal in journals.values() for one in journal_lines(journal, "eval")]
        )
        for (name, journal), colour in zip(journals.items(), _colours(len(journals)), strict=True):
            look = {"color": colour, "label": shorten(name, 40)}
            _draw_curve(loss, [(one["epoch"], one["loss"]) for one in journal_lines(journal, "train")], look)
            evaluations = journal_lines(journal, "eval")
            _draw_curve(by_epoch, [(one["epoch"], one[metric.name]) for one in evaluations], look)
            _draw_curve(by_time, [(one["wall"]["seconds"] / seconds, one[metric.name]) for one in evaluations], look)
        _label_curves(loss, "epoch", "training loss")
        label = f"validation {metric.label}{f' ({metric.unit})' if metric.unit else ''}"
        _label_curves(by_epoch, "epoch", label)
        _label_curves(by_time, f"training time ({unit})", label)
        if len(journals) > 1:
            _add_legend(figure, loss)
        return _png(figure)


def draw_confusion(confusion: Tensor, classes: Sequence[str], *, in_percent: bool = False) -> bytes:
    """Draws the confusion matrix (K, K), true class by predicted class; for more than 100 classes, the most confused pairs.

    in_percent: cells have their share of the true class, from 1 % on, instead of counts.
    """
    with _drawing():
        is_small = len(classes) <= MAX_CLASSES_IN_MATRIX
        return _png(_matrix(confusion, classes, in_percent) if is_small else _pairs(confusion, classes))


def draw_lines(figure: Curves) -> bytes:
    """Draw named lines through points."""
    with _drawing():
        drawn = _padded_figure(6.0, 3.8)
        axes = drawn.subplots()
        for (name, points), colour in zip(figure.lines.items(), _colours(len(figure.lines)), strict=True):
            axes.plot([x for x, _ in points], [y for _, y in points], color=colour, label=shorten(name, 40))
        _label_curves(axes, figure.x_label, figure.y_label, "nothing to show")
        if figure.unit_square:
            axes.set(xlim=(0, 1), ylim=(0, 1.02))
        if len(figure.lines) > 1:
            _add_legend(drawn, axes)
        return _png(drawn)


def draw_predictions(samples: Sequence[PredictedImage]) -> bytes:
    """Draws the images in the given order, four per line, each titled "true → predicted (probability)" in green or red."""
    columns = min(4, len(samples))
    num_lines = ceil(len(samples) / columns)
    with _drawing():
        figure = _padded_figure(2.0 * max(columns, 2), 2.3 * num_lines)
        panels = list(figure.subplots(num_lines, columns, squeeze=False).flat)
        for panel, sample in zip(panels, samples, strict=False):
            colour = RIGHT if sample.is_right else WRONG
            _draw_image(panel, sample.image)
            panel.set_title(_title(sample), color=colour, fontweight="bold")
            panel.spines[:].set(visible=True, color=colour, linewidth=2.5)
        for panel in panels[len(samples) :]:
            panel.axis("off")
        return _png(figure)


def draw_attention(image: Tensor, rows: Sequence[BlockRow]) -> bytes:
    """Draws the image (channels, height, width) with the query marked, then the query's row of each block, streams below."""
    from matplotlib.gridspec import GridSpec

    groups = [rows[start : start + BLOCKS_PER_LINE] for start in range(0, len(rows), BLOCKS_PER_LINE)]
    num_lines = [max(len(row.heatmaps) for row in group) for group in groups]
    columns = 1 + len(groups[0])
    with _drawing():
        figure = _padded_figure(max(1.6 * columns, 4.0), 1.8 * sum(num_lines) + 0.2)
        grid = GridSpec(sum(num_lines), columns, figure=figure)
        panel = figure.add_subplot(grid[0, 0])
        _draw_image(panel, image)
        _mark_query(panel, image, rows[0])
        panel.set_title("the image\n□ the query")
        for index, group in enumerate(groups):
            for column, row in enumerate(group, start=1):
                for line, stream in enumerate(row.heatmaps, start=sum(num_lines[:index])):
                    _draw_row(figure.add_subplot(grid[line, column]), image, row, stream)
        return _png(figure)


def draw_entropies(runs: Mapping[str, Sequence[BlockRow]]) -> bytes:
    """Draws bars of the mean entropy of each block, stream and run, with a dashed line at ln M, that of uniform attention."""
    bars = {(row.name, name, stream): row for name, rows in runs.items() for row in rows for stream in row.entropy}
    series = list(dict.fromkeys((name, stream) for _, name, stream in bars))
    blocks = sorted({block for block, _, _ in bars}, key=_numbers)
    width = min(0.4, 0.8 / max(Counter(block for block, _, _ in bars).values()))
    centres = _centres(bars, blocks, width)
    with _drawing():
        figure = _padded_figure(min(10.0, max(5.0, 2.0 + 0.42 * len(bars))), 3.6)
        axes = figure.subplots()
        for (name, stream), colour in zip(series, _stream_colours(series), strict=True):
            keys = [(block, name, stream) for block in blocks if (block, name, stream) in bars]
            where = [centres[key] for key in keys]
            drawn = axes.bar(where, [bars[key].entropy[stream] for key in keys], 0.92 * width, color=colour)
            drawn.set_label(stream if len(runs) == 1 else f"{shorten(name, 30)}: {stream}")
            _draw_uniform(axes, where, width, [bars[key].num_keys for key in keys])
            if len(bars) <= 24:
                ink = "white" if colour == PALETTE[0] else "black"
                axes.bar_label(drawn, fmt="%.2f", fontsize=8, label_type="center", color=ink)
        axes.plot([], [], color="black", linestyle="--", linewidth=1, label="uniform: ln M")
        _label_entropies(axes, blocks)
        _add_legend(figure, axes)
        return _png(figure)


def journal_lines(journal: Journal, kind: str) -> list[Mapping[str, Any]]:
    """The lines of one kind ("train" or "eval") of a journal."""
    return [line for line in journal if line.get("kind") == kind]


def block_label(name: str) -> str:
    """A readable label for a module name: "block 1" for blocks.0.attn, "block 2.1" for stages.1.blocks.0.attn."""
    numbers = [str(number + 1) for number in _numbers(name)]
    return f"block {'.'.join(numbers)}" if numbers else name


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def shorten(name: str, length: int = MAX_NAME_LENGTH) -> str:
    """The name on one line, its middle replaced by … if it is too long; characters that UTF-8 cannot encode are escaped."""
    name = " ".join(name.encode("utf-8", "backslashreplace").decode().split())
    tail = length // 3
    return name if len(name) <= length else f"{name[: length - tail - 1]}…{name[-tail:]}"


def _draw_curve(axes: "Axes", points: Sequence[tuple[float, float]], look: Mapping[str, Any]) -> None:
    few = len(points) <= 40
    axes.plot([x for x, _ in points], [y for _, y in points], marker="o" if few else None, markersize=3.5, **look)


def _label_curves(axes: "Axes", x_label: str, y_label: str, without_points: str = "not in the journal") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(color="0.9")
    drawn: Any = axes.get_lines()
    if not any(len(line.get_xdata()) for line in drawn):
        axes.text(0.5, 0.5, without_points, ha="center", va="center", transform=axes.transAxes, color="0.4")
        axes.set(xticks=[], yticks=[])
        return
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=x_label == "epoch"))


def _unit_of_time(seconds: Sequence[float]) -> tuple[str, int]:
    """A unit that suits the longest time, and its length in seconds."""
    longest = max(seconds, default=0.0)
    return ("seconds", 1) if longest < 600 else ("minutes", 60) if longest < 4 * 3600 else ("hours", 3600)


def _matrix(confusion: Tensor, classes: Sequence[str], in_percent: bool) -> Any:
    from matplotlib.colors import PowerNorm

    num_classes = len(classes)
    numbered = num_classes <= MAX_CLASSES_NUMBERED
    side = max(3.4, 0.4 * num_classes + 1.6) if numbered else 7.0
    figure = _padded_figure(side + 0.9, side)
    axes = figure.subplots()
    share = confusion / confusion.sum(dim=1, keepdim=True).clamp(min=1)
    drawn = axes.imshow(share.tolist(), cmap="Blues", norm=PowerNorm(0.5, vmin=0, vmax=1), interpolation="nearest")
    ticks = range(0, num_classes, 1 if numbered else ceil(num_classes / MAX_CLASSES_NUMBERED))
    names = [shorten(classes[tick]) for tick in ticks]
    axes.set_xticks(ticks, names, rotation=0 if max(map(len, names)) <= 3 else 90)
    axes.set_yticks(ticks, names)
    axes.set(xlabel="predicted class", ylabel="true class")
    if numbered:
        _number_cells(axes, (100 * share).round() if in_percent else confusion, share)
    bar = figure.colorbar(drawn, ax=axes, shrink=0.8, label="fraction of the true class\n(square-root scale)")
    bar.set_ticks([0, 0.05, 0.25, 0.5, 1], labels=["0", "5 %", "25 %", "50 %", "100 %"])
    bar.minorticks_off()
    return figure


def _number_cells(axes: "Axes", numbers: Tensor, share: Tensor) -> None:
    for row, column in numbers.nonzero().tolist():
        colour = "white" if share[row, column] > 0.3 else "black"
        axes.text(column, row, str(int(numbers[row, column])), ha="center", va="center", color=colour, fontsize=8)


def _pairs(confusion: Tensor, classes: Sequence[str]) -> Any:
    """Bars of the most frequent errors: pairs of a true class and a predicted one."""
    from matplotlib.ticker import MaxNLocator

    wrong = confusion.clone().fill_diagonal_(0)
    counts, indices = wrong.flatten().topk(NUM_PAIRS)
    pairs = [(count, index) for count, index in zip(counts.tolist(), indices.tolist(), strict=True) if count]
    figure = _padded_figure(8.0, max(1.6, 0.27 * len(pairs) + 1.0))
    axes = figure.subplots()
    if not pairs:
        axes.text(0.5, 0.5, "no errors", ha="center", va="center", transform=axes.transAxes)
        axes.axis("off")
        return figure
    heights = range(len(pairs))[::-1]
    bars = axes.barh(heights, [count for count, _ in pairs], color=WRONG, height=0.7)
    axes.bar_label(bars, fmt="{:,.0f}", padding=2)
    names = [shorten(name, 30) for name in classes]
    axes.set_yticks(heights, [f"{names[index // len(names)]} → {names[index % len(names)]}" for _, index in pairs])
    axes.set_xlabel("number of images (true class → predicted class)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _title(sample: PredictedImage) -> str:
    mark, true, predicted = "✓" if sample.is_right else "✗", shorten(sample.true), shorten(sample.predicted)
    between = " " if len(true) + len(predicted) <= 10 else "\n"
    return f"{mark} {true}{between}→ {predicted} ({100 * sample.probability:.0f} %)"


def _draw_image(panel: "Axes", image: Tensor) -> None:
    pixels = image.permute(1, 2, 0) if len(image) == 3 else image[0]
    interpolation = None if min(image.shape[1:]) >= 64 else "nearest"  # None: matplotlib's default
    panel.imshow(pixels.numpy(), cmap="gray", vmin=0, vmax=1, interpolation=interpolation)
    _hide_axes(panel)


def _draw_row(panel: "Axes", image: Tensor, row: BlockRow, stream: str) -> None:
    height, width = image.shape[1:]
    weights = row.heatmaps[stream]
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)  # that of the image's pixels
    panel.imshow(weights.tolist(), cmap="viridis", vmin=0, extent=extent, interpolation="nearest")
    _mark_query(panel, image, row)
    _hide_axes(panel)
    title = f"{stream}, max. {float(weights.max()):.2g}"
    panel.set_title(title if stream != next(iter(row.heatmaps)) else f"{block_label(row.name)}\n{title}")


def _hide_axes(panel: "Axes") -> None:
    panel.set(xticks=[], yticks=[])
    panel.spines[:].set_visible(False)


def _mark_query(panel: "Axes", image: Tensor, row: BlockRow) -> None:
    """Draws a frame around the query's cell, enlarged if the cell is too small to see."""
    from matplotlib.patches import Rectangle

    sizes = image.shape[1:]
    centre = [(index + 0.5) * size / cells - 0.5 for index, size, cells in zip(row.query, sizes, row.grid, strict=True)]
    height, width = (max(size / cells, 0.08 * size) for size, cells in zip(sizes, row.grid, strict=True))
    corner = (centre[1] - width / 2, centre[0] - height / 2)
    panel.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=WRONG, linewidth=2, clip_on=False))


def _centres(bars: Iterable[tuple[str, str, str]], blocks: Sequence[str], width: float) -> dict[tuple[str, str, str], float]:
    """The centre of each bar (block, run, stream): the bars of a block are side by side around the block's index."""
    found: dict[tuple[str, str, str], float] = {}
    for index, block in enumerate(blocks):
        in_block = [bar for bar in bars if bar[0] == block]
        found |= {bar: index + (i - (len(in_block) - 1) / 2) * width for i, bar in enumerate(in_block)}
    return found


def _draw_uniform(axes: "Axes", centres: Sequence[float], width: float, num_keys: Sequence[int]) -> None:
    left, right = ([centre + side * width / 2 for centre in centres] for side in (-1, 1))
    axes.hlines([log(number) for number in num_keys], left, right, color="black", linestyle="--", linewidth=1)


def _label_entropies(axes: "Axes", blocks: Sequence[str]) -> None:
    labels = [block_label(block) for block in blocks]
    if len(blocks) > 6:
        labels = [label.removeprefix("block ") for label in labels]
        axes.set_xlabel("block")
    axes.set_xticks(range(len(blocks)), labels, rotation=90 if len(blocks) > 16 else 0)
    axes.set_ylabel("entropy per row (nats)")


def _add_legend(figure: Any, axes: "Axes") -> None:
    """Draws the legend above all panels, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    letters = figure.get_figwidth() * 12  # that fit on one line
    columns = max(1, min(len(labels), int(letters / (max(map(len, labels)) + 8))))
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False)


def _stream_colours(series: Sequence[tuple[str, str]]) -> list[str]:
    """The fixed colours of the streams; if several runs share a stream, a different colour for each series."""
    streams = [stream for _, stream in series]
    if len(set(streams)) == len(streams) and set(streams) <= set(STREAMS):
        return [STREAMS[stream] for stream in streams]
    return _colours(len(series))


def _padded_figure(width: float, height: float) -> Any:
    """An empty figure, its size in inches, with padding around its panels."""
    figure = new_figure(width, height)
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, wspace=0.02, hspace=0.02)
    return figure


def _colours(number: int) -> list[str]:
    return [PALETTE[index % len(PALETTE)] for index in range(number)]


@contextmanager
def _drawing() -> Iterator[None]:
    """The style of all figures; a class named $x$ is not parsed as a formula."""
    with style():
        import matplotlib

        with matplotlib.rc_context({"text.parse_math": False}):
            yield


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        # Class names in scripts that the font lacks become boxes; the report also has them as text.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()
