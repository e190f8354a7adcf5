"""Figures for the report of a model of sequences: confusion matrix and examples."""

import random

import numpy as np

from polaformer.data.sources.lra.sequences import SequenceSplit
from polaformer.tasks.accuracy import ClassificationCounts
from polaformer.tasks.figures import Confusion, Figure, Rows
from polaformer.tasks.sequence.predictor import SequencePredictor

MAX_SEARCHED = 40  # samples to search for misclassified ones
MAX_SHOWN = 8
MAX_CHARACTERS = 90


def collect_figures(
    predictor: SequencePredictor, counts: ClassificationCounts, split: SequenceSplit, name: str
) -> dict[str, Figure]:
    """The figures of the report, by heading."""
    confusion = Confusion(counts.confusion, predictor.description.classes, "validation" if name == "val" else name)
    return {"Confusion": confusion, "Examples": _examples(predictor, split, name)}


def _examples(predictor: SequencePredictor, split: SequenceSplit, name: str) -> Rows:
    """A fixed random sample of the split: wrong answers first, then right ones."""
    classes, found = predictor.description.classes, list[tuple[bool, tuple[str, ...]]]()
    for index in random.Random(0).sample(range(len(split)), min(len(split), MAX_SEARCHED)):
        documents = [split.read(index, which) for which in range(split.num_documents)]
        probabilities = predictor.probabilities(documents)
        guess = int(np.argmax(probabilities))
        label = int(split.labels[index])
        answer = f"{classes[guess]} ({100 * probabilities[guess]:.0f} %)"
        found.append((guess == label, (_shown(predictor, split, index), classes[label], answer)))
    found.sort(key=lambda one: one[0])
    wrong = [row for right, row in found if not right][: MAX_SHOWN // 2]
    rows = wrong + [row for right, row in found if right][: MAX_SHOWN - len(wrong)]
    shown = f"Of {len(found)} samples of the {name} split: up to {MAX_SHOWN // 2} wrong answers, then right ones."
    return Rows(("sample", "class", "answer"), rows, shown)


def _shown(predictor: SequencePredictor, split: SequenceSplit, index: int) -> str:
    """The beginning of a document that consists of text, or the name of the sample."""
    if not predictor.description.spec.is_text:
        return split.name(index)
    texts = [bytes(split.read(index, which)[: 4 * MAX_CHARACTERS]) for which in range(split.num_documents)]
    return " | ".join(text.decode("utf-8", "replace")[:MAX_CHARACTERS] for text in texts)
