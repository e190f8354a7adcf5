"""A trained detector as one file: weights, how to build it, class names, sizes of the images."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from polaformer.backbones.fitting import fit
from polaformer.backbones.loading import stored_grids
from polaformer.data.colours import class_colours
from polaformer.data.detection_images import DetectionReader
from polaformer.data.detection_transforms import Resize
from polaformer.data.drawing import draw_objects
from polaformer.data.images import read_image
from polaformer.data.masks import rle_from_mask
from polaformer.data.order import EvaluationOrder
from polaformer.data.padded_images import normalised, pad_images
from polaformer.data.samples import Samples, batches
from polaformer.data.sources.coco import CocoSource, open_coco, open_coco_split
from polaformer.errors import DataError, SettingsError, printable
from polaformer.regular_files import write_atomically, writing
from polaformer.tasks.detection.counts import DetectionCounts
from polaformer.tasks.detection.description import DetectorDescription
from polaformer.tasks.detection.detector import Detections, Detector, paste_masks, rescaled
from polaformer.tasks.detection.objective import DetectionObjective
from polaformer.tasks.detection.recipe import DetectionRecipe
from polaformer.tasks.detection.task import DetectionEvaluation, DetectionPrediction
from polaformer.tasks.job import Evaluation
from polaformer.tasks.task import Advance, Answers
from polaformer.weights.errors import WeightsError
from polaformer.weights.files import read_metadata, read_state_dict, write_safetensors

DESCRIPTION, CLASSES, CATEGORIES, PREPROCESSING = "detector", "classes", "category_ids", "preprocessing"  # keys of the metadata


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the input of a detector: the lengths of its sides in pixels, and the normalisation."""

    size: int
    max_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def resize(self) -> Resize:
        """The transform of images; raises SettingsError."""
        return Resize(self.size, self.max_size)


@dataclass(frozen=True)
class DetectionPredictor:
    """A detector with its class names and the preprocessing of its images."""

    model: Detector
    description: DetectorDescription
    classes: tuple[str, ...]
    category_ids: tuple[int, ...]
    preprocessing: Preprocessing

    @torch.inference_mode()
    def detect(self, image: Image) -> Detections:
        """The objects on an image, in its own pixels, best first."""
        about, parameter = self.preprocessing, next(self.model.parameters())
        resized, _ = about.resize()(image, [])
        padded = pad_images([normalised(resized, about.mean, about.std)])
        images = padded.images.to(parameter.device, parameter.dtype)
        [found] = self.model.eval()(images, padded.mask.to(parameter.device), padded.sizes)
        return rescaled(found, padded.sizes[0], (image.height, image.width))

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the weights file atomically."""
        tensors = {key: tensor.detach().contiguous() for key, tensor in self.model.state_dict().items()}
        write_safetensors(tensors, path, detector_metadata(self))

    def evaluation(self, options: DetectionEvaluation, recipe: DetectionRecipe | None) -> Evaluation:
        """An evaluation on a split, each image in one process; raises DataError, and SettingsError for other classes."""
        about = self.preprocessing if options.size is None else _with_size(self.preprocessing, options.size)
        source = self._open_split(options, recipe)
        reader = DetectionReader(source, about.resize(), about.mean, about.std, self.description.has_masks, training=False)
        samples = Samples(reader, seed=0, on_bad=options.on_bad_image, replace=False)

        def share(rank: int, world: int) -> EvaluationOrder:
            return EvaluationOrder(len(source), options.batch_size, rank, world)

        return Evaluation(
            DetectionObjective(len(self.classes), self.description.has_masks),
            lambda rank, world: len(share(rank, world)),
            lambda rank, world: batches(samples, share(rank, world), num_workers=options.num_workers),
            {"shorter_side": about.size, "longer_side_at_most": about.max_size},
            None if options.results is None else partial(write_results, options.results, source.category_ids),
        )

    def answer(self, inputs: Sequence[str], options: DetectionPrediction, advance: Advance) -> Answers:
        """The objects on image files; with --out also the images with the objects drawn on them, and all of it as JSON."""
        records, rows, unreadable = list[dict[str, Any]](), list[tuple[str, ...]](), list[str]()
        if options.out is not None:
            with writing(options.out):
                options.out.mkdir(parents=True, exist_ok=True)
        taken: set[str] = set()
        for path in inputs:
            try:
                image = read_image(path, channels=3)
            except DataError as error:
                unreadable.append(str(error))
                advance()
                continue
            found = _above(self.detect(image), options.min_score)
            record = self._record(path, image, found)
            if options.out is not None:
                name = _free_name(Path(path).stem, taken)
                record["drawn"] = name
                self._draw(image, found, options.out / name)
            records.append(record)
            rows += _rows(record)
            advance()
        if options.out is not None:
            with writing(options.out):
                write_atomically(options.out / "detections.json", json.dumps({"images": records}, indent=1))
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

    def _draw(self, image: Image, found: Detections, path: Path) -> None:
        masks = None if found.masks is None else _masks(found, image)
        names = [self.classes[label] for label in found.labels.tolist()]
        drawn = draw_objects(image, found.boxes.cpu(), names, found.scores.cpu(), masks, class_colours(self.classes))
        with writing(path):
            drawn.save(path)

    def _open_split(self, options: DetectionEvaluation, recipe: DetectionRecipe | None) -> CocoSource:
        if options.data is not None:
            source = open_coco_split(options.data, options.split, classes=self.classes, val_share=options.val_share)
        else:
            assert recipe is not None, "neither data nor a run that names them"
            assert recipe.data is not None
            source = open_coco(recipe.data, classes=self.classes, val_share=recipe.val_share).split(options.split)
        if self.description.has_masks and not source.has_masks:
            raise SettingsError(f"the {options.split} split has no masks, but the model predicts them; annotate some")
        return source


def write_results(folder: Path, category_ids: Sequence[int], counts: DetectionCounts) -> None:
    """Writes the detections in COCO's results format: boxes.json, and masks.json if there are masks."""
    names = {"box": "boxes.json", "mask": "masks.json"}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for kind in counts.kinds:
            write_atomically(folder / names[kind], json.dumps(counts.results(category_ids, kind)))


