"""What the recipes of all tasks have in common: a frozen dataclass with every number of a training. Needs no PyTorch."""

import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from tyro.conf import Suppress

from polaformer.training.metric import TaskTerms
from polaformer.training.settings import Settings

if TYPE_CHECKING:
    from polaformer.tasks.job import TaskJob

POSITIONAL = {"positional": True}  # of a field that takes the words that belong to no option
COMMAND_OPTIONS = {"out", "dry_run", "json", "help"}  # which `polaformer train` has besides those of a recipe
NO_OPTION = {"option": False}  # of a field that says something about the recipe, and is no option of a training


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """A training: its settings, and what a task adds to them. Knows all its problems without PyTorch or data."""

    task: ClassVar[str]  # as the registry knows it
    terms: ClassVar[TaskTerms]

    name: Suppress[str] = field(default="", metadata=NO_OPTION)
    paper: Suppress[str] = field(default="", metadata=NO_OPTION)
    expected: Suppress[str] = field(default="", metadata=NO_OPTION)
    needs_data: Suppress[bool] = field(default=False, metadata=NO_OPTION)
    needs_checkpoint: Suppress[bool] = field(default=False, metadata=NO_OPTION)

    data: str | None = None
    """What to train on."""
    checkpoint: str | None = None
    """Weights to start from: a weights file, a run or a checkpoint."""

    @property
    def command(self) -> str:
        """What trains it."""
        weights = " --checkpoint WEIGHTS" if self.needs_checkpoint else ""
        return f"polaformer train {self.name}{' --data DATA' if self.data is None else ''}{weights}"

    def problems(self) -> list[str]:
        """Everything that makes no sense, a line each."""
        found = super().problems()
        if self.needs_data and self.data is None:
            found.append(f"{self.name} trains on your own {self.terms.sample_noun}; give them with --data")
        if self.needs_checkpoint and self.checkpoint is None:
            found.append("fine-tuning starts from weights; give their file with --checkpoint")
        return found

    def before_training(self) -> list[str]:
        """What to tell the user before anything is loaded; raises MissingExtraError where a package is missing."""
        return []

    def from_anywhere(self) -> dict[str, Any]:
        """The options for JSON, with paths that hold from any folder; the names of data that are no paths stay as they are."""
        from polaformer.data.sources.opening import absolute

        data = None if self.data is None else absolute(self.data)
        checkpoint = None if self.checkpoint is None else os.path.abspath(self.checkpoint)
        return as_values(self) | {"data": data, "checkpoint": checkpoint}

    def job(self) -> "TaskJob":
        """The recipe with its data opened and its model made; loads PyTorch, raises SettingsError or DataError.

        A task begins with `raise_all(self.problems(), …)`, so that whatever is wrong is told at once.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how to make a job of it")


def option_names(options: Any) -> list[str]:
    """The fields of a dataclass, or of its class, that a user may change."""
    return [one.name for one in fields(options) if one.metadata.get("option", True)]


def as_values(options: Any) -> dict[str, Any]:
    """The options by name, for JSON."""
    return {name: getattr(options, name) for name in option_names(options)}
