"""The recipes by name."""

from polaformer.errors import SettingsError, nearest
from polaformer.recipes import cifar10, digits, imagenet
from polaformer.recipes.classification import Classification

RECIPES: dict[str, Classification] = {
    recipe.name: recipe for module in (digits, cifar10, imagenet) for recipe in module.RECIPES
}


def find(name: str) -> Classification:
    """The recipe of that name; raises SettingsError, which tells the nearest."""
    if name not in RECIPES:
        raise SettingsError(f"there is no recipe {name!r}; {nearest(name, RECIPES)}`polaformer train --help` lists them")
    return RECIPES[name]
