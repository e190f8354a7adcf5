"""Training, resuming, evaluating and predicting with detectors, on tiny data in the format of COCO."""

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import faults
from coco_files import IDS, NAMES, WIDTH, annotated, document, entry, write_coco, write_image, write_split
from commands import run as call
from commands import run_apart
from faults import Kill
from polaformer.attention import names as mechanism_names
from polaformer.cli.options import as_arguments
from polaformer.errors import DataError, SettingsError
from polaformer.recipes.coco import RECIPES
from polaformer.recipes.registry import find
from polaformer.tasks.dense import memory_limit
from polaformer.tasks.dense.trained_model import class_parameters
from polaformer.tasks.detection.job import DetectionJob, describe, largest_size
from polaformer.tasks.detection.models import list_detectors
from polaformer.tasks.detection.predictor import load_predictor
from polaformer.tasks.detection.published import ROWS
from polaformer.tasks.detection.recipe import DetectionRecipe
from polaformer.tasks.running import prepare
from polaformer.training.freezing import frozen_names
from polaformer.training.optim import create_optimizer
from polaformer.weights.errors import WeightsError

SMALL = {
    "model": "pola_pvt_tiny",
    "dims": (8, 8, 16, 16),
    "depths": (1, 1, 1, 1),
    "num_heads": (1, 1, 2, 2),
    "mlp_ratios": (1.0, 1.0, 1.0, 1.0),
    "fpn_width": 8,
    "box_width": 16,
    "mask_width": 8,
    "num_samples": 16,
    "num_proposals": 32,
    "anchor_scale": 2.0,
    "sizes": (48, 64),
    "eval_size": 64,
    "max_size": 96,
}
TIMES = {"steps": 4, "warmup_steps": 1, "batch_size": 4, "group_size": 2, "accumulation": 2, "num_workers": 0}
TIMES |= {"lr": 1e-3, "lr_images": 0, "save_every": 2, "log_every": 2, "eval_every_steps": 2, "clip_norm": 1.0}


def tiny(data: str | Path, **changes) -> DetectionRecipe:
    return replace(DetectionRecipe(name="test/detector"), data=str(data), **SMALL | TIMES | changes)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_coco(tmp_path_factory.mktemp("coco"), 10)


# ---- recipes ----


def test_every_row_of_the_paper_has_a_recipe():
    names = {recipe.name for recipe in RECIPES}
    assert {f"coco/{row.detector}-{row.model.replace('_', '-')}-{row.schedule}x" for row in ROWS} <= names
    assert "coco/mask-rcnn-pola-pvt-tiny-1x" in names
    for recipe in RECIPES:
        assert replace(recipe, data="somewhere").problems() == []


