"""What a finished training prints and writes: a table, the report, where the files are."""

from typing import TYPE_CHECKING

from polaformer.cli.output import new_table, print_all, print_json
from polaformer.recipes.classification import Classification
from polaformer.recipes.options import as_values

if TYPE_CHECKING:
    from polaformer.analysis.report import RunResult
    from polaformer.recipes.running import Finished


def report(finished: "Finished", recipe: Classification, *, command: str, json: bool) -> None:
    """Writes report.html into the run, and prints what came out; in one process of many."""
    from polaformer.analysis.report import write_report
    from polaformer.training.run import writing

    if not finished.is_main:
        return
    path = finished.run.folder / "report.html"
    with writing(path):
        write_report(
            path, recipe.name, [result_of(finished, recipe, recipe.name)], command=f"polaformer {command} {recipe.name}"
        )
    record = finished.counts.record()
    files = {"run": finished.run.folder, "report": path, "weights": finished.run.model}
    if json:
        print_json({"command": command, "recipe": recipe.name, "result": record} | {k: str(v) for k, v in files.items()})
        return
    table = new_table(f"{recipe.name} on {record['samples']:,} validation images", "", "")
    table.add_row("accuracy", f"{record['accuracy']:.2f} %")
    table.add_row("correct", f"{record['correct']:,}")
    table.add_row("loss", f"{record['loss']:.4f}")
    print_all(table, *(f"{name}: {value}" for name, value in files.items()))
    print_all(f"try it: polaformer predict IMAGE --checkpoint {finished.run.folder}")


def result_of(finished: "Finished", recipe: Classification, name: str) -> "RunResult":
    """A finished training as the report wants it."""
    from polaformer.analysis.report import RunResult
    from polaformer.training.journal import read

    journal = read(finished.run.folder)
    return RunResult(name, finished.classifier, finished.counts, journal, finished.job.data.val, as_values(recipe))
