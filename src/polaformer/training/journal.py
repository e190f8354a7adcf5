"""The journal of a run: one line of JSON every N updates and per evaluation; also as CSV and for TensorBoard.

Times are stored under "wall"; everything else is bit-identical in a run that was killed and resumed.
"""

import csv
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polaformer.errors import DataError
from polaformer.regular_files import NotRegularError, open_to_write, read_regular, reason, write_atomically

NAME = "journal.jsonl"


class Journal:
    """Append lines to the journal of a run, after its first `size` bytes, which are those that the checkpoint knows of."""

    def __init__(self, folder: Path, size: int = 0) -> None:
        self.path = folder / NAME
        try:
            self.handle = open_to_write(self.path)
        except NotRegularError as error:
            raise DataError(f"{self.path} is not a regular file; restore it, or start a new run") from error
        if os.fstat(self.handle).st_size < size:
            os.close(self.handle)
            raise DataError(f"{self.path} is shorter than when the checkpoint was written; restore it, or start a new run")
        os.ftruncate(self.handle, size)  # lines after the checkpoint are written again
        os.lseek(self.handle, size, os.SEEK_SET)
        self.size = size

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line."""
        line = (json.dumps(record, sort_keys=True, allow_nan=False) + "\n").encode()
        rest = memoryview(line)
        while len(rest):
            rest = rest[os.write(self.handle, rest) :]
        self.size += len(line)

    def sync(self) -> None:
        """Waits until all lines are on the disk."""
        os.fsync(self.handle)

    def close(self) -> None:
        """Closes the file."""
        os.close(self.handle)


def read(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of a journal; a last line that a kill cut off is left out."""
    return list(_lines(folder / NAME))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    try:
        text = read_regular(path).decode("utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}; restore the file") from error
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}; restore the file") from error


def write_csv(folder: Path) -> Path:
    """Writes the journal as a table to metrics.csv: one row per line, one column per key."""
    rows = [_flat(record) for record in read(folder)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path = folder / "metrics.csv"
    write_atomically(path, text.getvalue())
    return path


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    wall = record.get("wall", {})
    return {name: value for name, value in record.items() if not isinstance(value, dict | list)} | wall


class TensorBoardLog:
    """The numbers of the journal for TensorBoard; after resuming, older ones from step `first_step` on are dropped."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def write(self, record: dict[str, Any]) -> None:
        """Writes the numbers of one line of the journal."""
        for name, value in _flat(record).items():
            if isinstance(value, int | float) and name not in ("step", "epoch"):
                self.writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self) -> None:
        """Closes the file."""
        self.writer.close()