def detector_metadata(predictor: DetectionPredictor) -> dict[str, str]:
    """The metadata of a weights file: task, how to build the detector, class names, preprocessing, grids of tables."""
    from polaformer.backbones.fitting import table_grids

    return {
        "task": DetectionRecipe.task,
        DESCRIPTION: predictor.description.to_json(),
        CLASSES: json.dumps(list(predictor.classes)),
        CATEGORIES: json.dumps(list(predictor.category_ids)),
        PREPROCESSING: json.dumps(asdict(predictor.preprocessing), sort_keys=True),
        "grids": json.dumps(table_grids(predictor.model), sort_keys=True),
    }


def load_predictor(path: str | PathLike[str]) -> DetectionPredictor:
    """Loads the detector in a weights file of ours; raises WeightsError."""
    about, state = read_metadata(path), read_state_dict(path)
    try:
        description = DetectorDescription.from_json(about[DESCRIPTION])
        classes, categories = json.loads(about[CLASSES]), json.loads(about[CATEGORIES])
        given = json.loads(about[PREPROCESSING])
        preprocessing = Preprocessing(**given | {name: tuple(given[name]) for name in ("mean", "std")})
        preprocessing.resize()
        if not all(isinstance(name, str) for name in classes) or not all(isinstance(one, int) for one in categories):
            raise ValueError("class names must be strings and category ids integers")
        if not len(classes) == len(categories) == description.num_classes:
            raise ValueError(f"there are {len(classes)} class names for {description.num_classes} classes")
    except (SettingsError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path} is damaged: its description of the detector is not valid ({error})") from error
    problems = description.misfits(state)
    if any(problems):
        raise WeightsError(f"{path} is damaged: its parameters are not those of the detector that it describes", problems)
    model = description.build()
    model.load_state_dict(state, strict=True)
    _check_finite(path, model)
    return DetectionPredictor(model.eval(), description, tuple(classes), tuple(categories), preprocessing)


def load_detector(model: Detector, description: DetectorDescription, classes: Sequence[str], path: Path) -> list[str]:
    """Loads a whole detector to train on, and returns the names of the parameters that keep their initial values.

    These are what depends on the classes, unless the file has the same class names. Raises WeightsError.
    """
    about = read_metadata(path)
    if DESCRIPTION not in about:
        raise WeightsError(f"{path} does not hold a detector of ours; for weights of the backbone alone use --backbone")
    state = fit(read_state_dict(path), model, stored_grids(path)).state
    kept = []
    if about.get(CLASSES) != json.dumps(list(classes)):
        wanted = model.state_dict()
        kept = [name for name in class_parameters(description) if name in wanted]
        state |= {name: wanted[name] for name in kept}
    wanted_names = model.state_dict()
    wrong = sorted(wanted_names.keys() ^ state.keys())
    wrong += [name for name in wanted_names if name in state and state[name].shape != wanted_names[name].shape]
    if wrong:
        raise WeightsError(
            f"{path} holds another detector ({_named(about[DESCRIPTION])}), and nothing was loaded: {len(wrong)} parameters "
            f"differ, such as {wrong[0]}; give the same --detector and --model, or its backbone alone with --backbone"
        )
    model.load_state_dict(state, strict=True)
    _check_finite(path, model)
    return kept


def _named(text: str) -> str:
    """The detector and the backbone of a description."""
    try:
        about = DetectorDescription.from_json(text)
        return f"{about.detector} with {about.backbone}"
    except SettingsError:
        return "one that is not known here"


def class_parameters(description: DetectorDescription) -> list[str]:
    """The names of the parameters whose shape depends on the number of classes."""
    shapes = [_shapes(replace(description, num_classes=number)) for number in (2, 3)]
    return [name for name, shape in shapes[0].items() if shapes[1][name] != shape]


def _shapes(description: DetectorDescription) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: one.shape for name, one in description.build().state_dict().items()}


def _check_finite(path: str | PathLike[str], model: nn.Module) -> None:
    broken = [name for name, one in model.state_dict().items() if one.is_floating_point() and not bool(one.isfinite().all())]
    if broken:
        raise WeightsError(f"{path} has weights that are not finite, first in {broken[0]}; train or download it again")


def _with_size(preprocessing: Preprocessing, size: int) -> Preprocessing:
    """The preprocessing at another size, the longer side in the same proportion."""
    return replace(preprocessing, size=size, max_size=round(preprocessing.max_size * size / preprocessing.size))


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


def _free_name(stem: str, taken: set[str]) -> str:
    """The name of a PNG file that is not among those taken, and takes it."""
    base = printable(stem).replace("/", "_") or "image"
    names = (f"{base}{suffix}.png" for suffix in ("", *(f"-{number}" for number in range(2, len(taken) + 3))))
    name = next(one for one in names if one not in taken)
    taken.add(name)
    return name


def _rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """The lines of the table for an image."""
    if not record["objects"]:
        return [(record["image"], "nothing", "", "")]
    return [
        (
            record["image"] if index == 0 else "",
            one["class"],
            f"{100 * one['score']:.0f} %",
            ", ".join(f"{value:.0f}" for value in one["box"]),
        )
        for index, one in enumerate(record["objects"])
    ]
