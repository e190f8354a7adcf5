"""A trained segmenter as one file: weights, how to build it, class names and colours, sizes of the images, inference.

# K classes, H height, W width
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import isqrt
from os import PathLike
from typing import Any, Self

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from polaformer.data.class_maps import draw_classes, index_png
from polaformer.data.colours import Colour
from polaformer.data.images import MAX_PIXELS
from polaformer.data.order import EvaluationOrder
from polaformer.data.padded_images import normalised
from polaformer.data.samples import Samples, batches
from polaformer.data.segmentation_images import SegmentationReader
from polaformer.data.segmentation_transforms import ResizeShorter
from polaformer.data.sources.semantic import SemanticSource, open_semantic, open_semantic_split
from polaformer.errors import SettingsError, printable
from polaformer.tasks.dense.answering import DrawnFiles, readable_images
from polaformer.tasks.dense.memory_limit import check_inference, check_length, device_name
from polaformer.tasks.dense.predictor import DensePredictor
from polaformer.tasks.dense.preprocessing import DensePreprocessing
from polaformer.tasks.dense.trained_model import CLASSES, build_trained
from polaformer.tasks.job import Evaluation
from polaformer.tasks.segmentation.counts import SegmentationCounts
from polaformer.tasks.segmentation.description import SegmenterDescription
from polaformer.tasks.segmentation.figures import class_table
from polaformer.tasks.segmentation.inference import classify
from polaformer.tasks.segmentation.inference_settings import Inference
from polaformer.tasks.segmentation.objective import SegmentationObjective
from polaformer.tasks.segmentation.recipe import SegmentationRecipe
from polaformer.tasks.segmentation.segmenter import Segmenter
from polaformer.tasks.segmentation.task import InferenceOptions, SegmentationEvaluation, SegmentationPrediction
from polaformer.tasks.task import Advance, Answers
from polaformer.weights.errors import WeightsError
from polaformer.weights.files import read_metadata, read_state_dict

NO_LABELS = np.empty((0, 0), dtype=np.uint8)  # of images that are only predicted
DRAWN, CLASS_MAP = ".png", "-classes.png"  # endings of the files of an image
COLOURS, PREPROCESSING, INFERENCE = "colours", "preprocessing", "inference"  # keys of the metadata


@dataclass(frozen=True)
class SegmentationPredictor(DensePredictor):
    """A segmenter with its class names and colours, the preprocessing of its images, and how it segments them."""

    model: Segmenter
    description: SegmenterDescription
    colours: tuple[Colour, ...]
    inference: Inference

    @torch.inference_mode()
    def segment(self, image: Image) -> np.ndarray:
        """The class (H, W) of every pixel of an image of any mode, uint8."""
        about, parameter = self.preprocessing, next(self.model.parameters())
        resized, _ = resize_of(about, self.inference)(image.convert("RGB"), NO_LABELS)
        views = [normalised(one, about.mean, about.std).to(parameter.device, parameter.dtype) for one in resized]
        found: np.ndarray = classify(self.model.eval(), views, (image.height, image.width), self.inference).cpu().numpy()
        return found

    def adjusted(self, options: InferenceOptions, *, precision: str = "fp32") -> Self:
        """The same segmenter with the sizes and the inference of the options; raises SettingsError if it cannot take them."""
        about, inference = self.preprocessing.with_size(options.size), inference_of(self.inference, options)
        advice = "give a smaller --size, smaller --scales, or --mode slide"
        check_evaluation(self.description, about, inference, advice=advice, precision=precision)
        return replace(self, preprocessing=about, inference=inference)

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the weights file."""
        return segmenter_metadata(self)

    def evaluation(self, options: SegmentationEvaluation, recipe: SegmentationRecipe | None) -> Evaluation:
        """An evaluation on a split, each image in one process; raises DataError, and SettingsError for other classes."""
        adjusted = self.adjusted(options, precision=options.precision)
        about, inference = adjusted.preprocessing, adjusted.inference
        source = self._open_split(options, recipe)
        reader = SegmentationReader(source, resize_of(about, inference), about.mean, about.std, training=False)
        samples = Samples(reader, seed=0, on_bad=options.on_bad_image, replace=False)

        def share(rank: int, world: int) -> EvaluationOrder:
            return EvaluationOrder(len(source), options.batch_size, rank, world)

        return Evaluation(
            SegmentationObjective(len(self.classes), inference),
            lambda rank, world: len(share(rank, world)),
            lambda rank, world: batches(samples, share(rank, world), num_workers=options.num_workers),
            about.about() | _told(inference),
            details=lambda counts: {"per_class": class_records(counts, self.classes)},
            per_class=lambda counts: class_table(counts, self.classes, options.split),
        )

    def answer(self, inputs: Sequence[str], options: SegmentationPrediction, advance: Advance) -> Answers:
        """The classes on image files; with --out also the images with the classes drawn on them, class maps, and JSON."""
        records, rows, unreadable = list[dict[str, Any]](), list[tuple[str, ...]](), list[str]()
        segmenter = self.adjusted(options)
        endings = (DRAWN, CLASS_MAP)
        files = None if options.out is None else DrawnFiles(options.out, inputs, endings, "segmentation.json")
        for index, path, image in readable_images(inputs, unreadable, advance):
            labels = segmenter.segment(image)
            record = self._record(path, labels)
            if files is not None:
                record |= self._written(files, files.stems[index], image, labels)
            records.append(record)
            rows += _rows(record, options.min_share)
        if files is not None:
            files.write_document({"classes": self.classes, "images": records})
        return Answers(records, ("image", "class", "share", "pixels"), rows, unreadable)

    def _record(self, path: str, labels: np.ndarray) -> dict[str, Any]:
        """The classes on an image, those with the most pixels first, for JSON."""
        pixels = np.bincount(labels.ravel(), minlength=len(self.classes)).tolist()
        present = sorted((label for label, number in enumerate(pixels) if number), key=lambda label: (-pixels[label], label))
        found = [
            {"class": self.classes[label], "label": label, "pixels": pixels[label], "share": pixels[label] / labels.size}
            for label in present
        ]
        return {"image": printable(path), "height": labels.shape[0], "width": labels.shape[1], "classes": found}

    def _written(self, files: DrawnFiles, stem: str, image: Image, labels: np.ndarray) -> dict[str, str]:
        """Writes the drawn image and the class map; returns the names of the files."""
        drawn, class_map = stem + DRAWN, stem + CLASS_MAP
        files.save(draw_classes(image, labels, self.classes, self.colours), drawn)
        files.save(index_png(labels, self.colours), class_map)
        return {"drawn": drawn, "class_map": class_map}

    def _open_split(self, options: SegmentationEvaluation, recipe: SegmentationRecipe | None) -> SemanticSource:
        known: dict[str, Any] = {"classes": self.classes}
        if options.data is not None:
            known |= {"label_set": options.label_set, "val_share": options.val_share}
            return open_semantic_split(options.data, options.split, **known)
        assert recipe is not None, "neither data nor a run that names them"
        assert recipe.data is not None
        known |= {"label_set": options.label_set or recipe.label_set, "val_share": recipe.val_share}
        return open_semantic(recipe.data, **known).split(options.split)


