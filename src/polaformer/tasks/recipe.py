"""The base of all recipes: a frozen dataclass with every hyperparameter of a training run. Needs no PyTorch."""

import os
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tyro.conf import Suppress

from polaformer.training.metric import TaskTerms
from polaformer.training.settings import Settings

if TYPE_CHECKING:
    from polaformer.tasks.job import TaskJob

POSITIONAL = {"positional": True}  # marks the field that takes the positional arguments
COMMAND_OPTIONS = {"out", "dry_run", "json", "help"}  # options of `polaformer train` itself, besides those of a recipe
NO_OPTION = {"option": False}  # marks a field that describes the recipe and is not an option


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """The settings of a training run, and those that a task adds. Finds its own problems without PyTorch or data."""

    task: ClassVar[str]  # the name in the registry
    terms: ClassVar[TaskTerms]

    name: Suppress[str] = field(default="", metadata=NO_OPTION)
    paper: Suppress[str] = field(default="", metadata=NO_OPTION)
    expected: Suppress[str] = field(default="", metadata=NO_OPTION)
    needs_data: Suppress[bool] = field(default=False, metadata=NO_OPTION)
    needs_checkpoint: Suppress[bool] = field(default=False, metadata=NO_OPTION)

    data: str | None = None
    """Training data."""
    checkpoint: str | None = None
    """Weights to start from: a weights file, a run or a checkpoint."""

    @property
    def command(self) -> str:
        """The command that trains it."""
        weights = " --checkpoint WEIGHTS" if self.needs_checkpoint else ""
        return f"polaformer train {self.name}{' --data DATA' if self.data is None else ''}{weights}"

    @property
    def example_inputs(self) -> str:
        """What stands for the inputs of `polaformer predict` in the hint after training."""
        return "INPUT"

    def problems(self) -> list[str]:
        """All problems with the values, one line each."""
        found = super().problems()
        if self.needs_data and self.data is None:
            found.append(f"{self.name} trains on your own {self.terms.sample_noun}; give them with --data")
        if self.needs_checkpoint and self.checkpoint is None:
            found.append("fine-tuning starts from weights; give a weights file with --checkpoint")
        return found

    def before_training(self) -> list[str]:
        """Notices for the user before anything is loaded; raises MissingExtraError if a package is missing."""
        return []

    def values_with_absolute_paths(self) -> dict[str, Any]:
        """The options for JSON, valid from any working directory; names of data that are not paths stay as they are."""
        from polaformer.data.sources.opening import absolute

        data = None if self.data is None else absolute(self.data)
        checkpoint = None if self.checkpoint is None else os.path.abspath(self.checkpoint)
        return as_values(self) | {"data": data, "checkpoint": checkpoint}

    def without_weights(self) -> Self:
        """The recipe of a run that resumes from its own checkpoint: the weights that it started from are no longer needed."""
        return replace(self, checkpoint=None)

    def job(self) -> "TaskJob":
        """Opens the data and builds the model; loads PyTorch, raises SettingsError or DataError.

        An implementation begins with `raise_all(self.problems(), …)`, so that all problems are reported at once.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement job()")


def option_names(options: Any) -> list[str]:
    """The names of the fields of a dataclass (instance or class) that a user may change."""
    return [one.name for one in fields(options) if one.metadata.get("option", True)]


def as_values(options: Any) -> dict[str, Any]:
    """The options by name, for JSON."""
    return {name: getattr(options, name) for name in option_names(options)}
