"""What is wrong with a data set: every image is read, and its bytes are compared with those of the others."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from polaformer.data.sources.opening import Data, Source
from polaformer.errors import DataError, ImageError
from polaformer.regular_files import read_regular

FORMAT = "polaformer-data-1"
AT_ONCE = 1024


class Problem(NamedTuple):
    """One thing that is wrong with one image."""

    part: str
    image: str
    text: str


class Looked(NamedTuple):
    """An image that was looked at: its size in pixels, or what is wrong with it; the digest of its bytes, if it has any."""

    size: tuple[int, int] | None
    problem: str | None
    digest: str | None


@dataclass
class Report:
    """What was found: facts of each part, problems, and the digest of every image."""

    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)


def check(
    data: Data, known: Mapping[str, str] | None = None, *, num_workers: int = 2, advance: Callable[[], object] = lambda: None
) -> Report:
    """Reads every image of all parts. known: digests that the images should have, by "part/name"; `advance` counts images."""
    report = Report()
    owners: dict[str, tuple[str, str, int]] = {}  # digest → part, image, label
    for name, source in data.parts.items():
        looked = _look_at_all(source, num_workers, advance)
        report.parts[name] = _facts(source, looked)
        for index, one in enumerate(looked):
            _judge(report, owners, name, source, index, one)
    if known is not None:
        report.problems += _changes(known, report.digests)
    return report


def read_manifest(path: Path) -> dict[str, str]:
    """The digests that a manifest holds; raises DataError."""
    try:
        manifest = json.loads(read_regular(path))
        if manifest["format"] != FORMAT or not isinstance(manifest["sha256"], dict):
            raise ValueError("it is of another kind")
        return dict(manifest["sha256"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is no manifest of a data set: {error}; write one with --write-manifest") from error


def write_manifest(path: Path, digests: Mapping[str, str]) -> None:
    """Writes the digests of a data set."""
    path.write_text(json.dumps({"format": FORMAT, "sha256": dict(digests)}, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _look_at_all(source: Source, num_workers: int, advance: Callable[[], object]) -> list[Looked]:
    found = []
    with ThreadPoolExecutor(num_workers) as pool:
        for start in range(0, len(source), AT_ONCE):  # a pool takes all its work at once
            for looked in pool.map(lambda index: _look(source, index), range(start, min(start + AT_ONCE, len(source)))):
                found.append(looked)
                advance()
    return found


def _look(source: Source, index: int) -> Looked:
    digest = None
    try:
        digest = hashlib.sha256(source.content(index)).hexdigest()
        return Looked(source.read(index, 3).size, None, digest)
    except ImageError as error:
        return Looked(None, str(error), digest)


def _judge(
    report: Report, owners: dict[str, tuple[str, str, int]], part: str, source: Source, index: int, looked: Looked
) -> None:
    image, label = source.name(index), source.labels[index]
    if looked.digest is not None:
        report.digests[f"{part}/{image}"] = looked.digest
    if looked.problem is not None or looked.digest is None:
        report.problems.append(Problem(part, image, looked.problem or "it cannot be read"))
        return
    other_part, other, other_label = owners.setdefault(looked.digest, (part, image, label))
    if other_label != label:
        classes = source.classes
        text = f"the same image as {other_part}, {other}, but {classes[label]!r} and not {classes[other_label]!r}"
        report.problems.append(Problem(part, image, text))
    elif other_part != part:
        report.problems.append(
            Problem(part, image, f"the same image as {other_part}, {other}: it is trained on and evaluated on")
        )


def _facts(source: Source, looked: list[Looked]) -> dict[str, Any]:
    images = Counter(dict.fromkeys(range(len(source.classes)), 0))
    images.update(source.labels)
    sizes = [one.size for one in looked if one.size is not None]
    widths, heights = [size[0] for size in sizes], [size[1] for size in sizes]
    span = f"{min(widths)}×{min(heights)} to {max(widths)}×{max(heights)}" if sizes else "none readable"
    by_size = images.most_common()
    smallest, largest = by_size[-1], by_size[0]
    return {
        "images": len(source),
        "classes": len(source.classes),
        "smallest_class": f"{source.classes[smallest[0]]}: {smallest[1]}",
        "largest_class": f"{source.classes[largest[0]]}: {largest[1]}",
        "sizes": span,
    }


def _changes(known: Mapping[str, str], found: Mapping[str, str]) -> list[Problem]:
    problems = [(name, "it is in the manifest but not in the data") for name in known.keys() - found.keys()]
    problems += [(name, "it is in the data but not in the manifest") for name in found.keys() - known.keys()]
    changed = (name for name in known.keys() & found.keys() if known[name] != found[name])
    problems += [(name, f"it has changed: sha256 should be {known[name]} but is {found[name]}") for name in changed]
    return [Problem(name.split("/", 1)[0], name.split("/", 1)[-1], text) for name, text in sorted(problems)]
