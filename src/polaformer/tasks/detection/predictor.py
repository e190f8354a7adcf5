"""A trained detector as one file: weights, how to build it, class names, sizes of the images."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from polaformer.data.colours import class_colours
from polaformer.data.detection_images import DetectionReader
from polaformer.data.detection_transforms import Resize
from polaformer.data.drawing import draw_objects
from polaformer.data.masks import rle_from_mask
from polaformer.data.order import EvaluationOrder
from polaformer.data.padded_images import normalised, pad_images
from polaformer.data.samples import Samples, batches
from polaformer.data.sources.coco import CocoSource, open_coco, open_coco_split
from polaformer.errors import SettingsError, printable
from polaformer.regular_files import write_atomically, writing
from polaformer.tasks.dense.answering import DrawnFiles, readable_images
from polaformer.tasks.dense.memory_limit import check_inference, device_name
from polaformer.tasks.dense.predictor import DensePredictor
from polaformer.tasks.dense.preprocessing import DensePreprocessing
from polaformer.tasks.dense.trained_model import CLASSES, build_trained
from polaformer.tasks.detection.counts import DetectionCounts
from polaformer.tasks.detection.description import DetectorDescription
from polaformer.tasks.detection.detector import Detections, Detector, paste_masks, rescaled
from polaformer.tasks.detection.figures import class_table, coco_metrics
from polaformer.tasks.detection.objective import DetectionObjective
from polaformer.tasks.detection.recipe import DetectionRecipe
from polaformer.tasks.detection.task import DetectionEvaluation, DetectionPrediction
from polaformer.tasks.detection.typical_outputs import typical_outputs
from polaformer.tasks.job import Evaluation
from polaformer.tasks.task import Advance, Answers
from polaformer.weights.errors import WeightsError
from polaformer.weights.files import read_metadata, read_state_dict

CATEGORIES, PREPROCESSING = "category_ids", "preprocessing"  # keys of the metadata


def resize_of(about: DensePreprocessing) -> Resize:
    """The transform of images; raises SettingsError."""
    if about.size is None:
        raise SettingsError("a detector needs a length of the shorter side of its images, but none is given")
    return Resize(about.size, about.max_size)


@dataclass(frozen=True)
class DetectionPredictor(DensePredictor):
    """A detector with its class names and the preprocessing of its images."""

    model: Detector
    description: DetectorDescription
    category_ids: tuple[int, ...]

    @torch.inference_mode()
    def detect(self, image: Image) -> Detections:
        """The objects on an image, in its own pixels, best first."""
        about, parameter = self.preprocessing, next(self.model.parameters())
        resized, _ = resize_of(about)(image, [])
        padded = pad_images([normalised(resized, about.mean, about.std)])
        images = padded.images.to(parameter.device, parameter.dtype)
        [found] = self.model.eval()(images, padded.mask.to(parameter.device), padded.sizes)
        return rescaled(found, padded.sizes[0], (image.height, image.width))

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the weights file."""
        return detector_metadata(self)

    def evaluation(self, options: DetectionEvaluation, recipe: DetectionRecipe | None) -> Evaluation:
        """An evaluation on a split, each image in one process; raises DataError, and SettingsError for other classes."""
        about = self.preprocessing.with_size(options.size)
        advice = "give a smaller --size or --batch-size"
        check_evaluation(self.description, about, options.batch_size, advice=advice, precision=options.precision)
        source = self._open_split(options, recipe)
        reader = DetectionReader(source, resize_of(about), about.mean, about.std, self.description.has_masks, training=False)
        samples = Samples(reader, seed=0, on_bad=options.on_bad_image, replace=False)

        def share(rank: int, world: int) -> EvaluationOrder:
            return EvaluationOrder(len(source), options.batch_size, rank, world)

        return Evaluation(
            DetectionObjective(len(self.classes), self.description.has_masks),
            lambda rank, world: len(share(rank, world)),
            lambda rank, world: batches(samples, share(rank, world), num_workers=options.num_workers),
            about.about(),
            None if options.results is None else partial(write_results, options.results, source.category_ids),
            lambda counts: {"per_class": class_records(counts, self.classes)},
            coco_metrics,
            lambda counts: class_table(counts, self.classes, options.split),
        )

    def answer(self, inputs: Sequence[str], options: DetectionPrediction, advance: Advance) -> Answers:
        """The objects on image files; with --out also the images with the objects drawn on them, and all of it as JSON."""
        records, rows, unreadable = list[dict[str, Any]](), list[tuple[str, ...]](), list[str]()
        files = None if options.out is None else DrawnFiles(options.out, inputs, (".png",), "detections.json")
        for index, path, image in readable_images(inputs, unreadable, advance):
            found = _above(self.detect(image), options.min_score)
            record = self._record(path, image, found)
            if files is not None:
                record["drawn"] = f"{files.stems[index]}.png"
                files.save(self._drawn(image, found), record["drawn"])
            records.append(record)
            rows += _rows(record)
        if files is not None:
            files.write_document({"images": records})
        return Answers(records, ("image", "object", "score", "box (x1, y1, x2, y2)"), rows, unreadable)

    def _record(self, path: str, image: Image, found: Detections) -> dict[str, Any]:
        """What is found on an image, for JSON; masks as COCO's compressed run lengths."""
        numbers = zip(found.labels.tolist(), found.scores.tolist(), found.boxes.tolist(), strict=True)
        objects: list[dict[str, Any]] = [
            {"class": self.classes[label], "category_id": self.category_ids[label], "score": score, "box": box}
            for label, score, box in numbers
        ]
        if found.masks is not None:
            for one, mask in zip(objects, _masks(found, image), strict=True):
                one["mask"] = rle_from_mask(mask)
        return {"image": printable(path), "height": image.height, "width": image.width, "objects": objects}

    def _drawn(self, image: Image, found: Detections) -> Image:
        masks = None if found.masks is None else _masks(found, image)
        names = [self.classes[label] for label in found.labels.tolist()]
        return draw_objects(image, found.boxes.cpu(), names, found.scores.cpu(), masks, class_colours(self.classes))

    def _open_split(self, options: DetectionEvaluation, recipe: DetectionRecipe | None) -> CocoSource:
        if options.data is not None:
            source = open_coco_split(options.data, options.split, classes=self.classes, val_share=options.val_share)
        else:
            assert recipe is not None, "neither data nor a run that names them"
            assert recipe.data is not None
            source = open_coco(recipe.data, classes=self.classes, val_share=recipe.val_share).split(options.split)
        if self.description.has_masks and not source.has_masks:
            raise SettingsError(
                f"the {options.split} split has no masks, but the model predicts them; give annotations with segmentations"
            )
        return source


