"""Finds the problems of images with a class per pixel: bad images and masks, copies across splits, classes never trained."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from polaformer.data.audit import AuditReport, Duplicates, ImageProblem, Inspected, SampleProblem, changes, each, span_of_sizes
from polaformer.data.sources.label_sets import IGNORED
from polaformer.data.sources.semantic import SemanticSource
from polaformer.data.sources.source import NamedSplits
from polaformer.errors import ImageError

MAX_SHOWN = 12  # classes in a table


class InspectedPair(NamedTuple):
    """The result for one image; the digest of its mask, if it can be read; and its pixels by label (256,), if it is sound."""

    image: Inspected
    mask_digest: str | None
    counts: np.ndarray | None


class ClassShares(dict[str, float]):
    """The share of each class of the pixels that count, in %, largest first; as text it is cut short."""

    def __str__(self) -> str:
        shown = [f"{name} {share:.2g} %" for name, share in list(self.items())[:MAX_SHOWN]]
        return ", ".join(shown) + f" and {len(self) - MAX_SHOWN} more" * (len(self) > MAX_SHOWN)


def audit(
    data: NamedSplits[SemanticSource],
    known: Mapping[str, str] | None = None,
    *,
    num_workers: int = 2,
    advance: Callable[[], object] = lambda: None,
) -> AuditReport:
    """Read every image and mask of all splits. advance: called once per image.

    known: expected digests by "split/name", of images and of masks.
    """
    report = AuditReport()
    duplicates = Duplicates("image", data.classes)
    seen: dict[str, np.ndarray] = {}
    for split, source in data.different.items():
        inspected = each(partial(_inspect, source), len(source), num_workers, advance)
        counts = sum((one.counts for one in inspected if one.counts is not None), np.zeros(256, dtype=np.int64))
        report.parts[split] = _facts(source, counts) | {"sizes": span_of_sizes(one.image for one in inspected)}
        for index, one in enumerate(inspected):
            _record(report, duplicates, split, source, index, one)
        seen[split] = counts[: len(data.classes)] > 0
    report.problems += _not_trained(seen, data.classes)
    if known is not None:
        report.problems += [SampleProblem(*one) for one in changes(known, report.digests)]
    return report


def _not_trained(seen: Mapping[str, np.ndarray], classes: Sequence[str]) -> Iterator[SampleProblem]:
    """The classes that pixels of another split have, but none of the training split. seen: which classes, by split."""
    if "train" in seen:
        for label, name in enumerate(classes):
            if not seen["train"][label] and (others := [split for split, has in seen.items() if has[label]]):
                text = f"no pixel has this class, but pixels of {' and '.join(others)} have; add images of it"
                yield SampleProblem("train", name, text)


def _inspect(source: SemanticSource, index: int) -> InspectedPair:
    digest = mask_digest = None
    try:
        digest = hashlib.sha256(source.content(index)).hexdigest()
        mask_digest = hashlib.sha256(source.mask_content(index)).hexdigest()
        image, labels = source.pair(index)
    except ImageError as error:
        return InspectedPair(Inspected(None, str(error), digest), mask_digest, None)
    return InspectedPair(Inspected(image.size, None, digest), mask_digest, np.bincount(labels.reshape(-1), minlength=256))


def _record(
    report: AuditReport, duplicates: Duplicates, split: str, source: SemanticSource, index: int, inspected: InspectedPair
) -> None:
    """Add the digests and the problem of one image to the report."""
    name, problem = source.name(index), inspected.image.problem
    if inspected.mask_digest is not None:
        report.digests[f"{split}/{source.folders.masks.name}/{source.mask_name(index)}"] = inspected.mask_digest
    if inspected.image.digest is not None:
        report.digests[f"{split}/{name}"] = inspected.image.digest
        problem = problem or duplicates.problem(inspected.image.digest, split, name, label=0)
    if problem is None and inspected.counts is not None and inspected.counts[:IGNORED].sum() == 0:
        problem = "no pixel of its mask counts; correct it, or remove the image"
    if problem is not None:
        report.problems.append(ImageProblem(split, name, problem))


def _facts(source: SemanticSource, counts: np.ndarray) -> dict[str, Any]:
    """The shares of the classes. counts: pixels by label (256,) of all images."""
    that_count, number = int(counts[:IGNORED].sum()), len(source.classes)
    shares = 100 * counts[:number] / max(1, that_count)
    order = sorted(range(number), key=lambda label: -counts[label])
    return {
        "images": len(source),
        "pixels": int(counts.sum()),
        "ignored": f"{100 * counts[IGNORED] / max(1, counts.sum()):.2g} %",
        "label_set": source.label_set.name,
        "classes": number,
        "unseen_classes": int((counts[:number] == 0).sum()),
        "class_shares": ClassShares({source.classes[label]: round(float(shares[label]), 6) for label in order}),
    }