def test_the_schedules_are_those_of_the_paper(objects):
    """AdamW, 1e-4, weight decay 1e-4, 16 images, 500 updates of warm-up, a tenth after 8 and 11 epochs, or 27 and 33."""
    for recipe in (one for one in RECIPES if one.name.endswith("x")):
        long = recipe.name.endswith("3x")
        assert (recipe.epochs, recipe.milestones) == ((36, (27, 33)) if long else (12, (8, 11)))
        assert (recipe.optimizer, recipe.lr, recipe.weight_decay, recipe.batch_size) == ("adamw", 1e-4, 1e-4, 16)
        assert (recipe.scaled(recipe.lr), recipe.warmup_steps, recipe.schedule) == (1e-4, 500, "multi-step")
        assert recipe.crop == long
        assert recipe.max_size == 1333


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"detector": "retinanet"},
            "num_samples.*: only for mask-rcnn and cascade-mask-rcnn; start from a recipe of retinanet",
        ),
        ({"group_size": 3}, "group_size is 3, which does not divide batch_size, 4"),
        ({"sizes": ()}, r"sizes is \(\); give integers ≥ 1"),
        ({"max_size": 50}, "max_size is 50, less than the largest of sizes and eval_size"),
        ({"eval_size": 0}, "eval_size is 0; give an integer ≥ 1"),
        ({"score_threshold": 2.0}, r"score_threshold is 2.0; give a number in \[0, 1\]"),
        ({"hflip": -1.0}, "hflip is -1.0"),
        ({"val_share": 1.0}, "val_share is 1.0"),
        ({"std": (0.0, 1.0, 1.0)}, "std above 0"),
        ({"mean": (float("nan"), 0.0, 0.0)}, "mean is .*; give three numbers each, all finite"),
        ({"std": (1.0, 1.0, float("inf"))}, "give three numbers each, all finite, and std above 0"),
        ({"anchor_scale": 0.0}, "anchor_scale is 0.0; give a number > 0"),
        ({"num_proposals": 0}, "num_proposals is 0; give an integer ≥ 1"),
        ({"checkpoint": "a", "backbone": "b"}, "checkpoint and backbone are both given"),
        ({"model": "pola_deit_tiny"}, "pola_deit_tiny"),
        ({"model": "pola_pvt_tinny"}, "did you mean 'pola_pvt_tiny'"),
        ({"attention": "polar"}, "polar"),
        ({"num_heads": (3, 1, 2, 2)}, "backbone pola_pvt_tiny: .* is not divisible by 3 heads"),
        ({"attention": "linformer", "sizes": (320,), "max_size": 480}, "linformer has parameters per token"),
        ({"attention": "linformer", "eval_size": 320, "max_size": 320}, "evaluation on 1 image of 320×320 pixels: linformer"),
        ({"eval_size": 100_000, "max_size": 100_000}, "evaluation on 1 image of 100000×100000 pixels needs at least"),
        ({"frozen_stages": 5}, "frozen_stages is 5"),
        ({"batch_size": 64, "accumulation": 1}, "batch_size is 64, but there are only 10 training images"),
        (
            {"batch_size": 10, "group_size": 10, "accumulation": 1},
            "do not fill a batch with groups of 10; make group_size smaller",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(objects, changes, message):
    with pytest.raises(SettingsError, match=message):
        prepare(tiny(objects, **changes))


def test_more_memory_than_there_is_is_refused_with_an_estimate(objects, monkeypatch):
    """The memory is that for the images of a process at once, not for one."""
    recipe = tiny(objects)
    one, two = (recipe.job().memory(number).total for number in (1, 2))
    assert one < two
    monkeypatch.setattr(memory_limit, "device_memory", lambda device: (one + two) // 2)
    prepare(replace(recipe, accumulation=4, group_size=1))
    with pytest.raises(SettingsError, match=r"2 images of 64×96 pixels: training needs at least \d+\.\d GB"):
        prepare(recipe)


def test_the_memory_is_estimated_once_and_before_weights_are_read(objects, monkeypatch):
    recipe, sizes = tiny(objects, accumulation=1), list[int]()
    estimate = DetectionJob.memory
    monkeypatch.setattr(DetectionJob, "memory", lambda job, part: sizes.append(part) or estimate(job, part))
    job, _ = prepare(recipe)
    job.needs(4)
    assert sizes == [4]
    monkeypatch.setattr(memory_limit, "device_memory", lambda device: 1000)
    with pytest.raises(SettingsError, match="4 images of 96×96 pixels: training needs at least"):
        replace(recipe, backbone="there is no such file").job()


def test_a_batch_of_tall_and_wide_images_is_a_square():
    recipe = DetectionRecipe()
    assert (largest_size(recipe), largest_size(recipe, mixed=True)) == ((800, 1344), (1344, 1344))


def test_masks_are_required_by_detectors_that_learn_them(tmp_path):
    images = [entry(one) for one in range(1, 5)]
    boxes = [annotated(one, one, segmentation=None) for one in range(1, 5)]
    for split in ("train", "val"):
        write_split(tmp_path, f"annotations/instances_{split}2017.json", f"{split}2017", document(images, boxes))
    with pytest.raises(SettingsError, match="mask-rcnn predicts masks, but no object of the train split has one; choose"):
        tiny(tmp_path).job()
    regions = {name: getattr(DetectionRecipe(), name) for name in ("box_width", "mask_width", "num_samples", "num_proposals")}
    assert not tiny(tmp_path, detector="retinanet", **regions).job().description.has_masks


def test_objects_are_required(tmp_path):
    for split in ("train", "val"):
        content = document([entry(one) for one in range(1, 5)], [])
        write_split(tmp_path, f"annotations/instances_{split}2017.json", f"{split}2017", content)
    with pytest.raises(DataError, match="there is no object to train on; annotate some"):
        tiny(tmp_path).job()


# ---- the job ----


def test_tables_and_norms_are_not_decayed_and_frozen_stages_are_the_backbones(objects):
    recipe = tiny(objects, frozen_stages=1, accumulation=1)
    job = recipe.job()
    groups = create_optimizer(job.model, recipe).param_groups
    names = {id(parameter): name for name, parameter in job.model.named_parameters()}
    exempt = {names[id(one)] for group in groups if group["weight_decay"] == 0 for one in group["params"]}
    assert any(name.endswith("key_positions.rows") for name in exempt)
    assert not any(name.endswith("qkv.weight") for name in exempt)
    frozen = frozen_names(job.model, 1)
    assert frozen
    assert all(name.startswith("features.backbone.stages.0.") or "pos_embed" in name for name in frozen)


def test_images_that_stay_together_have_the_same_shape(objects):
    job = tiny(objects).job()
    for keys, _ in zip(job.order.micro_batches(0, accumulation=2), range(4), strict=False):
        wide = {width > height for height, width in (job.data.train.sizes[key.index] for key in keys)}
        assert len(wide) == 1


@pytest.mark.parametrize("case", [Kill("update", 3), Kill("system call", 30)], ids=["update", "save"])
def test_resume_after_kill_is_bitwise_equal(objects, tmp_path, case):
    recipe = tiny(objects, eval_every_steps=4)
    assert faults.run(tmp_path / "whole", recipe) == [0]
    assert faults.run(tmp_path / "killed", recipe, kill=case) != [0]
    assert faults.run(tmp_path / "killed", recipe) == [0]
    assert faults.outcome(tmp_path / "killed") == faults.outcome(tmp_path / "whole")


def test_a_checkpoint_with_other_classes_keeps_everything_but_the_heads(objects, tmp_path):
    job = tiny(objects).job()
    file = tmp_path / "model.safetensors"
    job.predictor(job.model).save(file)
    again = tiny(objects, checkpoint=str(file), seed=5).job()
    assert all(torch.equal(one, job.model.state_dict()[name]) for name, one in again.model.state_dict().items())

    images = [entry(one) for one in range(1, 5)]
    names = [{"id": 1, "name": "car"}, {"id": 2, "name": "bus"}]
    cars = [annotated(one, one, category_id=1) for one in range(1, 5)]
    for split in ("train", "val"):
        content = document(images, cars, categories=names)
        write_split(tmp_path / "cars", f"annotations/instances_{split}2017.json", f"{split}2017", content)
    other = tiny(tmp_path / "cars", checkpoint=str(file), seed=5).job()
    own = set(class_parameters(other.description))
    assert own
    assert all(name.startswith("heads.stage.") for name in own)
    for name, one in other.model.state_dict().items():
        assert (name in own) == (one.shape != job.model.state_dict()[name].shape)
        assert name in own or torch.equal(one, job.model.state_dict()[name])


def test_a_checkpoint_of_another_detector_is_refused(objects, tmp_path):
    job = tiny(objects).job()
    file = tmp_path / "model.safetensors"
    job.predictor(job.model).save(file)
    with pytest.raises(WeightsError, match=r"holds another detector \(mask-rcnn with pola_pvt_tiny\), and nothing was loaded"):
        tiny(objects, checkpoint=str(file), detector="cascade-mask-rcnn").job()
    bare = tmp_path / "bare.safetensors"
    save_file({"a": torch.zeros(1)}, bare)
    with pytest.raises(WeightsError, match="does not hold a detector of ours"):
        tiny(objects, checkpoint=str(bare)).job()


def test_backbone_weights_are_loaded_and_reported(objects, tmp_path):
    job = tiny(objects).job()
    file = tmp_path / "model.safetensors"
    job.predictor(job.model).save(file)
    other = tiny(objects, backbone=str(file), seed=5).job()
    for name, one in other.model.state_dict().items():
        if name.startswith("features.backbone."):
            assert torch.equal(one, job.model.state_dict()[name])
    assert any(str(file) in line for line in other.notices)


def test_a_run_resumes_without_the_weights_that_it_started_from(objects, tmp_path):
    file = tmp_path / "model.safetensors"
    job = tiny(objects).job()
    job.predictor(job.model).save(file)
    recipe = tiny(objects, backbone=str(file), eval_every_steps=4)
    assert faults.run(tmp_path / "run", recipe, kill=Kill("update", 3)) != [0]
    file.unlink()
    assert faults.run(tmp_path / "run", recipe) == [0]


# ---- commands ----


@pytest.fixture(scope="module")
def run(objects, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "detector"
    recipe = tiny(objects)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items() if not isinstance(value, tuple)]
    for name in ("dims", "depths", "num_heads", "mlp_ratios", "sizes"):
        options += [f"--{name.replace('_', '-')}", *(str(value) for value in getattr(recipe, name))]
    options += ["--steps", "4", "--warmup-steps", "1", "--milestones", "3", "--batch-size", "4"]
    options += ["--group-size", "2", "--num-workers", "0"]
    command = ["train", "coco/mask-rcnn-pola-pvt-nano", "--data", objects, "--out", folder, *options]
    [(code, _, errors)] = run_apart(command, folder.parent)
    assert code == 0, errors
    return folder


def test_eval_writes_results_that_pycocotools_accept(run, tmp_path, capsys):
    from pycocotools.coco import COCO

    code, out, errors = call(["eval", "--checkpoint", run, "--json", "--results", tmp_path / "results"], capsys)
    assert code == 0, errors
    found = json.loads(out)
    assert found["result"]["samples"] == 5
    assert {"box_AP", "mask_AP", "box_AR100"} <= found["result"].keys()
    truth = COCO(next(Path(load(run)["data"]).glob("annotations/instances_val2017.json")))
    boxes = json.loads((tmp_path / "results" / "boxes.json").read_text())
    assert len(boxes) == found["result"]["detections"]
    if boxes:
        truth.loadRes(boxes)


def test_eval_tells_all_numbers_and_those_of_each_class(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    code, out, errors = call(["eval", "--checkpoint", run, "--json", "--num-workers", "0"], capsys)
    assert code == 0, errors
    found = json.loads(out)
    assert [one["class"] for one in found["per_class"]] == [name for _, name in sorted(zip(IDS, NAMES, strict=True))]
    assert sum(one["objects"] for one in found["per_class"]) == 7
    for kind in ("box", "mask"):
        mean = sum(one[f"{kind}_AP"] for one in found["per_class"]) / 3
        assert mean == pytest.approx(found["result"][f"{kind}_AP"])
        assert all(one[f"{kind}_AP50"] >= one[f"{kind}_AP"] for one in found["per_class"])
    code, out, errors = call(["eval", "--checkpoint", run, "--num-workers", "0"], capsys)
    assert code == 0, errors
    headers = [[one.strip() for one in line.split("┃")[1:-1]] for line in out.splitlines() if line.startswith("┃")]
    assert headers == [["metric", "box", "mask"], ["class", "objects", "box AP", "box AP50", "mask AP", "mask AP50"]]
    assert set(NAMES) <= {line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")}
    rows = {line.split("│")[1].strip(): line.split("│")[2:4] for line in out.splitlines() if line.startswith("│")}
    for name in ("AP", "AP50", "AP75", "AP small", "AP medium", "AP large", "AR1", "AR10", "AR100", "AR small", "AR medium"):
        for kind, text in zip(("box", "mask"), rows[name], strict=True):
            value = found["result"][f"{kind}_{name.replace(' ', '_')}"]
            assert text.strip() == ("–" if value is None else f"{value:.1f}")
    assert rows["shorter side"][0].strip() == "64"


def load(run: Path) -> dict:
    return json.loads((run / "config.json").read_text())["options"]


def test_predict_draws_and_writes_json(run, tmp_path, capsys):
    image = write_image(tmp_path / "a.png", 3)
    twin = write_image(tmp_path / "more" / "a.png", 4)
    (tmp_path / "bad.png").write_text("no image")
    out = tmp_path / "drawn"
    inputs = [image, twin, tmp_path / "bad.png"]
    code, printed, errors = call(["predict", *inputs, "--checkpoint", run, "--out", out, "--min-score", "0", "--json"], capsys)
    assert code == 65
    assert "bad.png" in errors or "bad.png" in json.loads(printed)["unreadable"][0]
    answers = json.loads(printed)["images"]
    assert [one["drawn"] for one in answers] == ["a.png", "a-2.png"]
    assert json.loads((out / "detections.json").read_text())["images"] == answers
    with Image.open(out / "a-2.png") as drawn:
        assert drawn.size[0] == WIDTH
    for one in answers[0]["objects"]:
        assert one["class"] in NAMES
        assert one["mask"]["size"] == [40, 60]
        assert len(one["box"]) == 4


def test_predict_does_not_overwrite_its_inputs(run, tmp_path, capsys):
    image = write_image(tmp_path / "a.png", 3)
    before = image.read_bytes()
    code, _, errors = call(["predict", image, "--checkpoint", run, "--out", tmp_path], capsys)
    assert code == 2
    assert "would overwrite what is given" in " ".join(errors.split())
    assert [one.name for one in tmp_path.iterdir()] == ["a.png"]
    assert image.read_bytes() == before


def test_help_is_for_the_task_of_the_weights(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    for command in ("predict", "eval"):
        code, out, _ = call([command, "--checkpoint", run, "--help"], capsys)
        assert code == 0
        assert "The options below are for the task detection." in out
        assert "image classification" not in out
        code, out, _ = call([command, "--help"], capsys)
        assert "The options below are for the task classification; --checkpoint PATH --help lists those for" in out


def test_a_detector_that_is_validated_on_its_training_images_tells_so(objects, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    data = f"{objects}/annotations/instances_train2017.json:{objects}/train2017"
    small = {
        name: SMALL[name]
        for name in ("dims", "depths", "num_heads", "mlp_ratios", "sizes", "eval_size", "max_size", "fpn_width")
    }
    times = {"steps": 2, "milestones": (1,), "warmup_steps": 0, "batch_size": 2, "group_size": 1, "num_workers": 0}
    options = small | times | {"data": data, "val_share": 0.0, "detector": "retinanet"}
    recipe = replace(find("coco/retinanet-pola-pvt-nano"), **options)
    arguments = as_arguments(recipe, find(recipe.name))
    code, out, errors = call(["train", recipe.name, *arguments, "--out", tmp_path / "run"], capsys)
    assert code == 0, errors
    assert "on 10 images (val: the training images)" in out
    page = (tmp_path / "run" / "report.html").read_text()
    assert "On 10 training images." in page
    assert "Of the 10 training images: " in page
    assert "validation images" not in page


def test_the_command_in_the_report_has_the_options_that_were_given(run):
    page = html.unescape((run / "report.html").read_text())
    [command] = re.findall(r"polaformer train coco/mask-rcnn-pola-pvt-nano[^<\n]*", page)
    for option in ("--sizes 48 64", "--steps 4", "--box-width 16", "--data "):
        assert option in command
    assert "--lr" not in command


def test_the_report_shows_predictions_and_curves(run):
    page = (run / "report.html").read_text()
    for heading in ("Predictions", "Precision and recall", "Average precision by class"):
        assert heading in page


def test_damaged_and_foreign_weights_are_refused(run, tmp_path, capsys):
    content = (run / "model.safetensors").read_bytes()
    for old, new in ((b"mask-rcnn", b"mask-rccn"), (b'\\"num_classes\\": 3', b'\\"num_classes\\": 4')):
        assert old in content
        damaged = tmp_path / "model.safetensors"
        damaged.write_bytes(content.replace(old, new))
        code, _, errors = call(["predict", "a.png", "--checkpoint", damaged], capsys)
        assert code == 65
        assert "its description of the detector is not valid" in errors
    by_id = tuple(name for _, name in sorted(zip(IDS, NAMES, strict=True)))
    assert load_predictor(run / "model.safetensors").classes == by_id


def test_help_dry_run_check_and_models(objects, capsys):
    code, out, _ = call(["train", "coco/retinanet-pola-pvt-tiny-1x", "--help"], capsys)
    assert code == 0
    assert "39.5" in out
    dry_run = ["--warmup-steps", "5", "--group-size", "2", "--dry-run", "--json"]
    code, out, errors = call(["train", "coco/mask-rcnn-pola-pvt-nano", "--data", objects, *dry_run], capsys)
    assert code == 0, errors
    needs = json.loads(out)["needs"]
    assert (needs["train_images"], needs["val_images"], needs["classes"]) == (10, 5, 3)
    code, out, _ = call(["check", objects, "--json"], capsys)
    assert code == 0
    assert json.loads(out)["parts"]["train"]["images"] == 10
    code, _, errors = call(["check", "nope.json:images"], capsys)
    assert code == 65
    assert "FILE.json:IMAGES" in " ".join(errors.split())


def test_the_list_has_the_models_of_all_recipes_and_their_softmax_twins():
    sizes = {model.name: model.about["size"] for model in list_detectors("*", ()).models}
    names = {recipe.name.removeprefix("coco/").removesuffix("-1x").removesuffix("-3x") for recipe in RECIPES}
    assert set(sizes) == names | {name.replace("-pola-", "-softmax-") for name in names}
    assert all(size == ([256, 480] if name.endswith("nano") else [800, 1280]) for name, size in sizes.items())


@pytest.mark.parametrize(
    "recipe", [one for one in RECIPES if "nano" in one.name or "cascade" in one.name], ids=lambda one: one.name
)
def test_a_listed_model_is_that_of_its_recipe(recipe):
    name = recipe.name.removeprefix("coco/").removesuffix("-3x")
    [model] = list_detectors(name, ()).models
    with torch.device("meta"):
        wanted = {name: one.shape for name, one in describe(recipe, 80).build().state_dict().items()}
        assert {name: one.shape for name, one in model.build().state_dict().items()} == wanted


def test_every_mechanism_runs_in_a_listed_detector():
    models = list_detectors("retinanet-pola-pvt-nano", ("all",)).models
    assert {model.about["attention"] for model in models} == set(mechanism_names())
    with torch.device("meta"), torch.inference_mode():
        assert all(model.forward(model.build())[0].is_meta for model in models)


def test_mechanisms_and_sizes_are_shown_and_no_column_is_empty(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    command = ["models", "*-pola-pvt-nano", "--task", "detection", "--attention", "linformer"]
    code, out, errors = call(command, capsys)
    assert code == 0, errors
    [header] = [line for line in out.splitlines() if "model" in line and "params" in line]
    assert not {"printed", "top-1"} & set(header.split())
    rows = [line.split() for line in out.splitlines() if line.startswith("│")]
    assert [(row[1], row[3], row[5]) for row in rows] == [
        (f"{detector}-pola-pvt-nano", "linformer", "256×480") for detector in ("retinanet", "mask-rcnn")
    ]


@pytest.mark.long
def test_the_models_of_all_rows_are_counted(capsys):
    code, out, _ = call(["models", "--task", "detection", "--json"], capsys)
    assert code == 0
    found = {one["name"]: one for one in json.loads(out)["models"]}
    large = [one for name, one in found.items() if not name.endswith("nano")]
    assert len(large) == 2 * len({(row.detector, row.model) for row in ROWS})
    assert all(one["params"] > 2e7 and one["macs"] > 1e11 for one in large)


def test_one_process_and_two_evaluate_alike(run, tmp_path):
    command = ["eval", "--checkpoint", run, "--json"]
    [(code, alone, errors)] = run_apart(command, tmp_path)
    assert code == 0, errors
    results = run_apart(command, tmp_path, processes=2)
    assert [code for code, _, _ in results] == [0, 0]
    assert json.loads(results[0][1])["result"] == json.loads(alone)["result"]


@pytest.mark.long
def test_two_processes_evaluate_with_the_same_batch_norm(objects, tmp_path):
    """Each process has statistics of its own; the journal must tell what the shipped weights achieve."""
    recipe = tiny(objects, detector="cascade-mask-rcnn", box_head="4conv1fc", accumulation=1, score_threshold=0.0, steps=2)
    assert faults.run(
        tmp_path / "run", replace(recipe, warmup_steps=1, eval_every_steps=2), processes=2, port=faults.free_port()
    ) == [0, 0]
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    told = next(line for line in reversed(lines) if "box_AP" in line)
    [(code, out, errors)] = run_apart(["eval", "--checkpoint", tmp_path / "run", "--json"], tmp_path)
    assert code == 0, errors
    found = json.loads(out)["result"]
    assert {name: told[name] for name in found} == found


def test_prepare_accepts_the_job(objects):
    job, _ = prepare(tiny(objects, steps=2, eval_every_steps=None))
    assert job.splits == ("val",)
