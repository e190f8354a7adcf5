"""The paper's table of the Long Range Arena, and where each of its rows comes from. Needs no PyTorch."""

from typing import NamedTuple

from polaformer.tasks.sequence.datasets import DatasetName

TASKS: tuple[DatasetName, ...] = ("text", "listops", "retrieval", "pathfinder", "image")  # the columns, in the paper's order
SOURCES = {
    "L": "copied from the Long Range Arena's leaderboard: other models, sizes and recipes; not comparable with the others",
    "S": "copied from Skyformer's Table 1, the mean of three seeds",
    "H": "probably copied from Hedgehog's paper",
    "?": "not traced; it differs from Skyformer's Table 1, and is probably the authors' own run of Skyformer's code",
    "P": "the authors' own run",
}


class Printed(NamedTuple):
    """A row of the paper's table: accuracies in %, by the columns of TASKS, and a key of SOURCES."""

    accuracies: tuple[float, float, float, float, float]
    source: str


ROWS: dict[str, Printed] = {
    "softmax": Printed((61.55, 38.71, 80.93, 70.39, 39.14), "?"),
    "local": Printed((52.98, 15.82, 53.39, 66.63, 41.46), "L"),
    "linear": Printed((65.90, 16.13, 53.09, 75.30, 42.34), "L"),
    "reformer": Printed((56.10, 37.27, 53.40, 68.50, 38.07), "L"),
    "performer": Printed((65.40, 18.01, 53.82, 77.05, 42.77), "L"),
    "synthesizer": Printed((61.68, 36.99, 54.67, 69.45, 41.61), "L"),
    "longformer": Printed((62.85, 35.63, 56.89, 69.71, 42.22), "L"),
    "informer": Printed((62.13, 37.05, 79.35, 56.44, 37.86), "?"),
    "bigbird": Printed((64.02, 36.05, 59.29, 74.87, 40.83), "L"),
    "linformer": Printed((57.29, 36.44, 77.85, 65.39, 38.43), "?"),
    "kernelized": Printed((60.02, 38.46, 82.11, 69.86, 32.63), "?"),
    "cosformer": Printed((63.54, 37.20, 80.28, 70.00, 35.84), "?"),
    "nystrom": Printed((62.36, 37.95, 80.89, 69.34, 38.94), "?"),
    "skyformer": Printed((64.70, 38.69, 82.06, 70.73, 40.77), "S"),
    "hedgehog": Printed((64.60, 37.15, 82.24, 74.16, 40.15), "H"),
    "pola-a3": Printed((73.06, 37.35, 80.50, 70.53, 42.15), "P"),
    "pola-a5": Printed((72.33, 38.76, 80.37, 68.98, 41.91), "P"),
    "pola-a7": Printed((71.93, 37.60, 81.47, 69.09, 42.77), "P"),
}


def printed_accuracy(row: str, task: DatasetName) -> float | None:
    """The accuracy that the paper prints, in %; None if the row is not in its table."""
    return ROWS[row].accuracies[TASKS.index(task)] if row in ROWS else None


# The throughput table. The paper prints no unit; its numbers are batch × N / milliseconds of a training step, counting one of
# the two documents of Retrieval. Milliseconds per step that follow from them:
MILLISECONDS: dict[str, dict[DatasetName, float]] = {
    "softmax": {"image": 356.0, "pathfinder": 189.5, "listops": 163.0, "text": 520.0, "retrieval": 563.5},
    "kernelized": {"image": 304.0, "pathfinder": 161.5, "listops": 132.0, "text": 400.5, "retrieval": 452.5},
    "nystrom": {"image": 209.5, "pathfinder": 116.5, "listops": 78.5, "text": 98.5, "retrieval": 132.0},
    "linformer": {"image": 162.5, "pathfinder": 124.0, "listops": 124.0, "text": 135.0, "retrieval": 154.5},
    "informer": {"image": 3053.5, "pathfinder": 437.0, "listops": 214.5, "text": 251.5, "retrieval": 458.5},
    "skyformer": {"image": 284.0, "pathfinder": 175.0, "listops": 104.5, "text": 138.0, "retrieval": 188.0},
    "pola-a3": {"image": 195.5, "pathfinder": 123.0, "listops": 69.0, "text": 149.5, "retrieval": 190.0},
}
# Peak memory relative to softmax. Those of pola on Text and Retrieval are for half batches.
MEMORY: dict[str, dict[DatasetName, float]] = {
    "kernelized": {"image": 1.35, "pathfinder": 1.35, "listops": 1.36, "text": 0.68, "retrieval": 1.20},
    "nystrom": {"image": 0.62, "pathfinder": 0.62, "listops": 0.27, "text": 0.12, "retrieval": 0.22},
    "linformer": {"image": 0.36, "pathfinder": 0.36, "listops": 0.20, "text": 0.10, "retrieval": 0.18},
    "informer": {"image": 0.56, "pathfinder": 0.56, "listops": 0.61, "text": 0.34, "retrieval": 0.38},
    "skyformer": {"image": 0.84, "pathfinder": 0.84, "listops": 0.38, "text": 0.18, "retrieval": 0.33},
    "pola-a3": {"image": 0.47, "pathfinder": 0.47, "listops": 0.26, "text": 0.067, "retrieval": 0.127},
}


def printed_speedup(row: str, task: DatasetName) -> float | None:
    """How many times more tokens per millisecond than softmax, in the paper's table; None if the row is not in it."""
    return MILLISECONDS["softmax"][task] / MILLISECONDS[row][task] if row in MILLISECONDS else None


def printed_memory(row: str, task: DatasetName) -> float | None:
    """Peak memory relative to softmax in the paper's table; None if the row is not in it."""
    return MEMORY.get(row, {}).get(task)
