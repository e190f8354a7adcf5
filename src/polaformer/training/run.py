"""A run directory: config.json, journal.jsonl, metrics.csv, tensorboard/, checkpoints/, at the end model.safetensors."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polaformer.errors import DataError, SettingsError
from polaformer.regular_files import locked, read_regular, reason, write_atomically, writing
from polaformer.training import checkpoint

CONFIG, MODEL, CHECKPOINTS = "config.json", "model.safetensors", "checkpoints"
VERSION = 1


class Run:
    """The directory of one training run, from its first update to the weights that are shipped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / CHECKPOINTS
        self.model = folder / MODEL

    @staticmethod
    def create(folder: Path, config: dict[str, Any]) -> "Run":
        """Creates a run; raises SettingsError if the directory is not empty, CannotWriteError if it cannot be created."""
        Run.check_new(folder)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / CONFIG, json.dumps({"version": VERSION, **config}, indent=2, sort_keys=True) + "\n")
        return Run(folder)

    @staticmethod
    def check_new(folder: Path) -> None:
        """Raises SettingsError if the directory is not empty, CannotWriteError if one of its parents is a file."""
        with writing(folder):
            if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
                hint = f"resume it with `polaformer resume {folder}`, or " if (folder / CONFIG).exists() else ""
                raise SettingsError(f"{folder} is not empty; {hint}give another directory with --out")

    @staticmethod
    def open(folder: Path) -> tuple["Run", dict[str, Any]]:
        """Opens an existing run; returns it and its configuration. Raises DataError."""
        path = folder / CONFIG
        if not os.path.exists(path):
            raise DataError(f"{folder} is not a run directory: it has no {CONFIG}; give the one `polaformer train` printed")
        try:
            config = json.loads(read_regular(path))
            if not isinstance(config, dict):
                raise ValueError("it is not a configuration")
            if config.pop("version", None) is not VERSION:
                raise ValueError("it is from another version of polaformer")
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise DataError(f"{path} is damaged: {reason(error)}; restore it") from error
        return Run(folder), config

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the run for this process; however the process ends, the operating system releases the lock."""
        with locked(self.folder, "trained"):
            yield


def weights_file(path: Path) -> Path:
    """The weights file of a run (shipped, or in its newest valid checkpoint) or of a checkpoint; a file is returned as it is.

    Every byte of a checkpoint is checked first, and its EMA is preferred, if there is one. Raises DataError.
    """
    if not path.is_dir():
        return path
    if (path / MODEL).is_file() and not (path / checkpoint.MANIFEST).exists():
        return path / MODEL
    if (path / CHECKPOINTS).is_dir():
        found = checkpoint.newest(path / CHECKPOINTS)
        if found is None:
            raise DataError(f"{path} has no checkpoint yet; continue training, or give another run")
        folder, files = found.path, found.files
    elif (path / checkpoint.MANIFEST).exists():
        folder, files = path, checkpoint.read(path)
    else:
        raise DataError(f"{path} is neither a run nor a checkpoint; give a run, a checkpoint in it, or a weights file")
    return folder / ("ema.safetensors" if "ema.safetensors" in files else MODEL)
