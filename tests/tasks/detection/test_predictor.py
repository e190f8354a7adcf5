"""Trained detectors: what they find on an image, evaluate, write and pass on to a new training."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from coco_files import IDS, NAMES, annotated, categories, document, entry, write_coco, write_split
from commands import run as call
from models import randomise
from polaformer.data.masks import rle_from_mask
from polaformer.errors import SettingsError
from polaformer.tasks.dense.trained_model import class_parameters, load_whole
from polaformer.tasks.detection.counts import DetectionCounts
from polaformer.tasks.detection.detections import paste_masks
from polaformer.tasks.detection.predictor import DetectionPredictor, load_predictor
from polaformer.tasks.detection.recipe import DetectionRecipe
from polaformer.tasks.detection.task import DetectionEvaluation, DetectionPrediction

BY_ID = tuple(name for _, name in sorted(zip(IDS, NAMES, strict=True)))
IMAGE = (40, 60)
WHOLE = (0.0, 0.0, 60.0, 40.0)
SMALL = {"dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "mlp_ratios": (1.0, 1.0, 1.0, 1.0)}
SMALL |= {"fpn_width": 8, "box_width": 16, "mask_width": 8, "num_samples": 16, "num_proposals": 16, "anchor_scale": 2.0}
# Images are enlarged, those of 40 × 60 pixels to 53 × 80.
SIZES = {"sizes": (48, 64), "eval_size": 64, "max_size": 80, "mean": (0.3, 0.4, 0.5), "std": (0.2, 0.3, 0.4)}
TIMES = {"epochs": 1, "warmup_epochs": 0, "batch_size": 4, "num_workers": 0}


def tiny(data: str | Path, **changes) -> DetectionRecipe:
    return DetectionRecipe(**{"name": "test/detector", "data": str(data)} | SMALL | SIZES | TIMES | changes)


def evaluation(data: str, **changes) -> DetectionEvaluation:
    return DetectionEvaluation(data=data, num_workers=0, **changes)


def count(predictor: DetectionPredictor, options: DetectionEvaluation) -> DetectionCounts:
    """What an evaluation counts; it writes the results that the options ask for."""
    found = predictor.evaluation(options, None)
    counts = found.objective.new_counts()
    with torch.inference_mode():
        for batch in found.batches(0, 1):
            counts.add(predictor.model, batch)
    if found.save is not None:
        found.save(counts)
    return counts


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_coco(tmp_path_factory.mktemp("coco"), 10)


@pytest.fixture(scope="module")
def weights(objects, tmp_path_factory) -> Path:
    """A detector that finds something on every image."""
    torch.manual_seed(0)
    job = tiny(objects, score_threshold=0.0).job()
    for head in (job.model.heads.stage.roi.box_predictor, job.model.heads.stage.roi.mask_predictor):
        randomise(head)
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    job.predictor(job.model).save(path)
    return path


@pytest.fixture(scope="module")
def predictor(weights) -> DetectionPredictor:
    return load_predictor(weights)


# ---- images ----


@pytest.mark.parametrize("number", [101, 102], ids=["tall", "wide"])
def test_an_image_has_the_detections_that_an_evaluation_counts_on_it(objects, predictor, number):
    """In its own pixels, although both resize it."""
    counted = count(predictor, evaluation(objects)).images[number]
    with Image.open(f"{objects}/val2017/{number}.png") as image:
        alone = predictor.detect(image.convert("RGB"))
    assert len(alone.scores) > 2
    for name in ("boxes", "scores", "labels"):
        assert getattr(alone, name).tolist() == getattr(counted, name).tolist()
    masks = paste_masks(alone.masks, alone.boxes, (counted.height, counted.width))
    assert tuple(rle_from_mask(mask)["counts"] for mask in masks) == counted.masks


def test_images_are_normalised_as_the_weights_file_says(objects, predictor):
    seen = []
    with Image.new("RGB", (64, 64), (51, 102, 204)) as image:
        handle = predictor.model.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
        predictor.detect(image)
        handle.remove()
    wanted = torch.tensor([(0.2 - 0.3) / 0.2, (0.4 - 0.4) / 0.3, (0.8 - 0.5) / 0.4]).view(1, 3, 1, 1)
    torch.testing.assert_close(seen[0], wanted.expand(1, 3, 64, 64))


def test_evaluations_of_a_job_and_of_its_weights_see_the_same_images(objects, predictor):
    of_job = tiny(objects).job().evaluation_batches("val", 0, 1)
    of_weights = predictor.evaluation(evaluation(objects), None).batches(0, 1)
    for one, other in zip(of_job, of_weights, strict=True):
        assert torch.equal(one.images, other.images)
        assert (one.sizes, one.truths) == (other.sizes, other.truths)


def test_a_weights_file_stores_names_in_the_order_of_their_ids_and_the_preprocessing(objects, weights, predictor):
    assert predictor.classes == BY_ID == ("dog", "cat", "mouse")
    assert predictor.category_ids == tuple(sorted(IDS))
    about = predictor.preprocessing
    assert (about.size, about.max_size, about.mean, about.std) == (64, 80, SIZES["mean"], SIZES["std"])


# ---- commands ----


def test_min_score_leaves_out_the_detections_below_it(objects, weights, capsys):
    def objects_from(min_score):
        command = ["predict", f"{objects}/val2017/101.png", "--checkpoint", weights, "--json", "--min-score", min_score]
        code, out, errors = call(command, capsys)
        assert code == 0, errors
        return json.loads(out)["images"][0]["objects"]

    everything = objects_from(0)
    scores = [one["score"] for one in everything]
    assert scores[0] > scores[1] > scores[2]
    for number in (1, 2):
        assert objects_from(sum(scores[number - 1 : number + 1]) / 2) == everything[:number]


def test_an_image_on_which_nothing_is_found_has_no_objects(objects, predictor):
    answers = predictor.answer([f"{objects}/val2017/101.png"], DetectionPrediction(min_score=1.0), lambda: None)
    assert answers.records[0]["objects"] == []


def test_results_have_the_category_ids_of_the_file_and_pycocotools_loads_them(objects, weights, tmp_path, capsys):
    from pycocotools.coco import COCO

    command = ["eval", "--checkpoint", weights, "--data", objects, "--num-workers", "0", "--json", "--results", tmp_path]
    code, out, errors = call(command, capsys)
    assert code == 0, errors
    truth = COCO(f"{objects}/annotations/instances_val2017.json")
    for name, place in (("boxes.json", "bbox"), ("masks.json", "segmentation")):
        results = json.loads((tmp_path / name).read_text())
        assert len(results) == json.loads(out)["result"]["detections"] > 5
        assert len({one["category_id"] for one in results}) > 1
        assert {one["category_id"] for one in results} <= set(IDS)
        assert all(place in one for one in results)
        loaded = truth.loadRes(str(tmp_path / name))
        assert len(loaded.getAnnIds()) == len(results)
        assert set(loaded.getImgIds(catIds=results[0]["category_id"])) <= set(range(101, 106))


def test_results_name_the_class_that_predict_names(objects, weights, predictor, tmp_path, capsys):
    """Their category ids are those of the evaluated file, which may number the same classes in another way."""
    for split in ("train", "val"):
        content = document([entry(1)], [annotated(1, 1, category_id=2)], categories=categories(NAMES, (2, 30, 1)))
        write_split(tmp_path / "data", f"annotations/instances_{split}2017.json", f"{split}2017", content)
    count(predictor, evaluation(str(tmp_path / "data"), results=tmp_path / "results"))
    with Image.open(tmp_path / "data" / "val2017" / "1.png") as image:
        labels = predictor.detect(image).labels.tolist()
    ids = dict(zip(NAMES, (2, 30, 1), strict=True))
    results = json.loads((tmp_path / "results" / "boxes.json").read_text())
    assert [one["category_id"] for one in results] == [ids[predictor.classes[label]] for label in labels]


def test_size_changes_both_limits_of_the_sides(objects, weights, predictor, capsys):
    usual, half = (predictor.evaluation(evaluation(objects, size=size), None) for size in (None, 32))
    assert usual.about == {"shorter_side": 64, "longer_side_at_most": 80}
    assert half.about == {"shorter_side": 32, "longer_side_at_most": 40}
    assert [batch.sizes for batch in half.batches(0, 1)][:2] == [[(38, 32)], [(26, 40)]]  # of 60 × 50 and 40 × 60 pixels
    command = ["eval", "--checkpoint", weights, "--data", objects, "--num-workers", "0", "--json", "--size", "32"]
    code, out, errors = call(command, capsys)
    assert code == 0, errors
    assert half.about.items() <= json.loads(out).items()


def test_images_that_do_not_fit_the_memory_or_the_mechanism_are_refused(objects, weights, predictor, tmp_path, capsys):
    command = ["eval", "--checkpoint", weights, "--data", objects]
    code, _, errors = call([*command, "--size", "100000"], capsys)
    assert code == 2
    wanted = "evaluation on 1 image of 100000×125024 pixels needs at least"
    assert wanted in " ".join(errors.split())
    with pytest.raises(SettingsError, match="1000000 images of 96×96 pixels needs at least"):
        predictor.evaluation(evaluation(objects, batch_size=1_000_000), None)
    job = tiny(objects, attention="linformer").job()
    job.predictor(job.model).save(tmp_path / "fixed.safetensors")
    fixed = load_predictor(tmp_path / "fixed.safetensors")
    assert count(fixed, evaluation(objects)).images
    with pytest.raises(SettingsError, match=r"512×640 pixels: linformer has parameters per token.*; give a smaller --size or"):
        fixed.evaluation(evaluation(objects, size=512), None)


# ---- a new training ----


@pytest.mark.parametrize(
    ("classes", "is_reset"),
    [(BY_ID, False), (("car", "bus", "tram"), True), (BY_ID[::-1], True)],
    ids=["the same names", "three others", "another order"],
)
def test_heads_start_anew_unless_the_class_names_are_those_of_the_checkpoint(weights, predictor, classes, is_reset):
    description, trained = predictor.description, predictor.model.state_dict()
    model = description.build()
    initial = {name: one.clone() for name, one in model.state_dict().items()}
    own = class_parameters(description)
    assert all(not torch.equal(initial[name], trained[name]) for name in own)
    assert load_whole(model, description, classes, weights) == (own if is_reset else [])
    for name, one in model.state_dict().items():
        assert torch.equal(one, initial[name] if is_reset and name in own else trained[name])


def test_a_job_compares_the_class_names_of_its_data_with_those_of_the_checkpoint(weights, predictor, tmp_path):
    """Not their number, nor the ids of their categories."""
    name = class_parameters(predictor.description)[0]
    for names, ids, is_reset in ((BY_ID, (1, 2, 3), False), (("car", "bus", "tram"), sorted(IDS), True)):
        images = [entry(one) for one in range(1, 5)]
        boxes = [annotated(one, one, category_id=ids[0]) for one in range(1, 5)]
        data = tmp_path / names[0]
        for split in ("train", "val"):
            content = document(images, boxes, categories=categories(names, ids))
            write_split(data, f"annotations/instances_{split}2017.json", f"{split}2017", content)
        job = tiny(data, checkpoint=str(weights), seed=5).job()
        assert torch.equal(job.model.state_dict()[name], predictor.model.state_dict()[name]) != is_reset
        assert any("trained for other classes" in line for line in job.notices) == is_reset


# ---- images of the job ----


@pytest.mark.parametrize("crop", [False, True])
@pytest.mark.parametrize("hflip", [0.0, 1.0])
def test_training_crops_and_flips_as_the_recipe_says_and_evaluation_never(objects, crop, hflip):
    job = tiny(objects, crop=crop, hflip=hflip).job()
    views = [job.reader("train", training=True).transform.view(IMAGE) for _ in range(30)]
    assert {view.mirrored for view in views} == {hflip == 1.0}
    assert any(view.region != WHOLE for view in views) == crop
    for split in ("train", "val"):
        transform = job.reader(split, training=False).transform
        assert {transform.view(IMAGE) for _ in range(30)} == {transform.view(IMAGE)}
        view = transform.view(IMAGE)
        assert (view.region, view.size, view.mirrored) == (WHOLE, (53, 80), False)


def test_evaluation_batches_have_the_given_number_of_images_for_any_number_of_processes(objects):
    """One by default, so that nothing depends on padding, unlike the micro-batches of training."""
    job, other = tiny(objects).job(), tiny(objects, eval_batch_size=3).job()

    def sizes(job, rank, world):
        return [len(batch) for batch in job.evaluation_batches("val", rank, world)]

    for world in (1, 2):
        assert (job.evaluation_batch_size(world), other.evaluation_batch_size(world)) == (1, 3)
    assert sizes(job, 0, 1) == [1] * 5
    assert [sizes(job, rank, 2) for rank in (0, 1)] == [[1] * 3, [1] * 2]
    assert sizes(other, 0, 1) == [3, 2]
    assert [sizes(other, rank, 2) for rank in (0, 1)] == [[3], [2]]
