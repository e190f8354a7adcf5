"""`polaformer models`: every model by name, how large it is, and what the paper says of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from polaformer.cli.errors import UsageError
from polaformer.cli.output import load, new_table, print_all, print_json, progress_bar

if TYPE_CHECKING:
    from polaformer.analysis.counting import Counts

NOTES = (
    "Attention of each stage: L pola, S softmax. Parameters in millions and MACs in billions, for one image of the",
    "native size: everything counted; then the paper's way, with parameters of layers alone, and MACs of linear layers,",
    "convolutions and norms alone, without the products of attention. Printed, and top-1: the paper's ImageNet tables.",
    "The authors released neither DeiT nor PVTv2: these are readings that fit the printed columns.",
)


@dataclass(frozen=True)
class Models:
    """List the models: attention of each stage, parameters, MACs, and the paper's numbers.

    Example: polaformer models "pola_swin*"
    """

    pattern: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="PATTERN")]] = "*"
    """Names to show; * stands for anything, as in "*_384"."""
    json: bool = False
    """Print the result as JSON on stdout and nothing else there."""

    def run(self) -> int:
        """Counts each model and prints the table."""
        load("polaformer.analysis.counting")
        from polaformer.analysis.counting import count_named
        from polaformer.backbones import list_models

        names = list_models(self.pattern)
        if not names:
            raise UsageError(f'no model matches {self.pattern!r}; try "*", or "pola_swin*"')
        found: dict[str, Counts] = {}
        with progress_bar() as bar:
            task = bar.add_task("counting", total=len(names))
            for name in names:
                bar.update(task, description=f"counting {name}")
                found[name] = count_named(name)
                bar.advance(task)
        if self.json:
            print_json({"command": "models", "models": [_record(name, counts) for name, counts in found.items()]})
        else:
            _show(found)
        return 0


def _record(name: str, counts: "Counts") -> dict[str, Any]:
    from polaformer.analysis.counting import is_reproduced
    from polaformer.backbones.published import EXCEPTIONS, ROWS
    from polaformer.backbones.registry import MODELS

    row = ROWS.get(name)
    record: dict[str, Any] = {"name": name, "img_size": MODELS[name].img_size, "attention": list(MODELS[name].attention)}
    record |= counts._asdict()
    if row is not None:
        params, flops = is_reproduced(name, counts)
        record["paper"] = {
            "params_millions": float(row.params),
            "gflops": float(row.flops),
            "top1": row.top1,
            "params_reproduced": params,
            "gflops_reproduced": flops,
            "why_not": EXCEPTIONS.get(name),
        }
    return record


def _show(found: "dict[str, Counts]") -> None:
    from polaformer.backbones.published import EXCEPTIONS, ROWS
    from polaformer.backbones.registry import MODELS

    columns = ("model", "size", "stages", "M", "G", "paper's way", "printed", "top-1")
    table = new_table("Models", *columns)
    table.columns[0].no_wrap = True
    marks: list[str] = []
    for name, counts in found.items():
        row = ROWS.get(name)
        printed = f"{row.params} / {row.flops}" if row else ""
        if name in EXCEPTIONS:
            marks.append(f"[{len(marks) + 1}] {name}: {EXCEPTIONS[name]}.")
            printed += f" \\[{len(marks)}]"
        table.add_row(
            name,
            str(MODELS[name].img_size),
            _letters(MODELS[name].attention),
            f"{counts.params / 1e6:.2f}",
            f"{counts.macs / 1e9:.2f}",
            f"{counts.paper_params / 1e6:.2f} / {counts.paper_macs / 1e9:.2f}",
            printed,
            f"{row.top1:.1f}" if row else "",
        )
    rows = [name for name in found if name in ROWS]
    summary = [f"\n{len(rows) - len(marks)} of {len(rows)} printed rows come out to the digit; not these:"] if marks else []
    print_all(table, *NOTES, *summary, *marks)


def _letters(attention: tuple[str, ...]) -> str:
    """The authors' letter for each stage: L for pola, S for softmax."""
    from polaformer.backbones.mechanisms import LETTERS

    letters = {name: letter for letter, name in LETTERS.items()}
    return "".join(letters[name] for name in attention)
