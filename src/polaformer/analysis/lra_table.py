"""Runs of the Long Range Arena, collected for a table beside the paper's. Needs no PyTorch.

Runs belong to one cell if they differ only in their seed and in settings that do not change what is learned.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from polaformer.data.sources.lra.datasets import DatasetName
from polaformer.errors import DataError
from polaformer.recipes.lra import build_recipe
from polaformer.tasks.attention_options import parse_attention_options
from polaformer.tasks.recipe import as_values
from polaformer.tasks.sequence.published import ROWS, TASKS, printed_accuracy
from polaformer.tasks.sequence.recipe import SequenceRecipe
from polaformer.tasks.sequence.rows import ARENA_ROWS
from polaformer.tasks.stored_recipe import load_recipe
from polaformer.tasks.sweep import SweepRun
from polaformer.tasks.sweep_state import RunState, read_state
from polaformer.training.run import CONFIG, Run

# Settings that change no result beyond rounding and the draws of dropout, or that the table shows in another place.
NEUTRAL = {"data", "seed", "num_workers", "accumulation", "trim", "steps", "attention", "attention_options", "dataset"}
NEUTRAL |= {"save_every", "save_every_epochs", "keep", "log_every", "log_every_epochs"}
NEUTRAL |= {"grad_checkpointing", "compile", "deterministic"}
READING = ("dataset", "tokenisation", "black", "kept")  # how sequences are read, which the digests of a run depend on


@dataclass(frozen=True)
class FoundRun:
    """A run in a directory, finished or not."""

    folder: Path
    recipe: SequenceRecipe
    state: RunState
    data: str  # the beginning of the digest of the split that the accuracy is for

    @property
    def row(self) -> str:
        """The row of the table that it belongs to; if there is none, the mechanism and its options."""
        own = parse_attention_options(self.recipe.attention_options)
        return nearest_row(self.recipe.attention, own) or " ".join([self.recipe.attention, *_pairs(own)])

    @property
    def setup(self) -> str:
        """What differs from the row's options and the task's recipe and may change the result; "" if nothing does."""
        usual, own = as_values(build_recipe(self.recipe.dataset, "softmax")), as_values(self.recipe)
        changed = [f"{name} {own[name]}" for name in own if name not in NEUTRAL and own[name] != usual[name]]
        return ", ".join([*self._changed_options(), *changed])

    def _changed_options(self) -> list[str]:
        own = parse_attention_options(self.recipe.attention_options)
        name = nearest_row(self.recipe.attention, own)
        if name is None:
            return []
        usual = parse_attention_options(ARENA_ROWS[name].options)
        given = _pairs({one: value for one, value in own.items() if one not in usual or usual[one] != value})
        absent = [f"without {pair}" for pair in _pairs({one: value for one, value in usual.items() if one not in own})]
        return [" ".join(["attention_options", *given, *absent])] if given or absent else []


def nearest_row(attention: str, options: Mapping[str, Any]) -> str | None:
    """The known row of a mechanism with the most options in common; None if it has several rows and none has any."""
    rows = {name: parse_attention_options(row.options) for name, row in ARENA_ROWS.items() if row.attention == attention}
    if len(rows) == 1:
        return next(iter(rows))
    shared = {name: len(own.items() & options.items()) for name, own in rows.items()}
    return max(shared, key=lambda name: shared[name]) if any(shared.values()) else None


def _pairs(options: Mapping[str, Any]) -> list[str]:
    """NAME=VALUE in the order of names, each value spelled in one way."""
    return [f"{name}={_spelled(value)}" for name, value in sorted(options.items())]


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


@dataclass(frozen=True)
class TableCell:
    """The finished runs of one mechanism on one task, with the same steps and setup.

    accuracies: in %, on the test split, or on the validation split if there is none. seconds: of training.
    """

    task: DatasetName
    row: str
    setup: str
    steps: int
    seeds: tuple[int, ...]
    accuracies: tuple[float, ...]
    validation: tuple[float, ...]
    seconds: tuple[float | None, ...]
    folders: tuple[str, ...]

    @property
    def mean(self) -> float:
        """The mean accuracy over seeds."""
        return mean(self.accuracies)

    @property
    def deviation(self) -> float | None:
        """The standard deviation over seeds (divided by n − 1); None for a single one."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else None

    @property
    def text(self) -> str:
        """The accuracy with its spread, and how many seeds and steps it is from."""
        spread = "" if self.deviation is None else f" ± {self.deviation:.2f}"
        seeds = len(set(self.seeds))
        runs = f"{len(self.seeds)} runs of " if len(self.seeds) > seeds else ""
        return f"{self.mean:.2f}{spread} ({runs}{seeds} seed{'s' * (seeds > 1)}, {self.steps:,} steps)"

    def as_record(self) -> dict[str, Any]:
        """The cell for JSON."""
        source = ROWS[self.row].source if self.row in ROWS else None
        printed = {"paper": printed_accuracy(self.row, self.task), "paper_source": source}
        return asdict(self) | {"mean": self.mean, "standard_deviation": self.deviation} | printed


def find_runs(folders: Iterable[Path]) -> list[FoundRun]:
    """All runs on sequences below the folders; raises DataError for one whose journal is damaged."""
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"{folder} is not a directory; give one with runs of `polaformer train` or `table lra --run`")
        for config in sorted(folder.rglob(CONFIG)):
            try:
                recipe = load_recipe(config.parent)
            except DataError:
                continue  # another program's, or of a task that is not installed
            if isinstance(recipe, SequenceRecipe):
                run = SweepRun(recipe.name, recipe.seed, recipe, config.parent)
                found.append(FoundRun(config.parent, recipe, read_state(run), _digest_of_evaluated(config.parent)))
    return found


def _digest_of_evaluated(folder: Path) -> str:
    """The beginning of the digest of the test split that a run recorded, or of the validation split if there is none."""
    digests = (Run.open(folder)[1].get("data") or {}).get("names", {})
    return str(digests.get("test", digests.get("val", "")))[:8]


def collect(runs: Sequence[FoundRun]) -> list[TableCell]:
    """The finished runs as cells, in the order of the known rows, others after them."""
    groups: dict[tuple[DatasetName, str, str, int], list[FoundRun]] = {}
    finished = [run for run in runs if run.state.kind == "finished"]
    for run in finished:
        others = {one.data for one in finished if _reading(one) == _reading(run)} - {run.data}
        setup = ", ".join(filter(None, [run.setup, f"data {run.data}" if others else ""]))
        groups.setdefault((run.recipe.dataset, run.row, setup, run.state.step), []).append(run)
    cells = [_cell(key, sorted(members, key=lambda one: one.recipe.seed)) for key, members in groups.items()]
    places = {name: place for place, name in enumerate(ARENA_ROWS)}
    order = {task: place for place, task in enumerate(TASKS)}
    return sorted(cells, key=lambda one: (places.get(one.row, len(places)), one.row, one.setup, one.steps, order[one.task]))


def _reading(run: FoundRun) -> list[Any]:
    return [getattr(run.recipe, name) for name in READING]


def _cell(key: tuple[DatasetName, str, str, int], runs: list[FoundRun]) -> TableCell:
    records = [run.state.splits for run in runs]
    return TableCell(
        *key,
        seeds=tuple(run.recipe.seed for run in runs),
        accuracies=tuple(float(one.get("test", one["val"])["accuracy"]) for one in records),
        validation=tuple(float(one["val"]["accuracy"]) for one in records),
        seconds=tuple(run.state.seconds for run in runs),
        folders=tuple(str(run.folder) for run in runs),
    )