def class_records(counts: SegmentationCounts, classes: Sequence[str]) -> list[dict[str, Any]]:
    """The result of each class, for JSON; IoU and accuracy in %, NaN where nothing can be said."""
    return [
        {"class": name, "pixels": one.num_pixels, "predicted": one.num_predicted, "IoU": one.iou, "accuracy": one.accuracy}
        for name, one in zip(classes, counts.per_class(), strict=True)
    ]


def resize_of(about: DensePreprocessing, inference: Inference) -> ResizeShorter:
    """The transform of images; raises SettingsError."""
    return ResizeShorter(about.size, about.max_size, inference.scales)


def inference_of(stored: Inference, options: InferenceOptions) -> Inference:
    """The inference that the options ask for; raises SettingsError."""
    mode = options.mode or stored.mode
    if mode == "whole" and (options.window, options.stride) != (None, None):
        raise SettingsError("--window and --stride are for sliding windows, but whole images are segmented; add --mode slide")
    window = options.window or stored.window
    stride = options.stride or (stored.stride if options.window is None else max(1, 2 * window // 3))
    return replace(stored, mode=mode, window=window, stride=stride, scales=options.scales, flip=options.flip)


def check_evaluation(
    description: SegmenterDescription, about: DensePreprocessing, inference: Inference, *, advice: str, precision: str = "fp32"
) -> None:
    """Raises SettingsError if the segmenter cannot take an image of that size; advice: what to do then.

    What images need that keep their size is not known; they may be as large as can be read.
    """
    readable = about if about.size is not None else replace(about, max_size=min(about.max_size, isqrt(MAX_PIXELS)))
    height, width = (max(1, round(side * max(inference.scales))) for side in readable.largest_size())
    is_slide, build = inference.mode == "slide", description.build_for
    seen = (min(height, inference.window), min(width, inference.window)) if is_slide else (height, width)

    def forward(model: Segmenter, image: Tensor) -> tuple[Tensor, Tensor]:
        logits = model.pixel_logits(image[..., : seen[0], : seen[1]])
        return logits, logits.new_empty(description.num_classes, height, width)

    if about.size is None:
        check_length(build, seen, advice=advice)
    else:
        known: dict[str, Any] = {"forward": forward, "precision": precision, "device": device_name()}
        check_inference(build, (height, width), 1, advice=advice, seen=seen, **known)


def _told(inference: Inference) -> dict[str, Any]:
    """The inference for tables and JSON."""
    windows = {"window": inference.window, "stride": inference.stride} if inference.mode == "slide" else {}
    return {"mode": inference.mode, **windows, "scales": list(inference.scales), "flip": inference.flip}


def segmenter_metadata(predictor: SegmentationPredictor) -> dict[str, str]:
    """The metadata of a weights file: task, how to build the segmenter, class names and colours, preprocessing, inference."""
    return {
        "task": SegmentationRecipe.task,
        SegmenterDescription.noun: predictor.description.to_json(),
        CLASSES: json.dumps(list(predictor.classes)),
        COLOURS: json.dumps(predictor.colours),
        PREPROCESSING: json.dumps(asdict(predictor.preprocessing), sort_keys=True),
        INFERENCE: json.dumps(asdict(predictor.inference), sort_keys=True),
    }


def load_predictor(path: str | PathLike[str]) -> SegmentationPredictor:
    """Loads the segmenter in a weights file of ours; raises WeightsError."""
    about, state = read_metadata(path), read_state_dict(path)
    try:
        description = SegmenterDescription.from_json(about[SegmenterDescription.noun])
        classes, colours = _classes_of(about, description.num_classes)
        preprocessing = DensePreprocessing.from_values(json.loads(about[PREPROCESSING]))
        given = json.loads(about[INFERENCE])
        inference = Inference(**given | {"scales": tuple(given["scales"])})
        resize_of(preprocessing, inference)
    except (SettingsError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path} is damaged: its description of the segmenter is not valid ({error})") from error
    model = build_trained(path, description, state)
    return SegmentationPredictor(model, description, classes, preprocessing, colours, inference)


def _classes_of(about: dict[str, str], number: int) -> tuple[tuple[str, ...], tuple[Colour, ...]]:
    """The names and colours of the classes from the metadata; raises ValueError."""
    classes, colours = tuple(json.loads(about[CLASSES])), tuple(tuple(one) for one in json.loads(about[COLOURS]))
    if not all(isinstance(name, str) for name in classes):
        raise ValueError("class names must be strings")
    if any(len(one) != 3 or not all(isinstance(v, int) and 0 <= v <= 255 for v in one) for one in colours):
        raise ValueError("colours must be three integers from 0 to 255 each")
    if not len(classes) == len(colours) == number:
        raise ValueError(f"there are {len(classes)} class names and {len(colours)} colours for {number} classes")
    return classes, colours


def _rows(record: dict[str, Any], min_share: float) -> list[tuple[str, ...]]:
    """The lines of the table for an image."""
    shown = [one for one in record["classes"] if one["share"] >= min_share]
    return [
        (record["image"] if index == 0 else "", one["class"], f"{100 * one['share']:.1f} %", f"{one['pixels']:,}")
        for index, one in enumerate(shown)
    ] or [(record["image"], "none", "", "")]
