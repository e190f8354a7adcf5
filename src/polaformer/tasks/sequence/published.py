"""The paper's table of the Long Range Arena, and where each of its rows comes from. Needs no PyTorch."""

from typing import NamedTuple

from polaformer.data.sources.lra.datasets import DatasetName

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


class PrintedSpeed(NamedTuple):
    """A row of the paper's table of throughput, by the columns of TASKS.

    milliseconds: of a training step. The paper prints no unit; its numbers are batch × N / milliseconds, counting one of the
    two documents of Retrieval. memory: peak, relative to softmax; those of pola on Text and Retrieval are for half batches.
    """

    milliseconds: tuple[float, float, float, float, float]
    memory: tuple[float, float, float, float, float]


SPEED: dict[str, PrintedSpeed] = {
    "softmax": PrintedSpeed((520.0, 163.0, 563.5, 189.5, 356.0), (1.0, 1.0, 1.0, 1.0, 1.0)),
    "kernelized": PrintedSpeed((400.5, 132.0, 452.5, 161.5, 304.0), (0.68, 1.36, 1.2, 1.35, 1.35)),
    "nystrom": PrintedSpeed((98.5, 78.5, 132.0, 116.5, 209.5), (0.12, 0.27, 0.22, 0.62, 0.62)),
    "linformer": PrintedSpeed((135.0, 124.0, 154.5, 124.0, 162.5), (0.1, 0.2, 0.18, 0.36, 0.36)),
    "informer": PrintedSpeed((251.5, 214.5, 458.5, 437.0, 3053.5), (0.34, 0.61, 0.38, 0.56, 0.56)),
    "skyformer": PrintedSpeed((138.0, 104.5, 188.0, 175.0, 284.0), (0.18, 0.38, 0.33, 0.84, 0.84)),
    "pola-a3": PrintedSpeed((149.5, 69.0, 190.0, 123.0, 195.5), (0.067, 0.26, 0.127, 0.47, 0.47)),
}


def printed_speedup(row: str, task: DatasetName) -> float | None:
    """How many times more tokens per millisecond than softmax, in the paper's table; None if the row is not in it."""
    column = TASKS.index(task)
    return SPEED["softmax"].milliseconds[column] / SPEED[row].milliseconds[column] if row in SPEED else None


def printed_memory(row: str, task: DatasetName) -> float | None:
    """Peak memory relative to softmax in the paper's table; None if the row is not in it."""
    return SPEED[row].memory[TASKS.index(task)] if row in SPEED else None
