"""The contract of a task, checked before any training: its job, its counts, its entry point."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest

import faults
from polaformer.errors import SettingsError
from polaformer.tasks import registry
from polaformer.tasks.classification.job import ClassificationJob
from polaformer.tasks.classification.objective import ClassificationCounts
from polaformer.tasks.classification.recipe import ClassificationRecipe
from polaformer.tasks.recipe import Recipe
from polaformer.tasks.running import train
from polaformer.tasks.task import Task
from polaformer.training.metric import Metric, TaskTerms


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> ClassificationRecipe:
    return faults.tiny(faults.write_data(tmp_path_factory.mktemp("data") / "digits.npz"), epochs=1)


RECORD = ClassificationCounts.record
BROKEN: dict[str, tuple[type, str, Any, str]] = {
    "no metric": (ClassificationCounts, "record", lambda self: {"samples": 0}, "it needs 'accuracy' and 'samples'"),
    "a name of the journal": (ClassificationCounts, "record", lambda self: RECORD(self) | {"step": 1}, "none of .*step"),
    "no task": (ClassificationJob, "metadata", lambda self: {}, "metadata .* name the task None"),
    "another task": (ClassificationJob, "metadata", lambda self: {"task": "ink"}, "name the task 'ink'"),
    "another validation": (ClassificationJob, "splits", ("dev", "test"), "the first one must be 'val'"),
    "no splits": (ClassificationJob, "splits", (), "the first one must be 'val'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_job_that_breaks_its_contract_is_told_before_anything_is_written(
    name: str, recipe: ClassificationRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, attribute, value, message = BROKEN[name]
    monkeypatch.setattr(kind, attribute, value)
    with pytest.raises(TypeError, match=message):
        train(recipe, tmp_path / "run", lambda event, record: None)
    assert not (tmp_path / "run").exists()


@dataclass(frozen=True, kw_only=True)
class InkRecipe(Recipe):
    """A recipe from another package."""

    task: ClassVar[str] = "ink"
    terms: ClassVar[TaskTerms] = TaskTerms(Metric("error"))


@dataclass(frozen=True, kw_only=True)
class LoudRecipe(InkRecipe):
    """With a field that is already an option of `polaformer train`."""

    json: str = ""


class Ink(Task):
    """A task from another package."""

    name = "ink"
    recipe = InkRecipe
    recipes = (InkRecipe(name="ink/tiny"),)


class Renamed(Ink):
    """A task whose recipe names another task."""

    name = "water"


class Twin(Ink):
    """A task whose name is already taken."""

    name = "classification"
    recipe = ClassificationRecipe  # type: ignore[assignment]
    recipes = ()


class Foreign(Ink):
    """A task with recipes that could not be resumed."""

    recipes = (LoudRecipe(name="ink/loud"),)


class Loud(Ink):
    """A task whose options clash with those of the command."""

    recipe = LoudRecipe
    recipes = ()


GOOD, RENAMED, TWIN, FOREIGN, LOUD, NO_TASK = Ink(), Renamed(), Twin(), Foreign(), Loud(), Ink


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """The entry points of other packages; the registry's cache is cleared before and after."""
    found: list[EntryPoint] = []
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found)
    registry.tasks.cache_clear()
    yield found
    registry.tasks.cache_clear()


def entry(name: str) -> EntryPoint:
    return EntryPoint(name.lower(), f"{__name__}:{name}", registry.GROUP)


def test_a_task_of_another_package_is_found(entries: list[EntryPoint], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[self.attr])
    entries.append(entry("GOOD"))
    assert registry.find_task("ink") is GOOD
    assert registry.find_task("classification").name == "classification"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("RENAMED", "InkRecipe is not a Recipe whose `task` is 'water'"),
        ("TWIN", "there is already a task 'classification'"),
        ("FOREIGN", "ink/loud cannot be resumed: make them instances of InkRecipe itself"),
        ("LOUD", "LoudRecipe has the field 'json', an option of `polaformer train`; rename it"),
        ("NO_TASK", "not an instance of polaformer.tasks.task.Task"),
        ("MISSING", "KeyError"),
    ],
)
def test_one_that_cannot_be_used_is_told_to_who_asks_and_disturbs_no_other(
    name: str, message: str, entries: list[EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[self.attr])
    entries.append(entry(name))
    assert registry.find_task("classification").name == "classification"
    with pytest.raises(SettingsError, match="there is no task 'inc'") as caught:
        registry.find_task("inc")
    assert message in str(caught.value)


def test_a_metric_that_is_not_finite_is_a_dash_and_null_and_ends_no_run(
    recipe: ClassificationRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Average precision of nothing is one."""
    from polaformer.cli.run_report import report_run
    from polaformer.cli.training_view import TrainingView

    monkeypatch.setattr(ClassificationCounts, "record", lambda self: RECORD(self) | {"accuracy": float("nan")})
    with TrainingView("name", recipe) as view:
        finished = train(recipe, tmp_path / "run", view)
    report_run(finished, command="train", json=True)
    assert "accuracy –" in capsys.readouterr().err
    assert (tmp_path / "run" / "report.html").is_file()
