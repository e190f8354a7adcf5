"""The recipes by name: ours, and those of tasks from outside."""

from collections.abc import Iterator, Mapping
from functools import cache

from polaformer.errors import SettingsError, nearest
from polaformer.recipes import cifar10, digits, imagenet, photos
from polaformer.tasks.recipe import Recipe
from polaformer.tasks.registry import tasks

OURS: dict[str, Recipe] = {recipe.name: recipe for module in (digits, cifar10, photos, imagenet) for recipe in module.RECIPES}


@cache
def recipes() -> Mapping[str, Recipe]:
    """All recipes; of two with one name ours is taken, or that of the task that comes first."""
    found: dict[str, Recipe] = {}
    for recipe in (*OURS.values(), *_from_outside()):
        found.setdefault(recipe.name, recipe)
    return found


def _from_outside() -> Iterator[Recipe]:
    for task in tasks().found.values():
        yield from task.recipes


def problems() -> list[str]:
    """What keeps recipes of other packages from being found, a line each."""
    hidden = [recipe.name for recipe in _from_outside() if recipes()[recipe.name] is not recipe]
    return [*tasks().problems, *(f"there is another recipe {name!r} before that of a package" for name in hidden)]


def find(name: str) -> Recipe:
    """The recipe of that name; raises SettingsError, which tells the nearest."""
    if name not in recipes():
        why = "".join(f"; {problem}" for problem in problems())
        raise SettingsError(f"there is no recipe {name!r}; {nearest(name, recipes())}`polaformer train --help` lists them{why}")
    return recipes()[name]
