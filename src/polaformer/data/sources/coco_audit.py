"""Finds the problems of images with annotated objects: what is repaired or skipped, unreadable images, copies across splits."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from polaformer.data.audit import AuditReport, Duplicates, ImageProblem, SampleProblem, changes, inspect_all, span_of_sizes
from polaformer.data.masks import has_pixels, rle_of
from polaformer.data.sources.coco import CocoSource
from polaformer.data.sources.source import NamedSplits
from polaformer.errors import printable


def audit(
    data: NamedSplits[CocoSource],
    known: Mapping[str, str] | None = None,
    *,
    num_workers: int = 2,
    advance: Callable[[], object] = lambda: None,
) -> AuditReport:
    """Read every image and annotation of all splits. advance: called once per image.

    known: expected digests by "split/name", of images and of annotation files.
    """
    report = AuditReport()
    duplicates = Duplicates("image", data.classes)
    for split, source in data.different.items():
        inspected = inspect_all(source, num_workers, advance)
        report.parts[split] = _facts(source) | {"sizes": span_of_sizes(inspected)}
        report.digests[f"{split}/{printable(source.file.name)}"] = source.digest
        found = (*_repairs(source), *_without_pixels(source), *_nothing_annotated(source))
        report.problems += [SampleProblem(split, *one) for one in found]
        for index, one in enumerate(inspected):
            name = source.name(index)
            problem = one.problem
            if one.digest is not None:
                report.digests[f"{split}/{name}"] = one.digest
                problem = problem or duplicates.problem(one.digest, split, name, label=0)
            if problem is not None:
                report.problems.append(ImageProblem(split, name, problem))
    if known is not None:
        report.problems += [SampleProblem(*one) for one in changes(known, report.digests)]
    return report


def _facts(source: CocoSource) -> dict[str, Any]:
    of_each = [source.annotations(index) for index in range(len(source))]
    objects = [one for some in of_each for one in some]
    numbers = np.bincount([one.label for one in objects if not one.crowd], minlength=len(source.classes)).tolist()
    smallest, largest = numbers.index(min(numbers)), numbers.index(max(numbers))
    return {
        "images": len(source),
        "without_objects": sum(all(one.crowd for one in some) for some in of_each),
        "annotations": len(objects),
        "crowds": sum(one.crowd for one in objects),
        "masks": sum(one.segmentation is not None for one in objects),
        "classes": len(source.classes),
        "smallest_class": f"{source.classes[smallest]}: {numbers[smallest]}",
        "largest_class": f"{source.classes[largest]}: {numbers[largest]}",
    }


def _repairs(source: CocoSource) -> Iterator[tuple[str, str]]:
    """Where something was repaired or skipped, and what."""
    names = {source.image_id(index): source.name(index) for index in range(len(source))}
    for repair in source.repairs:
        yield f"{names[repair.image]}, {repair.where}" if repair.image in names else repair.where, repair.what


def _nothing_annotated(source: CocoSource) -> Iterator[tuple[str, str]]:
    """The annotation file, if it has no object that counts."""
    if not source.has_objects:
        yield printable(source.file.name), "no object is annotated on any image; annotate some"


def _without_pixels(source: CocoSource) -> Iterator[tuple[str, str]]:
    """The objects whose masks are empty."""
    for index, size in enumerate(source.sizes):
        for one in source.annotations(index):
            if one.segmentation is not None and not has_pixels(rle_of(one.segmentation, size)):
                yield f"{source.name(index)}, annotation {one.id}", "its mask has no pixel"
