"""Finds the problems of a dataset: reads every image and compares its bytes with those of all others.

Other kinds of samples use the parts of it (`data/sources/lra/audit.py`).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from polaformer.data.sources.source import DataSplits, Images, Source
from polaformer.errors import DataError, ImageError
from polaformer.regular_files import read_regular

FORMAT = "polaformer-data-1"
CHUNK_SIZE = 1024
Found = TypeVar("Found")


class ImageProblem(NamedTuple):
    """One problem with one image."""

    part: str
    image: str
    text: str


class SampleProblem(NamedTuple):
    """One problem with one sample that is not an image."""

    part: str
    sample: str
    text: str


class Inspected(NamedTuple):
    """The result for one image: its size in pixels, or the problem; the digest of its bytes, if they can be read."""

    size: tuple[int, int] | None
    problem: str | None
    digest: str | None


@dataclass
class AuditReport:
    """The result of an audit: statistics of each split, problems, and the digest of every sample."""

    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[ImageProblem | SampleProblem] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)


class Duplicates:
    """Finds samples that are in two splits or have two labels. noun: what is the same, as in "same image as …"."""

    def __init__(self, noun: str, classes: tuple[str, ...]) -> None:
        self.noun, self.classes = noun, classes
        self.owners: dict[str, tuple[str, str, int]] = {}  # digest → split, name and label of the first sample that has it

    def problem(self, digest: str, split: str, name: str, label: int) -> str | None:
        """The problem with the next sample, if its content was there before; a copy in its split does no harm."""
        other_split, other, other_label = self.owners.setdefault(digest, (split, name, label))
        if other_label != label:
            was, now = self.classes[other_label], self.classes[label]
            return f"same {self.noun} as {other_split}, {other}, but labelled {now!r}, not {was!r}"
        return f"same {self.noun} as {other_split}, {other}: it is in both splits" if other_split != split else None


def audit(
    data: DataSplits,
    known: Mapping[str, str] | None = None,
    *,
    num_workers: int = 2,
    advance: Callable[[], object] = lambda: None,
) -> AuditReport:
    """Reads every image of all splits. known: expected digests by "split/name"; advance: called once per image."""
    report = AuditReport()
    duplicates = Duplicates("image", data.classes)
    for name, source in data.splits.items():
        inspected = inspect_all(source, num_workers, advance)
        report.parts[name] = _statistics(source, inspected)
        for index, one in enumerate(inspected):
            _record(report, duplicates, name, source, index, one)
    if known is not None:
        report.problems += [ImageProblem(*one) for one in changes(known, report.digests)]
    return report


def read_manifest(path: Path) -> dict[str, str]:
    """The digests in a manifest; raises DataError."""
    try:
        manifest = json.loads(read_regular(path))
        if manifest["format"] != FORMAT or not isinstance(manifest["sha256"], dict):
            raise ValueError("it has another format")
        return dict(manifest["sha256"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is not a dataset manifest: {error}; write one with --write-manifest") from error


def write_manifest(path: Path, digests: Mapping[str, str]) -> None:
    """Writes the digests of a dataset."""
    path.write_text(json.dumps({"format": FORMAT, "sha256": dict(digests)}, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def inspect_all(source: Images, num_workers: int, advance: Callable[[], object]) -> list[Inspected]:
    """Read every image. advance: called once per image."""
    return each(lambda index: _inspect(source, index), len(source), num_workers, advance)


def each(inspect: Callable[[int], Found], number: int, num_workers: int, advance: Callable[[], object]) -> list[Found]:
    """What `inspect` finds for each index below `number`, in threads. advance: called once per index."""
    results = []
    with ThreadPoolExecutor(num_workers) as pool:
        for start in range(0, number, CHUNK_SIZE):  # a pool would queue all images at once
            for one in pool.map(inspect, range(start, min(start + CHUNK_SIZE, number))):
                results.append(one)
                advance()
    return results


def _inspect(source: Images, index: int) -> Inspected:
    digest = None
    try:
        digest = hashlib.sha256(source.content(index)).hexdigest()
        return Inspected(source.read(index, 3).size, None, digest)
    except ImageError as error:
        return Inspected(None, str(error), digest)


def _record(report: AuditReport, duplicates: Duplicates, split: str, source: Source, index: int, inspected: Inspected) -> None:
    """Adds the digest and the problems of one image to the report."""
    image, label, digest = source.name(index), source.labels[index], inspected.digest
    if digest is not None:
        report.digests[f"{split}/{image}"] = digest
    if inspected.problem is not None or digest is None:
        report.problems.append(ImageProblem(split, image, inspected.problem or "it cannot be read"))
        return
    problem = duplicates.problem(digest, split, image, label)
    if problem is not None:
        report.problems.append(ImageProblem(split, image, problem))


def _statistics(source: Source, inspected: list[Inspected]) -> dict[str, Any]:
    return {"images": len(source), **class_sizes(source.labels, source.classes), "sizes": span_of_sizes(inspected)}


def span_of_sizes(inspected: Iterable[Inspected]) -> str:
    """The smallest and the largest width and height."""
    sizes = [one.size for one in inspected if one.size is not None]
    widths, heights = [size[0] for size in sizes], [size[1] for size in sizes]
    return f"{min(widths)}×{min(heights)} to {max(widths)}×{max(heights)}" if sizes else "none readable"


def class_sizes(labels: Iterable[int], classes: tuple[str, ...]) -> dict[str, Any]:
    """The number of classes, and the smallest and the largest of them."""
    samples = Counter(dict.fromkeys(range(len(classes)), 0))
    samples.update(labels)
    by_size = samples.most_common()
    smallest, largest = (f"{classes[label]}: {number}" for label, number in (by_size[-1], by_size[0]))
    return {"classes": len(classes), "smallest_class": smallest, "largest_class": largest}


def changes(known: Mapping[str, str], found: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """What differs between the digests in a manifest and those of the data: split, name and text."""
    problems = [(name, "it is in the manifest but not in the data") for name in known.keys() - found.keys()]
    problems += [(name, "it is in the data but not in the manifest") for name in found.keys() - known.keys()]
    changed = (name for name in known.keys() & found.keys() if known[name] != found[name])
    problems += [(name, f"it has changed: sha256 should be {known[name]} but is {found[name]}") for name in changed]
    return [(name.split("/", 1)[0], name.split("/", 1)[-1], text) for name, text in sorted(problems)]
