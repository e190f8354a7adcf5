"""What a finished training prints and writes: a table, the report, where the files are."""

from typing import TYPE_CHECKING

from polaformer.cli.output import new_table, print_all, print_json
from polaformer.tasks.recipe import as_values

if TYPE_CHECKING:
    from polaformer.analysis.report import RunResult
    from polaformer.tasks.running import FinishedRun


def report(finished: "FinishedRun", *, command: str, json: bool) -> None:
    """Writes report.html into the run, and prints what came out; in one process of many."""
    from polaformer.analysis.report import write_report

    if not finished.is_main:
        return
    name, noun = finished.job.recipe.name, finished.job.recipe.terms.sample_noun
    path = finished.run.folder / "report.html"
    write_report(path, name, [result_of(finished, name)], command=f"polaformer {command} {name}")
    files = {"run": finished.run.folder, "report": path, "weights": finished.run.model}
    records = {split: counts.record() for split, counts in finished.counts.items()}
    if json:
        first = next(iter(records.values()))
        about = {"command": command, "recipe": name, "result": first, "splits": records}
        print_json(about | {key: str(value) for key, value in files.items()})
        return
    for split, counts in finished.counts.items():
        table = new_table(f"{name} on {records[split]['samples']:,} {noun} ({split})", "", "")
        for what, text in counts.summary().items():
            table.add_row(what, text)
        print_all(table)
    print_all(*(f"{key}: {value}" for key, value in files.items()))
    print_all(f"try it: polaformer predict INPUT --checkpoint {finished.run.folder}")


def result_of(finished: "FinishedRun", name: str) -> "RunResult":
    """A finished training as the report wants it."""
    from polaformer.analysis.report import RunResult
    from polaformer.training.journal import read

    recipe, (split, counts) = finished.job.recipe, next(iter(finished.counts.items()))
    return RunResult(
        name=name,
        parameters=sum(parameter.numel() for parameter in finished.predictor.model.parameters()),
        terms=recipe.terms,
        split=split,
        record=counts.record(),
        summary=counts.summary(),
        num_unreadable=len(counts.bad),
        journal=read(finished.run.folder),
        settings=as_values(recipe),
        figures=finished.job.figures(finished.predictor, finished.counts),
    )
