"""Opens the datasets of the Long Range Arena by name, in their released form or in the prepared one."""

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from polaformer.data.sources.lra import prepared
from polaformer.data.sources.lra.datasets import DATASETS
from polaformer.data.sources.lra.generation import STATE
from polaformer.data.sources.lra.sequences import SequenceSplit
from polaformer.errors import DataError


class DatasetModule(Protocol):
    """What the module of each dataset defines."""

    CLASSES: tuple[str, ...]

    def holds(self, path: Path) -> bool:
        """Whether the path has the dataset's released form; quick, and never raises."""
        ...

    def load(self, path: Path, advance: Callable[[int, int], object] = ...) -> dict[str, SequenceSplit]:
        """The splits in the released form; raises DataError. advance: called with what is done, and with the total."""
        ...

    def statistics(self, split: SequenceSplit) -> dict[str, Any]:
        """Facts about a split, for JSON."""
        ...


def find_dataset(name: str) -> DatasetModule:
    """The module of a dataset; raises ValueError."""
    if name not in DATASETS:
        raise ValueError(f"there is no dataset {name!r}; choose one of {', '.join(DATASETS)}")
    return cast(DatasetModule, import_module(f"polaformer.data.sources.lra.{name}"))


def recognise(path: str | Path) -> str | None:
    """The name of the dataset at a path, in prepared or released form; None if it is none of them.

    An array file is not recognised: it may hold images for any task.
    """
    path = Path(path)
    if prepared.holds(path):
        with suppress(DataError):
            name = prepared.read_manifest(path)["dataset"]
            return name if name in DATASETS else None
        return None
    if path.suffix == ".npz":
        return None
    return next((name for name in DATASETS if find_dataset(name).holds(path)), None)


def open_sequences(
    path: str | Path, dataset: str, advance: Callable[[int, int], object] = lambda done, total: None
) -> dict[str, SequenceSplit]:
    """The splits of a dataset, in prepared or released form; raises DataError.

    advance: called with how much is read, and with the total.
    """
    path, module = Path(path), find_dataset(dataset)
    if not path.exists():
        raise DataError(f"there is no file or folder {path}; check the path")
    if prepared.holds(path):
        found = prepared.read_manifest(path)
        _check_dataset(path, found["dataset"], dataset)
        if tuple(found["classes"]) != module.CLASSES:
            raise DataError(f"{path} has other classes than {', '.join(module.CLASSES)}; write it again with `polaformer data`")
        return prepared.load(path)
    if any((folder / STATE).exists() for folder in (path, path.parent)):
        raise DataError(f"{path} is not complete; `polaformer data {dataset}` with the same options resumes it")
    if not module.holds(path):
        _check_dataset(path, recognise(path) or dataset, dataset)
    return module.load(path, advance)  # which says what is wrong


def _check_dataset(path: Path, found: str, wanted: str) -> None:
    if found != wanted:
        raise DataError(f"{path} holds the dataset {found!r}, not {wanted!r}; give other data, or the name of this dataset")
