"""What a finished training run prints and writes: a results table, the report, and the paths of its files."""

import shlex
from typing import TYPE_CHECKING

from polaformer.cli.output import new_table, print_all, print_json
from polaformer.tasks.recipe import as_values

if TYPE_CHECKING:
    from polaformer.analysis.report import RunResult
    from polaformer.tasks.recipe import Recipe
    from polaformer.tasks.running import FinishedRun


def report_run(finished: "FinishedRun", *, command: str, json: bool) -> None:
    """Writes report.html into the run directory and prints the results; with several processes, only the main one does."""
    from polaformer.analysis.report import write_report

    if not finished.is_main:
        return
    name, noun = finished.job.recipe.name, finished.job.recipe.terms.sample_noun
    path = finished.run.folder / "report.html"
    write_report(path, name, [as_run_result(finished, name)], command=training_command(finished.job.recipe))
    files = {"run": finished.run.folder, "report": path, "weights": finished.run.model}
    records = {split: counts.record() for split, counts in finished.counts.items()}
    if json:
        first = next(iter(records.values()))
        about = {"command": command, "recipe": name, "result": first, "splits": records}
        print_json(about | {key: str(value) for key, value in files.items()})
        return
    for split, counts in finished.counts.items():
        table = new_table(f"{name} on {records[split]['samples']:,} {noun} ({_named(finished, split)})", "", "")
        for label, text in counts.summary().items():
            table.add_row(label, text)
        print_all(table)
    print_all(*(f"{key}: {value}" for key, value in files.items()))
    inputs = finished.job.recipe.example_inputs
    print_all(f"try it: polaformer predict {inputs} --checkpoint {finished.run.folder}")


def training_command(recipe: "Recipe") -> str:
    """The command that trains a recipe, with the options that differ from the registered one."""
    from polaformer.cli.options import as_arguments
    from polaformer.cli.train import find_recipe
    from polaformer.errors import SettingsError

    try:
        known = find_recipe(recipe.name)
    except SettingsError:
        known = type(recipe)()
    return shlex.join(["polaformer", "train", recipe.name, *as_arguments(recipe, known)])


def _is_training(finished: "FinishedRun", split: str) -> bool:
    """Whether a split has the images that were trained on."""
    return split in finished.job.same_as_train


def _named(finished: "FinishedRun", split: str) -> str:
    noun = finished.job.recipe.terms.sample_noun
    return f"{split}: the training {noun}" if _is_training(finished, split) else split


def as_run_result(finished: "FinishedRun", name: str) -> "RunResult":
    """A finished training run in the form that `write_report` takes."""
    from polaformer.analysis.report import RunResult
    from polaformer.training.journal import read

    recipe, (split, counts) = finished.job.recipe, next(iter(finished.counts.items()))
    return RunResult(
        name=name,
        parameters=sum(parameter.numel() for parameter in finished.predictor.model.parameters()),
        terms=recipe.terms,
        split="training" if _is_training(finished, split) else split,
        record=counts.record(),
        summary=counts.summary(),
        num_unreadable=len(counts.bad),
        journal=read(finished.run.folder),
        settings=as_values(recipe),
        figures=finished.job.figures(finished.predictor, finished.counts),
    )
