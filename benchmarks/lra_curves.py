"""Draws the validation accuracy of every run of a sweep against its updates, from the journals.

Usage: python benchmarks/lra_curves.py SWEEP_DIRECTORY curves.png [TITLE]
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def curve(run: Path) -> tuple[list[int], list[float]]:
    """Updates and accuracies in % of the evaluations of a run."""
    records = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    found = [record for record in records if record["kind"] == "eval"]
    return [record["step"] for record in found], [record["accuracy"] for record in found]


def main(sweep: str, picture: str, title: str = "") -> None:
    """Draw one line per run."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for run in sorted(path.parent for path in Path(sweep).glob("*/*/journal.jsonl")):
        steps, accuracies = curve(run)
        if steps:
            axes.plot(steps, accuracies, marker="o", markersize=4, label=run.parent.name)
    axes.set_xlabel("updates")
    axes.set_ylabel("accuracy on validation data (%)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:])
