"""`polaformer models`: the models of a task with their sizes, next to the paper's numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from polaformer.cli.output import load, new_table, print_all, print_json, progress_bar
from polaformer.tasks.registry import DEFAULT, find_task
from polaformer.tasks.task import ListedModel, ListedModels

if TYPE_CHECKING:
    from rich.table import Table

    from polaformer.analysis.counting import ModelCounts


@dataclass(frozen=True)
class Models:
    """List the models: attention of each stage, parameters, MACs, and the paper's numbers.

    Example: polaformer models "pola_swin*"

    Example: polaformer models --attention all

    Example: polaformer models "pola_pvt*" --attention focused mobile
    """

    pattern: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="PATTERN")]] = "*"
    """Model names to list; * matches anything, as in "*_384"."""
    task: str = DEFAULT
    """Task whose models to list: classification, detection, sequence, or one of another package."""
    attention: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: none)")] = ()
    """Mechanisms to use instead of each model's own, or "all". Classification without PATTERN: rows of the paper's Table 1."""
    json: bool = False
    """Print the result as JSON on stdout, and nothing else."""

    def run(self) -> int:
        """Counts parameters and MACs of each model and prints the table."""
        task = find_task(self.task)
        load("polaformer.analysis.counting")
        listed = task.models(self.pattern, self.attention)
        counts = _count_all(listed)
        if self.json:
            records = [_record(model, one) for model, one in zip(listed.models, counts, strict=True)]
            print_json({"command": "models", "models": records})
        else:
            _show(listed, counts)
        return 0


def _count_all(listed: ListedModels) -> "list[ModelCounts]":
    import torch

    from polaformer.analysis.counting import count_pass

    found: list[ModelCounts] = []
    with progress_bar() as bar, torch.device("meta"):
        task = bar.add_task("counting", total=len(listed.models))
        for model in listed.models:
            bar.update(task, description=f"counting {model.name}")
            found.append(count_pass(model.build(), model.forward))
            bar.advance(task)
    return found


def _record(model: ListedModel, counts: "ModelCounts") -> dict[str, Any]:
    from polaformer.analysis.counting import is_reproduced

    record = {"name": model.name, **model.about, **counts._asdict()}
    if model.printed is None:
        return record
    params, flops = is_reproduced(model.printed, counts)
    return record | {
        "paper": {
            "params_millions": float(model.printed.params),
            "gflops": float(model.printed.flops),
            "top1": model.printed.top1,
            "params_reproduced": params,
            "gflops_reproduced": flops,
            "why_not": model.mismatch_reason,
        }
    }


def _show(listed: ListedModels, counts: "list[ModelCounts]") -> None:
    rows: list[tuple[str, ...]] = []
    starts: list[bool] = []  # whether a section begins with the row
    marks: list[str] = []
    before = ""
    grouped = len({model.name for model in listed.models}) < len(listed.models)
    for model, one in zip(listed.models, counts, strict=True):
        starts.append(grouped and before not in ("", model.name))
        before, row = model.name, model.printed
        about = [text(model) for text in listed.columns.values()]
        printed = f"{row.params} / {row.flops}" if row else ""
        if model.mismatch_reason is not None:
            title = ", ".join([model.name, *about] if grouped else [model.name])
            marks.append(f"[{len(marks) + 1}] {title}: {model.mismatch_reason}.")
            printed += f" [{len(marks)}]"
        paper = f"{one.paper_params / 1e6:.2f} / {one.paper_macs / 1e9:.2f}"
        numbers = f"{one.params / 1e6:.2f}", f"{one.macs / 1e9:.2f}", paper
        rows.append((model.name, *about, *numbers, printed, f"{row.top1:.1f}" if row else ""))
    num_printed = sum(model.printed is not None for model in listed.models)
    summary = (
        [f"\n{num_printed - len(marks)} of {num_printed} printed rows are reproduced to the digit; the exceptions:"]
        if marks
        else []
    )
    columns = ("model", *listed.columns, "params (M)", "MACs (G)", "paper's way", "printed", "top-1")
    print_all(_table(listed.title, columns, rows, starts), *listed.notes, *summary, *marks)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], starts: Sequence[bool]) -> "Table":
    """The rows without the columns in which all are empty; starts: whether a section begins with each row."""
    kept = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    table = new_table(title, *(columns[index] for index in kept))
    table.columns[0].no_wrap = True
    for row, is_start in zip(rows, starts, strict=True):
        if is_start:
            table.add_section()
        table.add_row(*(row[index] for index in kept))
    return table
