"""What the report of a classifier shows: its confusion, some predictions, where it looks."""

import random
from collections.abc import Iterator
from itertools import islice

import torch
from PIL.Image import Image
from torch import Tensor

from polaformer.data.sources.source import Source
from polaformer.data.transforms import Preprocessing
from polaformer.errors import ImageError
from polaformer.tasks.classification.objective import Counts
from polaformer.tasks.classification.predictor import Classifier
from polaformer.tasks.figures import AttentionOn, Confusion, Figure, Predictions, Sample, Text

MOST_SEARCHED = 400  # validation images among which wrongly classified ones are looked for
MOST_SAMPLES, MOST_WRONG = 12, 6  # that are shown
BATCH = 16
MOST_MAPPED = 8  # validation images whose attention is looked at


def of_classifier(classifier: Classifier, counts: Counts, source: Source) -> dict[str, Figure]:
    """The figures of the report, by heading; images that cannot be read are passed over."""
    predictions, attention = _predictions(classifier, source), _attention(classifier, source)
    found: dict[str, Figure] = {"Confusion": Confusion(counts.confusion, classifier.classes)}
    found["Predictions"] = predictions or Text("None of the validation images could be read.")
    return found | {"Attention maps": attention or Text("None of the validation images could be read.")}


def _predictions(classifier: Classifier, source: Source) -> Predictions | None:
    """Wrongly classified images, then right ones; None if no image can be read."""
    wrong: list[Sample] = []
    right: list[Sample] = []
    images = _images(classifier, source)
    while batch := list(islice(images, BATCH)):
        guesses = classifier.predict([image for _, image in batch], top=1)
        for (label, image), [guess] in zip(batch, guesses, strict=True):
            kept, most = (right, MOST_SAMPLES) if guess.label == label else (wrong, MOST_WRONG)
            if len(kept) < most:
                shown = _shown(_prepared(classifier, image), classifier.preprocessing)
                kept.append(Sample(shown, classifier.classes[label], guess.name, guess.probability, kept is right))
        if len(wrong) == MOST_WRONG and len(right) >= MOST_SAMPLES - MOST_WRONG:
            break
    samples = wrong + right[: MOST_SAMPLES - len(wrong)]
    return Predictions(samples, min(MOST_SEARCHED, len(source)), MOST_WRONG) if samples else None


def _attention(classifier: Classifier, source: Source) -> AttentionOn | None:
    images = [_prepared(classifier, image) for _, image in islice(_images(classifier, source), MOST_MAPPED)]
    return AttentionOn(classifier.model, images, _shown(images[0], classifier.preprocessing)) if images else None


def _images(classifier: Classifier, source: Source) -> Iterator[tuple[int, Image]]:
    """Label and image of images from all over the set, always the same, without those that cannot be read."""
    for index in random.Random(0).sample(range(len(source)), min(len(source), MOST_SEARCHED)):
        try:
            yield source.labels[index], source.read(index, classifier.preprocessing.channels)
        except ImageError:
            continue  # the evaluation has listed it


def _prepared(classifier: Classifier, image: Image) -> Tensor:
    return classifier.preprocessing.transform()(image)


def _shown(prepared: Tensor, preprocessing: Preprocessing) -> Tensor:
    """What the model sees, (channels, height, width), between 0 and 1 again."""
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (preprocessing.mean, preprocessing.std))
    return (prepared * std + mean).clamp(0, 1)
