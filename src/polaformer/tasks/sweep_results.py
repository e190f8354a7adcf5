"""The results of a sweep: mean, standard deviation and number of seeds per cell, as tables, JSON and CSV. Needs no PyTorch."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import Any

from polaformer.tasks.sweep import SweepRun
from polaformer.tasks.sweep_state import RunState
from polaformer.training.metric import VALIDATION, Metric


@dataclass(frozen=True)
class CellResult:
    """The row of a cell in the table of one split.

    seeds: number of results in the row; planned: number of seeds in all; failed: number of runs that ended with an error.
    standard_deviation: of the sample (divided by n − 1); None for fewer than two results.
    """

    cell: str
    recipe: str
    split: str
    metric: str
    unit: str
    seeds: int
    planned: int
    failed: int
    mean: float | None
    standard_deviation: float | None
    best: float | None
    worst: float | None


@dataclass(frozen=True)
class ResultTable:
    """All cells with the same metric, on one split."""

    metric: Metric
    split: str
    rows: list[CellResult]


@dataclass(frozen=True)
class SweepResults:
    """The runs with their states, and the reasons of those that failed."""

    states: Mapping[SweepRun, RunState]
    failures: Mapping[SweepRun, str]

    def tables(self) -> list[ResultTable]:
        """One table per metric and split, in the order of the cells."""
        metrics = dict.fromkeys(run.recipe.terms.metric for run in self.states)
        return [self._table(metric, split) for metric in metrics for split in self._splits(metric)]

    def _splits(self, metric: Metric) -> list[str]:
        found = [split for run, state in self.states.items() if run.recipe.terms.metric == metric for split in state.splits]
        return list(dict.fromkeys(found)) or [VALIDATION]

    def _table(self, metric: Metric, split: str) -> ResultTable:
        cells: dict[str, list[SweepRun]] = {}
        for run in self.states:
            if run.recipe.terms.metric == metric:
                cells.setdefault(run.cell, []).append(run)
        return ResultTable(metric, split, [self._row(runs, metric, split) for runs in cells.values()])

    def _row(self, runs: Sequence[SweepRun], metric: Metric, split: str) -> CellResult:
        records = [self.states[run].splits.get(split, {}) for run in runs]
        # The journal has null for numbers that are not finite.
        values = [float(record[metric.name]) for record in records if record.get(metric.name) is not None]
        best, worst = (max, min) if metric.higher_is_better else (min, max)
        return CellResult(
            cell=runs[0].cell,
            recipe=runs[0].recipe.name,
            split=split,
            metric=metric.name,
            unit=metric.unit,
            seeds=len(values),
            planned=len(runs),
            failed=sum(run in self.failures for run in runs),
            mean=mean(values) if values else None,
            standard_deviation=stdev(values) if len(values) > 1 else None,
            best=best(values, default=None),
            worst=worst(values, default=None),
        )

    def record(self) -> dict[str, Any]:
        """Every run, and every row of every table, for JSON."""
        return {
            "runs": [self._run_record(run, state) for run, state in self.states.items()],
            "cells": [asdict(row) for table in self.tables() for row in table.rows],
        }

    def _run_record(self, run: SweepRun, state: RunState) -> dict[str, Any]:
        failed = self.failures.get(run)
        return {
            "cell": run.cell,
            "seed": run.seed,
            "recipe": run.recipe.name,
            "state": "failed" if failed is not None else state.kind,
            "reason": failed,
            "folder": str(run.folder),
            "log": str(run.log),
            "step": state.step,
            "total": state.total,
            "seconds": state.seconds,
            "metric": run.recipe.terms.metric.name,
            "result": state.splits.get(VALIDATION),
            "splits": state.splits,
        }

    def csv(self) -> str:
        """The rows of all tables as CSV."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(CellResult.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for table in self.tables() for row in table.rows)
        return text.getvalue()
