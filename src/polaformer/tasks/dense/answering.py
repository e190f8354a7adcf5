"""Images in, files out: what `predict` does for detectors and segmenters around the model."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL.Image import Image

from polaformer.data.images import read_image
from polaformer.errors import DataError, SettingsError, printable
from polaformer.regular_files import write_atomically, writing


def readable_images(
    inputs: Sequence[str], unreadable: list[str], advance: Callable[[], object]
) -> Iterator[tuple[int, str, Image]]:
    """The index, the path and the image of each input that can be read.

    Adds a line to `unreadable` for every other one, and calls `advance` after each.
    """
    for index, path in enumerate(inputs):
        try:
            image = read_image(path, channels=3)
        except DataError as error:
            unreadable.append(str(error))
        else:
            yield index, path, image
        advance()


class DrawnFiles:
    """A directory for the drawn images of several inputs, and one JSON file; none of them overwrites another, or an input.

    stems: by input, the names of its files without their endings. Raises SettingsError, before anything is written, if a file
    is one of the inputs, and CannotWriteError.
    """

    def __init__(self, folder: Path, inputs: Sequence[str], endings: Sequence[str], document: str) -> None:
        self.folder, self.document = folder, document
        self.stems = _free_stems(inputs, endings)
        _check_no_input(folder, [*(stem + ending for stem in self.stems for ending in endings), document], inputs)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def save(self, image: Image, name: str) -> None:
        """Writes an image; raises CannotWriteError."""
        with writing(self.folder / name):
            image.save(self.folder / name)

    def write_document(self, value: Any) -> None:
        """Writes the JSON file atomically; raises CannotWriteError."""
        with writing(self.folder):
            write_atomically(self.folder / self.document, json.dumps(value, indent=1))


def _free_stems(inputs: Sequence[str], endings: Sequence[str]) -> list[str]:
    """A name for each input, its own if possible, such that no two files with these endings have the same name."""
    stems, taken = list[str](), set[str]()
    for path in inputs:
        base = printable(Path(path).stem).replace("/", "_") or "image"
        choices = (f"{base}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, len(taken) + 3))))
        stem = next(one for one in choices if not taken & {one + ending for ending in endings})
        taken |= {stem + ending for ending in endings}
        stems.append(stem)
    return stems


def _check_no_input(folder: Path, names: Sequence[str], inputs: Sequence[str]) -> None:
    """Raises SettingsError if a file to be written is one of the inputs, under whatever name or link."""
    given = {identity: path for path in inputs if (identity := _identity(Path(path))) is not None}
    targets = ((folder / name, _identity(folder / name)) for name in names)
    if lost := [f"{target} is the input {given[identity]}" for target, identity in targets if identity in given]:
        more = f" and {len(lost) - 1} more" * (len(lost) > 1)
        raise SettingsError(f"--out {folder} would overwrite what is given: {lost[0]}{more}; give another directory")


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells an existing file from all others, links followed; None if there is none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino
