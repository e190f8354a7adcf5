"""Images in, files out: what `predict` does for detectors and segmenters around the model."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL.Image import Image

from polaformer.data.images import read_image
from polaformer.errors import DataError, printable
from polaformer.regular_files import write_atomically, writing


def readable_images(inputs: Sequence[str], unreadable: list[str], advance: Callable[[], object]) -> Iterator[tuple[str, Image]]:
    """The paths with their images; adds a line to `unreadable` for every other one, and calls `advance` after each."""
    for path in inputs:
        try:
            image = read_image(path, channels=3)
        except DataError as error:
            unreadable.append(str(error))
        else:
            yield path, image
        advance()


class DrawnFiles:
    """A directory for the drawn images of several inputs; none of them overwrites another."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.taken = folder, set[str]()
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def free_stem(self, path: str, *endings: str) -> str:
        """A name such that none of the files with these endings is taken, and takes them; the first choice is the input's."""
        base = printable(Path(path).stem).replace("/", "_") or "image"
        stems = (f"{base}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, len(self.taken) + 3))))
        stem = next(one for one in stems if not self.taken & {one + ending for ending in endings})
        self.taken |= {stem + ending for ending in endings}
        return stem

    def save(self, image: Image, name: str) -> None:
        """Writes an image; raises CannotWriteError."""
        with writing(self.folder / name):
            image.save(self.folder / name)

    def write_json(self, name: str, value: Any) -> None:
        """Writes a JSON file atomically; raises CannotWriteError."""
        with writing(self.folder):
            write_atomically(self.folder / name, json.dumps(value, indent=1))
