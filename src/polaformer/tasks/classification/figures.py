"""Figures for the report of a classifier: confusion matrix, sample predictions, attention maps."""

import random
from collections.abc import Iterator
from itertools import islice

import torch
from PIL.Image import Image
from torch import Tensor

from polaformer.data.sources.source import Source
from polaformer.data.transforms import Preprocessing
from polaformer.errors import ImageError
from polaformer.tasks.accuracy import ClassificationCounts
from polaformer.tasks.classification.predictor import Classifier
from polaformer.tasks.figures import AttentionInputs, Confusion, Figure, PredictedImage, Predictions, Text

MAX_SEARCHED = 400  # validation images to search for misclassified ones
MAX_SAMPLES, MAX_WRONG = 12, 6  # images to show
BATCH_SIZE = 16
MAX_MAPPED = 8  # validation images to map the attention on


def collect_figures(classifier: Classifier, counts: ClassificationCounts, source: Source) -> dict[str, Figure]:
    """The figures of the report, by heading; skips images that cannot be read."""
    predictions, attention = _predictions(classifier, source), _attention(classifier, source)
    found: dict[str, Figure] = {"Confusion": Confusion(counts.confusion, classifier.classes)}
    found["Predictions"] = predictions or Text("None of the validation images could be read.")
    return found | {"Attention maps": attention or Text("None of the validation images could be read.")}


def _predictions(classifier: Classifier, source: Source) -> Predictions | None:
    """Misclassified images, then correctly classified ones; None if no image can be read."""
    wrong: list[PredictedImage] = []
    right: list[PredictedImage] = []
    images = _readable_images(classifier, source)
    while batch := list(islice(images, BATCH_SIZE)):
        guesses = classifier.predict([image for _, image in batch], top=1)
        for (label, image), [guess] in zip(batch, guesses, strict=True):
            kept, most = (right, MAX_SAMPLES) if guess.label == label else (wrong, MAX_WRONG)
            if len(kept) < most:
                shown = _denormalize(_preprocess(classifier, image), classifier.preprocessing)
                kept.append(PredictedImage(shown, classifier.classes[label], guess.name, guess.probability, kept is right))
        if len(wrong) == MAX_WRONG and len(right) >= MAX_SAMPLES - MAX_WRONG:
            break
    samples = wrong + right[: MAX_SAMPLES - len(wrong)]
    return Predictions(samples, min(MAX_SEARCHED, len(source)), MAX_WRONG) if samples else None


def _attention(classifier: Classifier, source: Source) -> AttentionInputs | None:
    images = [_preprocess(classifier, image) for _, image in islice(_readable_images(classifier, source), MAX_MAPPED)]
    return AttentionInputs(classifier.model, images, _denormalize(images[0], classifier.preprocessing)) if images else None


def _readable_images(classifier: Classifier, source: Source) -> Iterator[tuple[int, Image]]:
    """Pairs of label and image: a fixed random sample of the source, without images that cannot be read."""
    for index in random.Random(0).sample(range(len(source)), min(len(source), MAX_SEARCHED)):
        try:
            yield source.labels[index], source.read(index, classifier.preprocessing.channels)
        except ImageError:
            continue  # the evaluation has reported it


def _preprocess(classifier: Classifier, image: Image) -> Tensor:
    return classifier.preprocessing.transform()(image)


def _denormalize(image: Tensor, preprocessing: Preprocessing) -> Tensor:
    """An input of the model (C, height, width), back in [0, 1]."""
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (preprocessing.mean, preprocessing.std))
    return (image * std + mean).clamp(0, 1)