def check_evaluation(
    description: DetectorDescription, about: DensePreprocessing, batch: int, *, advice: str, precision: str = "fp32"
) -> None:
    """Raises SettingsError if the detector cannot take so many images of that size at once; advice: what to do then."""

    def forward(model: Detector, images: Tensor) -> list[Tensor]:
        return typical_outputs(model, images, num_regions=1, num_masks=1)  # there may be no more

    size = about.largest_size(multiple=32, mixed=batch > 1)
    known: dict[str, Any] = {"forward": forward, "precision": precision, "device": device_name()}
    check_inference(description.build_for, size, batch, advice=advice, **known)


def class_records(counts: DetectionCounts, classes: Sequence[str]) -> list[dict[str, Any]]:
    """The result of each class, for JSON; average precision in %, NaN without objects."""
    kinds = [f"{kind}_{name}" for kind in counts.kinds for name in ("AP", "AP50")]
    return [
        {"class": name, "objects": one.num_objects, **{kind: getattr(one, kind.lower()) for kind in kinds}}
        for name, one in zip(classes, counts.per_class(), strict=True)
    ]


def write_results(folder: Path, category_ids: Sequence[int], counts: DetectionCounts) -> None:
    """Writes the detections in COCO's results format: boxes.json, and masks.json if there are masks."""
    names = {"box": "boxes.json", "mask": "masks.json"}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for kind in counts.kinds:
            write_atomically(folder / names[kind], json.dumps(counts.results(category_ids, kind)))


def detector_metadata(predictor: DetectionPredictor) -> dict[str, str]:
    """The metadata of a weights file: task, how to build the detector, class names, preprocessing."""
    return {
        "task": DetectionRecipe.task,
        DetectorDescription.noun: predictor.description.to_json(),
        CLASSES: json.dumps(list(predictor.classes)),
        CATEGORIES: json.dumps(list(predictor.category_ids)),
        PREPROCESSING: json.dumps(asdict(predictor.preprocessing), sort_keys=True),
    }


def load_predictor(path: str | PathLike[str]) -> DetectionPredictor:
    """Loads the detector in a weights file of ours; raises WeightsError."""
    about, state = read_metadata(path), read_state_dict(path)
    try:
        description = DetectorDescription.from_json(about[DetectorDescription.noun])
        classes, categories = json.loads(about[CLASSES]), json.loads(about[CATEGORIES])
        preprocessing = DensePreprocessing.from_values(json.loads(about[PREPROCESSING]))
        resize_of(preprocessing)
        if not all(isinstance(name, str) for name in classes) or not all(isinstance(one, int) for one in categories):
            raise ValueError("class names must be strings and category ids integers")
        if not len(classes) == len(categories) == description.num_classes:
            raise ValueError(f"there are {len(classes)} class names for {description.num_classes} classes")
    except (SettingsError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path} is damaged: its description of the detector is not valid ({error})") from error
    model = build_trained(path, description, state)
    return DetectionPredictor(model, description, tuple(classes), preprocessing, tuple(categories))


def _above(found: Detections, score: float) -> Detections:
    kept = found.scores >= score
    masks = None if found.masks is None else found.masks[kept]
    return Detections(found.boxes[kept], found.scores[kept], found.labels[kept], masks)


def _masks(found: Detections, image: Image) -> Iterator[Tensor]:
    """The mask (H, W) of each detection on the image, one at a time."""
    assert found.masks is not None
    for index in range(len(found.boxes)):
        one = slice(index, index + 1)
        yield paste_masks(found.masks[one], found.boxes[one], (image.height, image.width))[0].cpu()


def _rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """The lines of the table for an image."""
    if not record["objects"]:
        return [(record["image"], "no detections", "", "")]
    return [
        (
            record["image"] if index == 0 else "",
            one["class"],
            f"{100 * one['score']:.0f} %",
            ", ".join(f"{value:.0f}" for value in one["box"]),
        )
        for index, one in enumerate(record["objects"])
    ]
