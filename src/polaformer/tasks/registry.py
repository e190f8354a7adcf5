"""The tasks by name: built-in ones, and those of other packages, found through the entry-point group `polaformer.tasks`.

Importable without PyTorch. Another package declares a task in its pyproject.toml:

    [project.entry-points."polaformer.tasks"]
    ink = "ink_task:TASK"

where TASK is an instance of a subclass of `polaformer.tasks.task.Task`. Every Python process of the same environment finds
the entry points: `resume`, torchrun's processes, data workers.
"""

from functools import cache
from os import PathLike
from typing import TYPE_CHECKING, NamedTuple

from polaformer.errors import DataError, SettingsError, nearest
from polaformer.tasks.classification.task import CLASSIFICATION
from polaformer.tasks.detection.task import DETECTION
from polaformer.tasks.recipe import COMMAND_OPTIONS, Recipe, option_names
from polaformer.tasks.segmentation.task import SEGMENTATION
from polaformer.tasks.sequence.task import SEQUENCE
from polaformer.tasks.task import Task

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "polaformer.tasks"
OURS: tuple[Task, ...] = (CLASSIFICATION, SEQUENCE, DETECTION, SEGMENTATION)
DEFAULT = CLASSIFICATION.name  # for weights files and runs that do not name a task


class Tasks(NamedTuple):
    """The tasks by name, and one line for every entry point that cannot be used."""

    found: dict[str, Task]
    problems: list[str]


@cache
def tasks() -> Tasks:
    """All tasks; a broken task of another package does not affect the others."""
    from importlib.metadata import entry_points  # slow to import, and --help does not need it

    found, problems = {task.name: task for task in OURS}, list[str]()
    for entry in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        try:
            task = _load_task(entry)
            if task.name in found:
                raise ValueError(f"there is already a task {task.name!r}")
            found[task.name] = task
        except Exception as error:
            # Another package's code may fail in any way. The task is then missing, and a request for it reports why.
            problems.append(f"the task {entry.name!r} of {entry.value} cannot be used: {type(error).__name__}: {error}")
    return Tasks(found, problems)


def _load_task(entry: "EntryPoint") -> Task:
    task = entry.load()
    if not isinstance(task, Task):
        raise TypeError(f"{entry.value} is a {type(task).__name__}, not an instance of polaformer.tasks.task.Task")
    if not issubclass(task.recipe, Recipe) or task.recipe.task != task.name:
        raise TypeError(f"{task.recipe.__name__} is not a Recipe whose `task` is {task.name!r}")
    if others := [one.name for one in task.recipes if type(one) is not task.recipe]:
        raise TypeError(f"{', '.join(others)} cannot be resumed: make them instances of {task.recipe.__name__} itself")
    if taken := COMMAND_OPTIONS & set(option_names(task.recipe)):
        raise TypeError(f"{task.recipe.__name__} has the field {min(taken)!r}, an option of `polaformer train`; rename it")
    return task


def find_task(name: str) -> Task:
    """The task of that name; raises SettingsError with the nearest name and the problems of other packages' tasks."""
    found, problems = tasks()
    if name not in found:
        why = f" ({'; '.join(problems)})" if problems else ""
        raise SettingsError(
            f"there is no task {name!r}; {nearest(name, found)}there are {', '.join(found)}; is the package that provides it "
            f"installed?{why}"
        )
    return found[name]


def task_of_weights(path: str | PathLike[str]) -> Task:
    """The task that a weights file names, by default classification; loads PyTorch, raises DataError."""
    from polaformer.weights.files import read_metadata

    try:
        return find_task(read_metadata(path).get("task", DEFAULT))
    except SettingsError as error:
        raise DataError(f"{path}: {error}") from error
