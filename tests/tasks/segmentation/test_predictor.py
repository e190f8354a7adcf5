"""Trained segmenters: what they predict for an image, evaluate and store."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from commands import run as call
from models import randomise
from polaformer.data.images import read_image
from polaformer.data.sources.semantic import open_semantic
from polaformer.tasks.dense.trained_model import class_parameters, load_whole
from polaformer.tasks.segmentation.counts import SegmentationCounts
from polaformer.tasks.segmentation.predictor import SegmentationPredictor, load_predictor
from polaformer.tasks.segmentation.recipe import SegmentationRecipe
from polaformer.tasks.segmentation.task import SegmentationEvaluation, SegmentationPrediction
from segmentation_files import NAMES, write_scenes

SAMPLES = Path(__file__).resolve().parents[4] / "shared" / "data" / "ade20k-samples"
SMALL = {"dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "mlp_ratios": (1.0, 1.0, 1.0, 1.0)}
SIZES = {"crop_size": 48, "eval_size": 64, "eval_max_size": 80, "mean": (0.3, 0.4, 0.5), "std": (0.2, 0.3, 0.4)}
TIMES = {"steps": 2, "warmup_steps": 0, "batch_size": 4, "num_workers": 0}


def tiny(data: str | Path, **changes) -> SegmentationRecipe:
    heads = {"fpn_width": 8, "head_width": 8}
    return SegmentationRecipe(**{"name": "test/segmenter", "data": str(data)} | SMALL | SIZES | TIMES | heads | changes)


def evaluation(data: str, **changes) -> SegmentationEvaluation:
    return SegmentationEvaluation(data=data, num_workers=0, **changes)


def count(predictor: SegmentationPredictor, options: SegmentationEvaluation) -> SegmentationCounts:
    """What an evaluation counts."""
    found = predictor.evaluation(options, None)
    counts = found.objective.new_counts()
    with torch.inference_mode():
        for batch in found.batches(0, 1):
            counts.add(predictor.model, batch)
    return counts


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_scenes(tmp_path_factory.mktemp("scenes"), 8)


@pytest.fixture(scope="module")
def weights(scenes, tmp_path_factory) -> Path:
    """A segmenter that sees several classes on every image."""
    torch.manual_seed(0)
    job = tiny(scenes).job()
    randomise(job.model.head)
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    job.predictor(job.model).save(path)
    return path


@pytest.fixture(scope="module")
def predictor(weights) -> SegmentationPredictor:
    return load_predictor(weights)


# ---- images ----


def test_an_image_has_the_classes_that_an_evaluation_counts_on_it(scenes, predictor):
    """In its own pixels, although both resize it."""
    source = open_semantic(scenes).val
    by_hand = SegmentationCounts(3, predictor.inference)
    for index in range(len(source)):
        image, labels = source.pair(index)
        found = predictor.segment(image)
        assert (found.shape, found.dtype) == (labels.shape, np.uint8)
        by_hand.add_image(index, torch.tensor(found), torch.tensor(labels))
    counts = count(predictor, evaluation(scenes))
    assert len(counts.per_class()) == 3
    assert torch.equal(counts.confusion, by_hand.confusion)
    assert counts.images == by_hand.images


def test_batches_of_an_evaluation_do_not_change_its_counts(scenes, predictor):
    assert torch.equal(
        count(predictor, evaluation(scenes, batch_size=3)).confusion, count(predictor, evaluation(scenes)).confusion
    )


def test_images_are_normalised_as_the_weights_file_says(predictor):
    seen = []
    with Image.new("RGB", (64, 64), (51, 102, 204)) as image:
        handle = predictor.model.features.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
        predictor.segment(image)
        handle.remove()
    wanted = torch.tensor([(0.2 - 0.3) / 0.2, (0.4 - 0.4) / 0.3, (0.8 - 0.5) / 0.4]).view(1, 3, 1, 1)
    torch.testing.assert_close(seen[0], wanted.expand(1, 3, 64, 64))


def test_evaluations_of_a_job_and_of_its_weights_see_the_same_images(scenes, predictor):
    of_job = tiny(scenes).job().evaluation_batches("val", 0, 1)
    of_weights = predictor.evaluation(evaluation(scenes), None).batches(0, 1)
    for one, other in zip(of_job, of_weights, strict=True):
        for views, others in zip([one.truths, *one.views], [other.truths, *other.views], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(views, others, strict=True))


def test_a_weights_file_stores_all_that_is_needed_to_predict(scenes, weights, predictor, tmp_path):
    assert predictor.classes == NAMES
    assert predictor.colours == ((96, 128, 192), (48, 160, 64), (192, 48, 32))
    about = predictor.preprocessing
    assert (about.size, about.max_size, about.mean, about.std) == (64, 80, SIZES["mean"], SIZES["std"])
    assert predictor.inference.mode == "whole"
    job = tiny(scenes, inference="slide", window=40, stride=20, eval_size=None).job()
    job.predictor(job.model).save(tmp_path / "model.safetensors")
    other = load_predictor(tmp_path / "model.safetensors")
    assert other.inference == job.inference
    assert other.preprocessing.size is None
    image = Image.new("RGB", (50, 70))
    assert np.array_equal(other.segment(image), job.predictor(job.model).segment(image))


def test_images_of_any_mode_are_segmented_as_in_rgb(predictor):
    grey = Image.new("L", (50, 40), 100)
    wanted = predictor.segment(grey.convert("RGB"))
    assert all(np.array_equal(predictor.segment(grey.convert(mode)), wanted) for mode in ("L", "P", "RGBA", "LA"))


def test_images_of_odd_sizes_are_segmented(predictor):
    for size in ((1, 1), (3, 200), (33, 31)):
        assert predictor.segment(Image.new("RGB", size)).shape == size[::-1]


# ---- options ----


def test_size_changes_both_limits_of_the_sides(scenes, predictor):
    usual, half = (predictor.evaluation(evaluation(scenes, size=size), None) for size in (None, 32))
    assert usual.about == {"shorter_side": 64, "longer_side_at_most": 80, "mode": "whole", "scales": [1.0], "flip": False}
    assert half.about | {"shorter_side": 32, "longer_side_at_most": 40} == half.about


def test_min_share_leaves_classes_out_of_the_table_but_not_of_json(scenes, predictor):
    paths = [f"{scenes}/images/validation/100.png"]
    everything, few = (predictor.answer(paths, SegmentationPrediction(min_share=share), lambda: None) for share in (0.0, 0.5))
    assert everything.records == few.records
    shares = [one["share"] for one in few.records[0]["classes"]]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1)
    assert len(everything.rows) == len(shares) > len(few.rows) == max(1, sum(share >= 0.5 for share in shares))


# ---- a new training ----


@pytest.mark.parametrize(
    ("classes", "is_reset"),
    [(NAMES, False), (("car", "bus", "tram"), True), (NAMES[::-1], True)],
    ids=["the same names", "three others", "another order"],
)
def test_the_last_layer_starts_anew_unless_the_class_names_are_those_of_the_checkpoint(weights, predictor, classes, is_reset):
    description, trained = predictor.description, predictor.model.state_dict()
    model = description.build()
    initial = {name: one.clone() for name, one in model.state_dict().items()}
    own = class_parameters(description)
    assert all(not torch.equal(initial[name], trained[name]) for name in own)
    assert load_whole(model, description, classes, weights) == (own if is_reset else [])
    for name, one in model.state_dict().items():
        assert torch.equal(one, initial[name] if is_reset and name in own else trained[name])


# ---- ADE20K ----


@pytest.fixture(scope="module")
def ade_weights(tmp_path_factory) -> Path:
    if not SAMPLES.is_dir():
        pytest.skip("needs four images of ADE20K")
    job = tiny(SAMPLES, val_share=0.0, eval_size=128, eval_max_size=512, batch_size=2).job()
    assert (len(job.classes), len(job.parts["train"])) == (150, 4)
    assert next(job.training_batches(0, 0, 1)).labels.shape == (2, 64, 64)
    path = tmp_path_factory.mktemp("ade") / "model.safetensors"
    job.predictor(job.model).save(path)
    return path


def test_the_samples_of_ade20k_are_evaluated_and_predicted(ade_weights, tmp_path, capsys):
    """Without training: every pixel of the four images gets one of 150 classes."""
    command = ["eval", "--checkpoint", ade_weights, "--data", SAMPLES, "--num-workers", "0", "--json", "--val-share", "0"]
    code, out, errors = call(command, capsys)
    assert code == 0, errors
    assert json.loads(out)["result"]["samples"] == 4
    images = sorted((SAMPLES / "images").iterdir())
    code, out, errors = call(["predict", *images, "--checkpoint", ade_weights, "--out", tmp_path, "--json"], capsys)
    assert code == 0, errors
    for path, answer in zip(images, json.loads(out)["images"], strict=True):
        size = read_image(path, channels=3).size
        assert sum(one["pixels"] for one in answer["classes"]) == size[0] * size[1]
        with Image.open(tmp_path / answer["class_map"]) as labels:
            assert labels.size == size
