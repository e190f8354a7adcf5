"""A sweep: recipes with options, each trained with several seeds, described by TOML files. Needs no PyTorch.

    seeds = [0, 1, 2]           # for every cell without its own

    [options]                   # for every cell; a cell's own take precedence
    epochs = 5

    [[cell]]
    name = "pola"
    recipe = "digits/pola-vit-tiny"

    [[cell]]
    name = "softmax"
    recipe = "digits/pola-vit-tiny"
    options = { attention = "softmax" }

Nothing in a file is evaluated. TOML has no null; the string "None" means None, as on the command line.
"""

import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from polaformer.errors import DataError, SettingsError, nearest
from polaformer.regular_files import read_regular, reason
from polaformer.tasks.changes import with_changes
from polaformer.tasks.options import unwrap_optional, with_values
from polaformer.tasks.recipe import Recipe

MAX_BYTES = 2**20  # of one file
MAX_SEED = 2**63 - 1
RESULTS = ("results.json", "results.csv")  # beside the directories of the cells
FILE_KEYS, CELL_KEYS = ("seeds", "options", "cell"), ("name", "recipe", "seeds", "options")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,99}")

FindRecipe = Callable[[str], Recipe]  # by name; raises SettingsError


class Cell(NamedTuple):
    """A row of the result table: a recipe with its options, and the seeds to train it with."""

    name: str
    recipe: Recipe
    seeds: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SweepRun:
    """A cell with one seed, and its run directory; equal only to itself."""

    cell: str
    seed: int
    recipe: Recipe
    folder: Path

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"{self.cell}, seed {self.seed}"

    @property
    def log(self) -> Path:
        """The file for everything that its process prints."""
        return self.folder.with_name(f"{self.seed}.log")


def plan_runs(cells: Iterable[Cell], out: Path) -> list[SweepRun]:
    """All runs, cell by cell, each in the directory OUT/CELL/SEED."""
    return [
        SweepRun(cell.name, seed, replace(cell.recipe, seed=seed), out / cell.name / str(seed))
        for cell in cells
        for seed in cell.seeds
    ]


def read_cells(files: Sequence[str | PathLike[str]], find: FindRecipe) -> list[Cell]:
    """The cells of all files.

    Raises DataError with all files that cannot be read; otherwise SettingsError with all problems in all cells.
    """
    tables, unreadable = list[tuple[str, dict[str, Any]]](), list[str]()
    for file in files:
        try:
            tables.append((str(file), _read_toml(file)))
        except DataError as error:
            unreadable.append(str(error))
    if unreadable:
        raise DataError(*unreadable)
    reader = _Reader(find)
    for name, table in tables:
        reader.read(name, table)
    if reader.problems:
        raise SettingsError(reader.problems)
    return reader.found


def _read_toml(file: str | PathLike[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(read_regular(file, MAX_BYTES).decode())
    except OSError as error:
        raise DataError(f"{file} cannot be read: {reason(error)}; give a TOML file that describes a sweep") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not valid UTF-8 (at byte {error.start}); give a TOML file") from error
    except RecursionError as error:
        raise DataError(f"{file} is not a sweep file: it is nested too deeply") from error
    except ValueError as error:
        raise DataError(f"{file} is not valid TOML: {error}; correct it") from error


class _Reader:
    """Collects the cells of all files, and the problems in them."""

    def __init__(self, find: FindRecipe) -> None:
        self.find = find
        self.found: list[Cell] = []
        self.problems: list[str] = []
        self.names: dict[str, str] = {}  # in lower case, for case-insensitive file systems → where the name is used

    def read(self, file: str, table: dict[str, Any]) -> None:
        """Adds the cells of one file."""
        self._check_keys(file, table, FILE_KEYS)
        cells = table.get("cell", [])
        if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
            self.problems.append(f"{file}: cell is not an array of tables; begin each cell with [[cell]]")
            return
        if not cells:
            self.problems.append(f"{file}: there is no cell; begin one with [[cell]], its name and its recipe")
        options = self._options(file, table)
        for number, cell in enumerate(cells, start=1):
            self._read_cell(file, number, {"seeds": table.get("seeds")} | cell, options)

    def _read_cell(self, file: str, number: int, cell: dict[str, Any], shared: dict[str, Any]) -> None:
        name = cell.get("name")
        where = f"{file}, cell {name!r}" if isinstance(name, str) else f"{file}, cell {number}"
        before = len(self.problems)
        self._check_keys(where, cell, CELL_KEYS)
        self._check_name(where, name)
        seeds = self._seeds(where, cell["seeds"])
        recipe = self._recipe(where, cell.get("recipe"), shared | self._options(where, cell))
        if len(self.problems) == before:
            assert recipe is not None
            self.found.append(Cell(str(name), recipe, seeds))

    def _check_keys(self, where: str, table: dict[str, Any], known: Sequence[str]) -> None:
        for key in table:
            if key not in known:
                self.problems.append(f"{where}: unknown key {key!r}; {nearest(key, known)}the keys are {', '.join(known)}")

    def _check_name(self, where: str, name: Any) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name.lower() in RESULTS:
            given = "has no name" if name is None else f"is called {name!r}"
            self.problems.append(
                f"{where} {given}; give a valid directory name: letters, digits and _ . + = -, not beginning with a dot or dash"
            )
            return
        if name.lower() in self.names:
            self.problems.append(f"{where}: {self.names[name.lower()]} already has that name; give each cell its own")
        self.names.setdefault(name.lower(), where)

    def _seeds(self, where: str, seeds: Any) -> tuple[int, ...]:
        allowed = f"give a list of distinct integers from 0 to {MAX_SEED}, such as seeds = [0, 1, 2]"
        if seeds is None:
            self.problems.append(f"{where}: neither the cell nor its file has seeds; {allowed}")
        elif not isinstance(seeds, list) or not seeds or not all(_is_seed(seed) for seed in seeds):
            self.problems.append(f"{where}: seeds is {seeds}; {allowed}")
        elif len(set(seeds)) < len(seeds):
            self.problems.append(f"{where}: seeds is {seeds}, with a duplicate; {allowed}")
        else:
            return tuple(seeds)
        return ()

    def _options(self, where: str, table: dict[str, Any]) -> dict[str, Any]:
        options = table.get("options", {})
        if not isinstance(options, dict):
            self.problems.append(f"{where}: options is {options!r}; give a table of recipe options, such as epochs = 5")
            return {}
        misplaced = [name for name in ("seed", "seeds") if name in options]
        for name in misplaced:
            self.problems.append(f"{where}: {name} is among the options; give seeds = [0, 1, 2] above them instead")
        return {name: value for name, value in options.items() if name not in misplaced}

    def _recipe(self, where: str, name: Any, options: dict[str, Any]) -> Recipe | None:
        if not isinstance(name, str):
            given = "there is no recipe" if name is None else f"recipe is {name!r}"
            self.problems.append(f'{where}: {given}; name one, such as recipe = "digits/pola-vit-tiny"')
            return None
        try:
            recipe = self.find(name)
            return with_values(recipe, _convert_none(recipe, options), change=with_changes)
        except SettingsError as error:
            self.problems += [f"{where}: {problem}" for problem in error.problems]
            return None


def _is_seed(seed: Any) -> bool:
    return isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed <= MAX_SEED


def _convert_none(recipe: Recipe, options: dict[str, Any]) -> dict[str, Any]:
    """The options with None for the string "None", where an option may be None."""
    hints = get_type_hints(type(recipe))
    return {
        name: None if value == "None" and name in hints and unwrap_optional(hints[name])[1] else value
        for name, value in options.items()
    }
