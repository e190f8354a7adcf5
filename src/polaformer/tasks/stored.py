"""The recipe that a run was begun with, read from its folder. Needs no PyTorch."""

from pathlib import Path

from polaformer.errors import DataError, SettingsError
from polaformer.tasks.options import with_values
from polaformer.tasks.recipe import Recipe
from polaformer.tasks.registry import DEFAULT, find_task
from polaformer.training.run import CONFIG, Run


def recipe_of(folder: Path) -> tuple[Run, Recipe]:
    """A run and the recipe that it was begun with; raises DataError."""
    run, config = Run.open(folder)
    try:
        kind = find_task(config.get("task", DEFAULT)).recipe
        return run, with_values(kind(name=str(config["recipe"])), config["options"])
    except SettingsError as error:
        raise DataError(f"{folder / CONFIG} cannot be used: {error}") from error
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{folder / CONFIG} is damaged: {error}; restore it") from error
