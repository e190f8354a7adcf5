"""The folder of a run: config.json, journal.jsonl, metrics.csv, tensorboard/, checkpoints/, at the end model.safetensors."""

import fcntl
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polaformer.errors import DataError, SettingsError
from polaformer.regular_files import open_to_write, read_regular, reason, write_atomically, writing
from polaformer.training import checkpoint

CONFIG, MODEL, CHECKPOINTS, LOCK = "config.json", "model.safetensors", "checkpoints", ".lock"
VERSION = 1


class Run:
    """A folder that holds one training, from its first update to the weights that are shipped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / CHECKPOINTS
        self.model = folder / MODEL

    @staticmethod
    def create(folder: Path, config: dict[str, Any]) -> "Run":
        """A new run; raises SettingsError if there is something already, CannotWriteError if it cannot be made."""
        Run.check_new(folder)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / CONFIG, json.dumps({"version": VERSION, **config}, indent=2, sort_keys=True) + "\n")
        return Run(folder)

    @staticmethod
    def check_new(folder: Path) -> None:
        """Raises SettingsError where there is something already, CannotWriteError below a file."""
        with writing(folder):
            if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
                hint = f"resume it with `polaformer resume {folder}`, or " if (folder / CONFIG).exists() else ""
                raise SettingsError(f"{folder} is not empty; {hint}give another folder with --out")

    @staticmethod
    def open(folder: Path) -> tuple["Run", dict[str, Any]]:
        """A run that exists, and its configuration; raises DataError."""
        path = folder / CONFIG
        if not os.path.exists(path):
            raise DataError(f"{folder} is no run: there is no {CONFIG} in it; give the folder that `polaformer train` named")
        try:
            config = json.loads(read_regular(path))
            if not isinstance(config, dict):
                raise ValueError("it is no configuration")
            if config.pop("version", None) is not VERSION:
                raise ValueError("it is of another version of polaformer")
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise DataError(f"{path} is damaged: {reason(error)}; restore it") from error
        return Run(folder), config

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Held by one process at a time; let go of by the system when the process ends in whatever way."""
        with writing(self.folder / LOCK):
            handle = open_to_write(self.folder / LOCK)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise SettingsError(f"{self.folder} is being trained by another process; wait for it, or stop it") from error
        except OSError as error:
            warnings.warn(
                f"{self.folder} cannot be locked ({error.strerror}); see to it that one process trains it", stacklevel=2
            )
        try:
            yield
        finally:
            os.close(handle)


def weights_of(path: Path) -> Path:
    """The file of weights of a run (shipped, or of its newest valid checkpoint), of a checkpoint, or the file itself.

    Of a checkpoint, every byte is checked first; where there is an average of the weights, it is taken. Raises DataError.
    """
    if not path.is_dir():
        return path
    if (path / MODEL).is_file() and not (path / checkpoint.MANIFEST).exists():
        return path / MODEL
    if (path / CHECKPOINTS).is_dir():
        found = checkpoint.newest(path / CHECKPOINTS)
        if found is None:
            raise DataError(f"{path} has no checkpoint yet; train on, or give another one")
        folder, files = found.path, found.files
    elif (path / checkpoint.MANIFEST).exists():
        folder, files = path, checkpoint.read(path)
    else:
        raise DataError(f"{path} is neither a run nor a checkpoint; give a run, a checkpoint in it, or a file of weights")
    return folder / ("ema.safetensors" if "ema.safetensors" in files else MODEL)
