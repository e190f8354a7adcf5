"""`polaformer models`: every model by name, how large it is, and what the paper says of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from polaformer.cli.errors import UsageError
from polaformer.cli.output import load, new_table, print_all, print_json, progress_bar
from polaformer.errors import nearest

if TYPE_CHECKING:
    from polaformer.analysis.counting import Counts
    from polaformer.backbones.published import Published

TABLE_1 = ("pola_deit_tiny", "pola_swin_tiny")
RIVAL_NOTES = (
    "The mechanism stands in all stages; in Swin in the first two, over the whole grid, with softmax windows after them.",
    "Columns as in `polaformer models`: millions of parameters, billions of multiplications of matrices, the paper's way of",
    "counting, what it prints. Products that a mechanism makes element by element (Hydra's, all features) are in no column.",
)
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

    Example: polaformer models --attention all

    Example: polaformer models "pola_pvt*" --attention focused mobile
    """

    pattern: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="PATTERN")]] = "*"
    """Names to show; * stands for anything, as in "*_384"."""
    attention: tuple[str, ...] = ()
    """Mechanisms in the place of each model's own, or "all"; without a PATTERN: the rows of the paper's Table 1."""
    json: bool = False
    """Print the result as JSON on stdout and nothing else there."""

    def run(self) -> int:
        """Counts each model and prints the table."""
        load("polaformer.analysis.counting")
        if self.attention:
            return self._compare()
        from polaformer.analysis.counting import count_named

        names = self._names()
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

    def _names(self) -> list[str]:
        from polaformer.backbones import list_models

        names = list_models(self.pattern)
        if not names:
            raise UsageError(f'no model matches {self.pattern!r}; try "*", or "pola_swin*"')
        return names

    def _compare(self) -> int:
        """The same with other mechanisms."""
        from polaformer.analysis.counting import count_rival

        models = [name for name in self._names() if name.startswith("pola_")] if self.pattern != "*" else list(TABLE_1)
        if not models:
            raise UsageError(f'--attention goes with models of ours, but {self.pattern!r} matches none; try "pola_pvt*"')
        pairs = [(model, mechanism) for model in models for mechanism in self._mechanisms()]
        found: dict[tuple[str, str], Counts] = {}
        with progress_bar() as bar:
            task = bar.add_task("counting", total=len(pairs))
            for model, mechanism in pairs:
                bar.update(task, description=f"counting {model} with {mechanism}")
                found[model, mechanism] = count_rival(model, mechanism)
                bar.advance(task)
        if self.json:
            print_json({"command": "models", "models": [_rival_record(pair, counts) for pair, counts in found.items()]})
        else:
            _show_rivals(found)
        return 0

    def _mechanisms(self) -> list[str]:
        """Those of Table 1 first, in its order."""
        from polaformer.attention import names
        from polaformer.backbones.published import RIVALS

        for name in self.attention:
            if name not in ("all", *names()):
                hint = "a PATTERN goes before --attention; " if "_" in name else nearest(name, names())
                raise UsageError(f"--attention has {name!r}; {hint}there are: all, {', '.join(names())}")
        if "all" not in self.attention:
            return list(dict.fromkeys(self.attention))
        printed = list(dict.fromkeys(mechanism for _, mechanism in RIVALS))
        return [*printed, *(name for name in names() if name not in printed)]


def _rival_record(pair: tuple[str, str], counts: "Counts") -> dict[str, Any]:
    from polaformer.backbones.published import RIVAL_EXCEPTIONS, RIVALS

    record = {"name": pair[0], "mechanism": pair[1], **counts._asdict()}
    row = RIVALS.get(pair)
    return record if row is None else record | {"paper": _paper(row, counts, RIVAL_EXCEPTIONS.get(pair))}


def _show_rivals(found: "dict[tuple[str, str], Counts]") -> None:
    from polaformer.backbones.published import RIVAL_EXCEPTIONS, RIVALS

    table = new_table("Models with other mechanisms", "model", "attention", "M", "G", "paper's way", "printed", "top-1")
    table.columns[0].no_wrap = True
    marks: list[str] = []
    before = ""
    for (model, mechanism), counts in found.items():
        if before not in ("", model):
            table.add_section()
        before, row = model, RIVALS.get((model, mechanism))
        printed, why = f"{row.params} / {row.flops}" if row else "", RIVAL_EXCEPTIONS.get((model, mechanism))
        if why is not None:
            marks.append(f"[{len(marks) + 1}] {model}, {mechanism}: {why}.")
            printed += f" [{len(marks)}]"
        table.add_row(model, mechanism, *_counted(counts), printed, f"{row.top1:.1f}" if row else "")
    rows = [pair for pair in found if pair in RIVALS]
    summary = [f"\n{len(rows) - len(marks)} of {len(rows)} printed rows come out to the digit; not these:"] if marks else []
    print_all(table, *RIVAL_NOTES, *summary, *marks)


def _counted(counts: "Counts") -> tuple[str, str, str]:
    """In full: millions of parameters, billions of multiplications; and the paper's way."""
    paper = f"{counts.paper_params / 1e6:.2f} / {counts.paper_macs / 1e9:.2f}"
    return f"{counts.params / 1e6:.2f}", f"{counts.macs / 1e9:.2f}", paper


def _paper(row: "Published", counts: "Counts", why_not: str | None) -> dict[str, Any]:
    from polaformer.analysis.counting import is_reproduced

    params, flops = is_reproduced(row, counts)
    return {
        "params_millions": float(row.params),
        "gflops": float(row.flops),
        "top1": row.top1,
        "params_reproduced": params,
        "gflops_reproduced": flops,
        "why_not": why_not,
    }


def _record(name: str, counts: "Counts") -> dict[str, Any]:
    from polaformer.backbones.published import EXCEPTIONS, ROWS
    from polaformer.backbones.registry import MODELS

    row = ROWS.get(name)
    record: dict[str, Any] = {"name": name, "img_size": MODELS[name].img_size, "attention": list(MODELS[name].attention)}
    record |= counts._asdict()
    if row is not None:
        record["paper"] = _paper(row, counts, EXCEPTIONS.get(name))
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
            printed += f" [{len(marks)}]"
        table.add_row(
            name,
            str(MODELS[name].img_size),
            _letters(MODELS[name].attention),
            *_counted(counts),
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
