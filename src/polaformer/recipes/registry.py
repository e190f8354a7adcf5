"""The recipes by name: ours, and those of other packages' tasks."""

from collections.abc import Iterator, Mapping
from functools import cache

from polaformer.errors import SettingsError, nearest
from polaformer.recipes import ade20k, camvid, cifar10, coco, digits, imagenet, lra, photos
from polaformer.tasks.recipe import Recipe
from polaformer.tasks.registry import tasks

_MODULES = (digits, cifar10, photos, imagenet, coco, ade20k, camvid, lra)
OURS: dict[str, Recipe] = {recipe.name: recipe for module in _MODULES for recipe in module.RECIPES}


@cache
def recipes() -> Mapping[str, Recipe]:
    """All recipes; if two have the same name, ours takes precedence, then that of the first task."""
    found: dict[str, Recipe] = {}
    for recipe in (*OURS.values(), *_external_recipes()):
        found.setdefault(recipe.name, recipe)
    return found


def _external_recipes() -> Iterator[Recipe]:
    for task in tasks().found.values():
        yield from task.recipes


def problems() -> list[str]:
    """The reasons why recipes of other packages cannot be used, one line each."""
    hidden = [recipe.name for recipe in _external_recipes() if recipes()[recipe.name] is not recipe]
    return [*tasks().problems, *(f"another recipe {name!r} hides that of a package" for name in hidden)]


def find(name: str) -> Recipe:
    """The recipe of that name; raises SettingsError with the nearest name."""
    if name not in recipes():
        why = "".join(f"; {problem}" for problem in problems())
        raise SettingsError(f"there is no recipe {name!r}; {nearest(name, recipes())}`polaformer train --help` lists them{why}")
    return recipes()[name]
