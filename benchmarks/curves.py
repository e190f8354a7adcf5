"""Keeps the curves of runs as CSV files, and draws them.

Usage: python benchmarks/curves.py collect SWEEP_DIRECTORY curves.csv
       python benchmarks/curves.py draw curves.csv METRIC curves.png [TITLE]

`collect` reads the journals of all runs below a sweep's directory and adds the losses of logged updates and the evaluations to
the file, or replaces those of the same cell and seed. `draw` draws a metric against updates, one line per run. Losses are those
of single updates, so each point is the mean of GROUP logged ones.
"""

import csv
import json
import sys
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

KEYS, LOSS = ("cell", "seed", "step"), "train_loss"
GROUP = 5


def measured(run: Path) -> list[dict[str, str]]:
    """The loss of every logged update of a run, and the numbers of every evaluation, by update."""
    found: dict[int, dict[str, str]] = {}
    for line in (run / "journal.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] in ("train", "eval"):
            row = found.setdefault(
                record["step"], dict(zip(KEYS, (run.parent.name, run.name, str(record["step"])), strict=True))
            )
            names = {"loss": LOSS} if record["kind"] == "train" else {name: name for name in record if name != "epoch"}
            row |= {new: f"{record[old]:.5g}" for old, new in names.items() if isinstance(record[old], float)}
    return [found[step] for step in sorted(found)]


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file, none if there is no such file."""
    return list(csv.DictReader(path.open(newline=""))) if path.exists() else []


def collect(sweep: str, target: str) -> None:
    """Adds the runs of a sweep to the file."""
    new = [row for path in sorted(Path(sweep).glob("*/*/journal.jsonl")) for row in measured(path.parent)]
    replaced = {(row["cell"], row["seed"]) for row in new}
    rows = [row for row in read(Path(target)) if (row["cell"], row["seed"]) not in replaced] + new
    columns = list(dict.fromkeys([*KEYS, *(name for row in rows for name in row)]))
    with Path(target).open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def draw(source: str, metric: str, picture: str, title: str = "") -> None:
    """Draws one line per run."""
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in read(Path(source)):
        if row.get(metric):
            lines.setdefault((row["cell"], row["seed"]), []).append((int(row["step"]), float(row[metric])))
    if not lines:
        raise SystemExit(f"{source} has no {metric!r}; the columns are the first line of the file")
    several = len({seed for _, seed in lines}) > 1
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (cell, seed), points in lines.items():
        if metric == LOSS:
            groups = [points[start : start + GROUP] for start in range(0, len(points), GROUP)]
            points = [(group[-1][0], mean(loss for _, loss in group)) for group in groups]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=f"{cell}, seed {seed}" if several else cell)
    axes.set_xlabel("updates")
    axes.set_ylabel("loss (training)" if metric == LOSS else f"{metric.replace('_', ' ')} (validation)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    commands = {"collect": collect, "draw": draw}
    if len(sys.argv) < 4 or sys.argv[1] not in commands:
        raise SystemExit(__doc__)
    commands[sys.argv[1]](*sys.argv[2:])
