"""Finds the problems of labelled sequences: empty documents, and the same content in two splits or under two labels."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from polaformer.data.audit import AuditReport, Duplicates, SampleProblem, changes, class_sizes
from polaformer.data.sources.lra.sequences import SequenceSplit

ORDINALS = ("first", "second")


def audit(
    splits: Mapping[str, SequenceSplit], known: Mapping[str, str] | None = None, *, advance: Callable[[], object] = lambda: None
) -> AuditReport:
    """Reads every sample of all splits. known: expected digests by "split/sample N"; advance: called once per sample.

    Pairs of the same two documents are the same content in either order.
    """
    report = AuditReport()
    duplicates = Duplicates("content", next(iter(splits.values())).classes)
    for name, split in splits.items():
        report.parts[name] = _facts(split)
        report.problems += [SampleProblem(name, skipped, "it is empty and left out") for skipped in split.skipped.values()]
        digests = _digests_of_documents(split)
        # A sample that is left out keeps its number, so that a manifest still fits the others.
        numbers = [number for number in range(len(split) + len(split.skipped)) if number not in split.skipped]
        for index, documents in enumerate(split.documents.tolist()):
            of_documents = [digests[document] for document in documents]
            report.digests[f"{name}/sample {numbers[index]}"] = _digest(of_documents)
            problem = _empty(split, index) or duplicates.problem(
                _digest(sorted(of_documents)), name, split.name(index), int(split.labels[index])
            )
            if problem is not None:
                report.problems.append(SampleProblem(name, split.name(index), problem))
            advance()
    if known is not None:
        report.problems += [SampleProblem(*one) for one in changes(known, report.digests)]
    return report


def _facts(split: SequenceSplit) -> dict[str, Any]:
    lengths = split.lengths()
    return {
        "samples": len(split),
        **class_sizes(split.labels.tolist(), split.classes),
        "documents": len(np.unique(split.documents)),
        "empty": int(np.sum(lengths == 0)) + len(split.skipped),
        "shortest": int(lengths.min()),
        "median": int(np.median(lengths)),
        "longest": int(lengths.max()),
    }


def _digests_of_documents(split: SequenceSplit) -> dict[int, str]:
    """By the number of the document: pairs share them, so that one is read once."""
    found = {}
    for document in np.unique(split.documents).tolist():
        symbols = split.symbols[split.offsets[document] : split.offsets[document + 1]]
        found[document] = hashlib.sha256(np.ascontiguousarray(symbols).data).hexdigest()
    return found


def _digest(of_documents: list[str]) -> str:
    """Of a sample; of a single document it is the document's own."""
    return of_documents[0] if len(of_documents) == 1 else hashlib.sha256(" ".join(of_documents).encode()).hexdigest()


def _empty(split: SequenceSplit, index: int) -> str | None:
    empty = [which for which in range(split.num_documents) if not len(split.read(index, which))]
    if not empty:
        return None
    return "it is empty" if split.num_documents == 1 else f"its {ORDINALS[empty[0]]} document is empty"
