"""Keeps the curves of runs as CSV files, and draws them.

Usage: python benchmarks/curves.py collect SWEEP_DIRECTORY curves.csv
       python benchmarks/curves.py draw curves.csv METRIC curves.png [TITLE]

`collect` reads the journals of all runs below a sweep's directory and adds their evaluations to the file, or replaces those of
the same cell and seed. `draw` draws a metric against updates, one line per run.
"""

import csv
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

KEYS = ("cell", "seed", "step")


def evaluations(run: Path) -> list[dict[str, str]]:
    """The numbers of every evaluation of a run, and the loss of the last logged update before it."""
    found, loss = [], ""
    for line in (run / "journal.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "train":
            loss = f"{record['loss']:.5g}"
        elif record["kind"] == "eval":
            numbers = {name: f"{one:.5g}" for name, one in record.items() if isinstance(one, float) and name != "epoch"}
            found.append({"cell": run.parent.name, "seed": run.name, "step": str(record["step"]), "train_loss": loss} | numbers)
    return found


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file, none if there is no such file."""
    return list(csv.DictReader(path.open(newline=""))) if path.exists() else []


def collect(sweep: str, target: str) -> None:
    """Adds the runs of a sweep to the file."""
    new = [row for path in sorted(Path(sweep).glob("*/*/journal.jsonl")) for row in evaluations(path.parent)]
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
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=f"{cell}, seed {seed}" if several else cell)
    axes.set_xlabel("updates")
    axes.set_ylabel(f"{metric.replace('_', ' ')} (validation)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    commands = {"collect": collect, "draw": draw}
    if len(sys.argv) < 4 or sys.argv[1] not in commands:
        raise SystemExit(__doc__)
    commands[sys.argv[1]](*sys.argv[2:])
