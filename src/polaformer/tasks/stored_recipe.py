"""Loads the recipe of a run from its directory. Needs no PyTorch."""

from pathlib import Path

from polaformer.errors import DataError, SettingsError
from polaformer.tasks.options import with_values
from polaformer.tasks.recipe import Recipe
from polaformer.tasks.registry import DEFAULT, find_task
from polaformer.training.run import CONFIG, Run


def load_recipe(run_directory: Path) -> Recipe:
    """The recipe that a run was started with; raises DataError."""
    config = Run.open(run_directory)[1]
    try:
        kind = find_task(config.get("task", DEFAULT)).recipe
        return with_values(kind(name=str(config["recipe"])), config["options"])
    except SettingsError as error:
        raise DataError(f"{run_directory / CONFIG} cannot be used: {error}") from error
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{run_directory / CONFIG} is damaged: {error}; restore it") from error
