"""Small datasets of pictures, on disk in several forms."""

import io
import random
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from polaformer.data.order import Key
from polaformer.data.samples import Samples, batches
from polaformer.data.sources.source import DataSplits, Images
from polaformer.errors import DataError

COUNTS = {"cat": 6, "cat-a": 5, "dog": 7}


def content(seed: int) -> bytes:
    """A small image of its own."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def files_of(counts: dict[str, int], first: int = 0, *, deep: bool = True) -> dict[str, bytes]:
    """Path below the root → bytes; some of them deeper than their class folder."""
    paths = [f"{name}/{'deep/er/' * (deep and n % 3 == 2)}{n}.png" for name, number in counts.items() for n in range(number)]
    return {path: content(first + seed) for seed, path in enumerate(paths)}


def write_folder(root: Path, files: dict[str, bytes]) -> str:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return str(root)


def write_tar(path: Path, files: dict[str, bytes]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return str(path)


def below(folder: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{name}": data for name, data in files.items()}


def shuffled(files: dict[str, bytes]) -> dict[str, bytes]:
    return dict(random.Random(0).sample(list(files.items()), len(files)))


def names(source: Images) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def listing(root: Path) -> list[tuple[str, bytes]]:
    return sorted((str(path), path.read_bytes() if path.is_file() else b"") for path in root.rglob("*"))


def contents(data: DataSplits) -> list[tuple[bytes, int]]:
    """What is in both parts, one after the other."""
    return [(part.content(index), part.labels[index]) for part in (data.train, data.val) for index in range(len(part))]


def taken(samples: Samples, keys: Iterable[list[Key]], number: int, num_workers: int) -> list[Any]:
    """The first batches."""
    with closing(batches(samples, keys, num_workers=num_workers)) as found:
        return [batch for batch, _ in zip(found, range(number), strict=False)]


@contextmanager
def refused(*told: str) -> Iterator[None]:
    with pytest.raises(DataError) as caught:
        yield
    for text in told:
        assert text in str(caught.value)
