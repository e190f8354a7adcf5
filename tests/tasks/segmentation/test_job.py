"""Training, resuming, evaluating and predicting with segmenters, on tiny scenes in ADE20K's layout."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import faults
from commands import run as call
from commands import run_apart
from faults import Kill
from polaformer.errors import DataError, SettingsError
from polaformer.recipes import ade20k, camvid
from polaformer.tasks.dense import job as dense_job
from polaformer.tasks.dense import memory_limit
from polaformer.tasks.dense.trained_model import class_parameters
from polaformer.tasks.running import prepare
from polaformer.tasks.segmentation import job as segmentation_job
from polaformer.tasks.segmentation.predictor import load_predictor
from polaformer.tasks.segmentation.published import ROWS
from polaformer.tasks.segmentation.recipe import SegmentationRecipe
from polaformer.training.freezing import frozen_names
from polaformer.training.optim import create_optimizer
from polaformer.weights.errors import WeightsError
from segmentation_files import NAMES, write_classes, write_pair, write_scenes

SMALL = {
    "model": "pola_pvt_tiny",
    "dims": (8, 8, 16, 16),
    "depths": (1, 1, 1, 1),
    "num_heads": (1, 1, 2, 2),
    "mlp_ratios": (1.0, 1.0, 1.0, 1.0),
    "fpn_width": 8,
    "head_width": 8,
    "crop_size": 48,
    "base_size": (48, 96),
    "eval_size": 48,
    "eval_max_size": 96,
}
TIMES = {"steps": 4, "warmup_steps": 1, "batch_size": 4, "accumulation": 2, "num_workers": 0, "schedule": "polynomial"}
TIMES |= {"lr": 1e-3, "lr_images": 0, "save_every": 2, "log_every": 2, "eval_every_steps": 2, "clip_norm": 1.0}


def tiny(data: str | Path, **changes) -> SegmentationRecipe:
    return replace(SegmentationRecipe(name="test/segmenter"), data=str(data), **SMALL | TIMES | changes)


def upernet(data: str | Path, **changes) -> SegmentationRecipe:
    heads = {"segmenter": "upernet", "fpn_width": 256, "auxiliary_width": 8, "accumulation": 1}
    return tiny(data, **heads | changes)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_scenes(tmp_path_factory.mktemp("scenes"), 10)


# ---- recipes ----


def test_every_row_of_the_paper_has_a_recipe():
    names = {recipe.name for recipe in ade20k.RECIPES}
    assert names == {f"ade20k/{row.segmenter}-{row.model.replace('_', '-')}" for row in ROWS}
    for recipe in (*ade20k.RECIPES, *camvid.RECIPES):
        assert replace(recipe, data="somewhere").problems() == []
        assert recipe.expected


def test_the_schedules_are_those_of_the_paper():
    """AdamW, 2e-4, weight decay 1e-3, 16 crops of 512 pixels, 40,000 updates of Semantic FPN and 160,000 of UPerNet."""
    for recipe in ade20k.RECIPES:
        assert recipe.steps == (160_000 if recipe.segmenter == "upernet" else 40_000)
        assert (recipe.optimizer, recipe.lr, recipe.weight_decay, recipe.batch_size) == ("adamw", 2e-4, 1e-3, 16)
        assert (recipe.scaled(recipe.lr), recipe.schedule, recipe.min_lr) == (2e-4, "polynomial", 0.0)
        assert (recipe.crop_size, recipe.base_size, recipe.scales) == (512, (512, 2048), (0.5, 2.0))
        assert (recipe.eval_size, recipe.eval_max_size, recipe.inference) == (512, 2048, "whole")
        assert (recipe.hflip, recipe.photometric, recipe.max_class_share, recipe.clip_norm) == (0.5, True, 0.75, None)
        schedule = (recipe.poly_power, recipe.warmup_steps, recipe.drop_path_rate)
        assert schedule == ((1.0, 1500, 0.3) if recipe.segmenter == "upernet" else (0.9, 0, 0.1))
        assert recipe.segmenter != "upernet" or recipe.warmup_lr == pytest.approx(1e-6 * recipe.lr)


def test_the_crops_are_those_that_the_recipe_asks_for(scenes):
    changes = {"scales": (0.7, 0.9), "hflip": 0.25, "max_class_share": 0.5, "photometric": False}
    crop = tiny(scenes, **changes).job().reader("train", training=True).transform
    assert {name: getattr(crop, name) for name in changes} == changes
    assert (crop.size, crop.base) == (48, (48, 96))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segmenter": "upernet"}, "fpn_width is 8, but the pyramid of upernet has head_width channels; leave it out"),
        ({"head_width": 0}, "head_width is 0; give an integer ≥ 1"),
        ({"crop_size": 0}, "crop_size is 0; give an integer ≥ 1"),
        ({"dropout": 1.0}, r"dropout is 1.0; give a number in \[0, 1\)"),
        ({"max_class_share": 0.0}, r"max_class_share is 0.0; give a number in \(0, 1\]"),
        ({"base_size": (96, 48)}, r"base_size is \(96, 48\); give the shorter and the longer side"),
        ({"scales": (2.0, 0.5)}, r"scales is \(2.0, 0.5\); give two numbers > 0, the smaller one first"),
        ({"scales": (0.5, float("inf"))}, "scales is"),
        ({"eval_size": 200}, "eval_max_size is 96, less than eval_size, 200"),
        ({"window": 32}, "window and stride are for sliding windows, but inference is whole"),
        ({"inference": "slide", "window": 32, "stride": 33}, "stride is 33, larger than the window, 32"),
        ({"hflip": -1.0}, "hflip is -1.0"),
        ({"val_share": 1.0}, "val_share is 1.0"),
        ({"std": (0.0, 1.0, 1.0)}, "std above 0"),
        ({"mean": (float("nan"), 0.0, 0.0)}, "mean is .*; give three numbers each, all finite"),
        ({"std": (1.0, 1.0, float("inf"))}, "give three numbers each, all finite, and std above 0"),
        ({"checkpoint": "a", "backbone": "b"}, "checkpoint and backbone are both given"),
        ({"model": "pola_deit_tiny"}, "pola_deit_tiny"),
        ({"model": "pola_pvt_tinny"}, "did you mean 'pola_pvt_tiny'"),
        ({"num_heads": (3, 1, 2, 2)}, "backbone pola_pvt_tiny: .* dim 8 is not divisible by 3 heads"),
        ({"attention_options": ("gate=foo",)}, "backbone pola_pvt_tiny: .*foo"),
        ({"attention": "linformer", "crop_size": 320}, "linformer has parameters per token"),
        (
            {"attention": "linformer", "eval_size": 320, "eval_max_size": 320},
            "evaluation on 1 image of 320×320 pixels: linformer",
        ),
        (
            {"attention": "linformer", "eval_size": None, "eval_max_size": 10**6},
            "evaluation on 1 image of 8000×8000 pixels: lin",
        ),
        ({"eval_size": 100_000, "eval_max_size": 100_000}, "100000×100000 pixels needs at least .*; make eval_size"),
        ({"frozen_stages": 5}, "frozen_stages is 5"),
        ({"batch_size": 64, "accumulation": 1}, "batch_size is 64, but there are only 10 training images"),
    ],
)
def test_settings_that_make_no_sense_are_refused(scenes, changes, message):
    with pytest.raises(SettingsError, match=message):
        prepare(tiny(scenes, **changes))


def test_windows_and_images_as_they_are_need_no_more_than_fits(scenes):
    prepare(tiny(scenes, attention="linformer", eval_size=320, eval_max_size=320, inference="slide", window=64))
    prepare(tiny(scenes, eval_size=None, eval_max_size=10**6))


def test_windows_of_a_recipe_are_as_large_as_its_crops(scenes):
    assert tiny(scenes, inference="slide").window_and_stride == (48, 32)
    job = tiny(scenes, inference="slide", window=40, stride=20).job()
    assert (job.inference.mode, job.inference.window, job.inference.stride) == ("slide", 40, 20)


def test_one_image_at_a_time_is_refused_where_batch_norm_cannot_train_on_it(scenes):
    """UPerNet averages an image to one cell."""
    with pytest.raises(
        SettingsError, match=r"batch norm cannot train upernet on one image .* accumulation 4: give a larger batch_size"
    ):
        prepare(upernet(scenes, accumulation=4))
    prepare(upernet(scenes, accumulation=2))
    prepare(tiny(scenes, accumulation=4))


def test_more_memory_than_there_is_is_refused_with_an_estimate(scenes, monkeypatch):
    """The memory is that for the images of a process at once, not for one."""
    recipe = tiny(scenes)
    one, two = (recipe.job().memory(number).total for number in (1, 2))
    assert one < two
    monkeypatch.setattr(memory_limit, "device_memory", lambda device: (one + two) // 2)
    prepare(replace(recipe, accumulation=4))
    with pytest.raises(SettingsError, match=r"2 images of 64×64 pixels: training needs at least \d+\.\d GB"):
        prepare(recipe)


def test_the_memory_grows_with_the_classes(tmp_path, scenes):
    """Their logits have the size of the crop."""
    job = tiny(scenes).job()
    few = job.memory(4).activations
    job.classes = tuple(str(number) for number in range(150))
    assert job.memory(4).activations - few > 0.9 * 4 * 147 * 64 * 64 * 4


# ---- the job ----


def test_tables_and_norms_are_not_decayed_and_frozen_stages_are_the_backbones(scenes):
    recipe = tiny(scenes, frozen_stages=1, accumulation=1)
    job = recipe.job()
    groups = create_optimizer(job.model, recipe).param_groups
    names = {id(parameter): name for name, parameter in job.model.named_parameters()}
    exempt = {names[id(one)] for group in groups if group["weight_decay"] == 0 for one in group["params"]}
    assert any(name.endswith("key_positions.rows") for name in exempt)
    assert any(name.startswith("head.") and name.endswith(".bias") for name in exempt)
    assert not any(name.endswith("qkv.weight") for name in exempt)
    frozen = frozen_names(job.model, 1)
    assert frozen
    assert all(name.startswith("features.backbone.stages.0.") or "pos_embed" in name for name in frozen)


@pytest.mark.parametrize("case", [Kill("update", 3), Kill("system call", 30)], ids=["update", "save"])
def test_resume_after_kill_is_bitwise_equal(scenes, tmp_path, case):
    """By the command after a kill in an update, by the same training after a kill in a save."""
    recipe = tiny(scenes, eval_every_steps=4, drop_path_rate=0.2)
    assert faults.run(tmp_path / "whole", recipe) == [0]
    assert faults.run(tmp_path / "killed", recipe, kill=case) != [0]
    if case.event == "update":
        [(code, _, errors)] = run_apart(["resume", tmp_path / "killed"], tmp_path)
        assert code == 0, errors
    else:
        assert faults.run(tmp_path / "killed", recipe) == [0]
    assert faults.outcome(tmp_path / "killed") == faults.outcome(tmp_path / "whole")


def test_the_loss_of_a_training_is_that_of_both_heads(scenes):
    job = upernet(scenes).job()
    job.model.eval()
    batch = next(job.training_batches(0, 0, 1))
    losses = job.model.losses(batch.images, batch.mask, batch.labels)
    assert set(losses) == {"loss_decode", "loss_auxiliary"}
    assert job.objective.loss(job.model, batch).item() == pytest.approx(sum(one.item() for one in losses.values()))


def test_batch_norm_shares_its_statistics_between_gpus(scenes, monkeypatch):
    """A process may then have one image."""
    norms = {type(one) for one in upernet(scenes).job().model.modules() if "BatchNorm" in type(one).__name__}
    assert norms == {torch.nn.BatchNorm2d}
    monkeypatch.setattr(dense_job, "shares_statistics", lambda: True)
    monkeypatch.setattr(segmentation_job, "shares_statistics", lambda: True)
    job = upernet(scenes, accumulation=4).job()
    norms = {type(one) for one in job.model.modules() if "BatchNorm" in type(one).__name__}
    assert norms == {torch.nn.SyncBatchNorm}


def test_data_that_have_changed_are_not_resumed_on(scenes, tmp_path):
    data = write_scenes(tmp_path / "scenes", 6)
    assert faults.run(tmp_path / "run", tiny(data), kill=Kill("update", 3)) != [0]
    write_pair(tmp_path / "scenes/images/training", tmp_path / "scenes/annotations/training", 50)
    assert faults.run(tmp_path / "run", tiny(data)) == [1]
    assert "the data are not those that" in faults.errors(tmp_path / "run")


def test_a_checkpoint_with_other_classes_keeps_everything_but_the_last_layers(scenes, tmp_path):
    job = upernet(scenes).job()
    file = tmp_path / "model.safetensors"
    job.predictor(job.model).save(file)
    again = upernet(scenes, checkpoint=str(file), seed=5).job()
    assert all(torch.equal(one, job.model.state_dict()[name]) for name, one in again.model.state_dict().items())

    data = write_scenes(tmp_path / "others", 4, names=("sea", "sand", "boat"))
    other = upernet(data, checkpoint=str(file), seed=5).job()
    own = set(class_parameters(other.description))
    assert {name.partition(".")[0] for name in own} == {"head", "auxiliary"}
    for name, one in other.model.state_dict().items():
        assert name.endswith("bias") or torch.equal(one, job.model.state_dict()[name]) == (name not in own)
    assert any("trained for other classes" in line for line in other.notices)


def test_a_checkpoint_of_another_segmenter_is_refused(scenes, tmp_path):
    job = tiny(scenes).job()
    file = tmp_path / "model.safetensors"
    job.predictor(job.model).save(file)
    with pytest.raises(WeightsError, match=r"holds another segmenter \(semantic-fpn with pola_pvt_tiny\), and nothing was"):
        upernet(scenes, checkpoint=str(file)).job()
    bare = tmp_path / "bare.safetensors"
    save_file({"a": torch.zeros(1)}, bare)
    with pytest.raises(WeightsError, match="does not hold a segmenter of ours"):
        tiny(scenes, checkpoint=str(bare)).job()


def test_backbone_weights_are_loaded_and_reported(scenes, tmp_path):
    job = tiny(scenes).job()
    file = tmp_path / "model.safetensors"
    job.predictor(job.model).save(file)
    other = upernet(scenes, backbone=str(file), seed=5).job()
    for name, one in other.model.state_dict().items():
        if name.startswith("features.backbone."):
            assert torch.equal(one, job.model.state_dict()[name])
    assert any(str(file) in line for line in other.notices)


# ---- commands ----


@pytest.fixture(scope="module")
def run(scenes, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "segmenter"
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items() if not isinstance(value, tuple)]
    for name in ("dims", "depths", "num_heads", "mlp_ratios", "base_size"):
        options += [f"--{name.replace('_', '-')}", *(str(value) for value in SMALL[name])]
    options += ["--steps", "4", "--warmup-steps", "1", "--eval-every-steps", "4", "--batch-size", "4", "--num-workers", "0"]
    command = ["train", "camvid/semantic-fpn-pola-pvt-nano", "--data", scenes, "--out", folder, *options]
    [(code, out, errors)] = run_apart(command, folder.parent)
    assert code == 0, errors
    assert "mIoU of the most frequent class alone" in out
    return folder


def test_the_journal_the_weights_file_and_both_processes_of_an_evaluation_agree(run, tmp_path):
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    told = next(line for line in reversed(lines) if "mIoU" in line and line.get("split", "val") == "val")
    command = ["eval", "--checkpoint", run, "--json", "--num-workers", "0"]
    [(code, alone, errors)] = run_apart(command, tmp_path)
    assert code == 0, errors
    result = json.loads(alone)["result"]
    assert result["samples"] == 5
    assert {name: told[name] for name in result} == result
    results = run_apart([*command, "--batch-size", "2"], tmp_path, processes=2)
    assert [code for code, _, _ in results] == [0, 0]
    assert json.loads(results[0][1])["result"] == result


def test_eval_slides_scales_and_flips(run, capsys):
    def result(*options):
        code, out, errors = call(["eval", "--checkpoint", run, "--json", "--num-workers", "0", *options], capsys)
        assert code == 0, errors
        return json.loads(out)

    usual = result()
    assert (usual["mode"], usual["shorter_side"], usual["scales"], usual["flip"]) == ("whole", 48, [1.0], False)
    assert [one["class"] for one in usual["per_class"]] == list(NAMES)
    assert sum(one["IoU"] for one in usual["per_class"]) / 3 == pytest.approx(usual["result"]["mIoU"])
    assert sum(one["pixels"] for one in usual["per_class"]) == usual["result"]["pixels"]
    large = result("--mode", "slide", "--window", "96")
    assert (large["mode"], large["window"], large["stride"]) == ("slide", 96, 64)
    assert large["result"] == usual["result"]
    small = result("--mode", "slide", "--window", "32", "--stride", "16")
    changed = [
        small,
        result("--flip"),
        result("--scales", "0.5", "1", "1.5"),
        result("--size", "96"),
        result("--split", "test"),
    ]
    assert changed[2]["scales"] == [0.5, 1.0, 1.5]
    assert (changed[3]["shorter_side"], changed[3]["longer_side_at_most"]) == (96, 192)
    assert all(one["result"] != usual["result"] for one in changed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--window", "32"], "--window and --stride are for sliding windows, but whole images are segmented; add --mode slide"),
        (["--mode", "whole", "--stride", "32"], "--stride is for sliding windows, but --mode is whole"),
        (["--mode", "slide", "--stride", "64", "--window", "32"], "stride is 64, but window is 32"),
        (["--mode", "slid"], "slid"),
        (["--scales", "0"], "--scales is (0.0,); give numbers > 0"),
        (["--size", "0"], "--size is 0; give an integer ≥ 1"),
        (["--size", "100000"], "evaluation on 1 image of 100000×200000 pixels needs at least"),
        (["--scales", "1", "4000"], "evaluation on 1 image of 192000×384000 pixels needs at least"),
        (["--window", "0"], "--window is 0; give an integer ≥ 1"),
        (["--split", "tset"], "tset"),
    ],
)
def test_evaluations_that_make_no_sense_are_refused(run, options, message, capsys):
    code, _, errors = call(["eval", "--checkpoint", run, *options], capsys)
    assert code in (2, 65)
    assert message in " ".join(errors.split())


def test_eval_prints_the_worst_classes_first(run, capsys):
    code, out, errors = call(["eval", "--checkpoint", run, "--num-workers", "0"], capsys)
    assert code == 0, errors
    rows = [line.split("│") for line in out.split("by class, the worst first")[1].splitlines() if line.startswith("│")]
    assert sorted(row[1].strip() for row in rows) == sorted(NAMES)
    values = [float(row[4]) for row in rows]
    assert values == sorted(values)


def test_eval_on_data_with_other_classes_is_refused(run, tmp_path, capsys):
    data = write_scenes(tmp_path / "others", 4, names=("sea", "sand", "boat"))
    code, _, errors = call(["eval", "--checkpoint", run, "--data", data], capsys)
    assert code == 65
    assert "sea" in errors


def test_predict_writes_overlay_class_map_and_json(run, scenes, tmp_path, capsys):
    image = Path(scenes) / "images/test/200.png"
    twin = write_pair(tmp_path / "more", tmp_path / "masks", 200)
    taken = write_pair(tmp_path / "more", tmp_path / "masks", 201, name="200-classes")
    (tmp_path / "bad.png").write_text("no image")
    inputs, out = [image, twin, taken, tmp_path / "bad.png"], tmp_path / "drawn"
    code, printed, errors = call(["predict", *inputs, "--checkpoint", run, "--out", out, "--json"], capsys)
    assert code == 65
    assert "bad.png" in errors or "bad.png" in json.loads(printed)["unreadable"][0]
    answers = json.loads(printed)["images"]
    assert [one["drawn"] for one in answers] == ["200.png", "200-2.png", "200-classes-2.png"]
    assert [one["class_map"] for one in answers] == ["200-classes.png", "200-2-classes.png", "200-classes-2-classes.png"]
    told = json.loads((out / "segmentation.json").read_text())
    assert told == {"classes": list(NAMES), "images": answers}
    for answer, path in zip(answers, inputs, strict=False):
        with Image.open(out / answer["class_map"]) as labels, Image.open(path) as original:
            assert labels.mode == "P"
            assert labels.size == original.size == (answer["width"], answer["height"])
            values = np.asarray(labels)
            assert labels.getpalette()[:9] == [96, 128, 192, 48, 160, 64, 192, 48, 32]
        assert sum(one["pixels"] for one in answer["classes"]) == values.size
        for one in answer["classes"]:
            assert NAMES[one["label"]] == one["class"]
            assert (values == one["label"]).sum() == one["pixels"] == round(one["share"] * values.size)
        with Image.open(out / answer["drawn"]) as drawn:
            assert drawn.mode == "RGB"
            assert drawn.width >= answer["width"]


def test_predict_segments_as_eval_does(run, scenes, capsys):
    """With the options of an evaluation, of which those of the training are the defaults."""
    images = [Path(scenes) / f"images/validation/{number}.png" for number in range(100, 105)]

    def predicted(*options):
        code, out, errors = call(["predict", *images, "--checkpoint", run, "--json", *options], capsys)
        assert code == 0, errors
        return json.loads(out)["images"]

    usual = predicted()
    assert predicted("--size", "48", "--mode", "slide", "--window", "96") == usual
    small = ["--mode", "slide", "--window", "32", "--stride", "16"]
    assert all(predicted(*options) != usual for options in (small, ["--flip"], ["--scales", "0.5"], ["--size", "96"]))
    code, _, errors = call(["predict", *images, "--checkpoint", run, "--window", "0"], capsys)
    assert code == 2
    assert "--window is 0; give an integer ≥ 1" in errors


def test_predict_does_not_overwrite_its_inputs(run, tmp_path, capsys):
    image = write_pair(tmp_path / "images", tmp_path / "masks", 200, name="a-classes")
    write_pair(tmp_path / "images", tmp_path / "masks", 201, name="a")
    before = image.read_bytes()
    inputs = [image.with_name("a.png"), image]
    for given in (inputs, inputs[:1]):
        code, _, errors = call(["predict", *given, "--checkpoint", run, "--out", tmp_path / "images"], capsys)
        assert code == 2
        assert "would overwrite what is given" in " ".join(errors.split())
    assert len(list((tmp_path / "images").iterdir())) == 2
    assert image.read_bytes() == before


def test_the_report_shows_predictions_and_classes(run):
    page = (run / "report.html").read_text()
    for heading in ("Predictions", "IoU by class", "Confusion of classes"):
        assert f"<h2>{heading}</h2>" in page
    assert "validation pixels are classified correctly" in page


def test_damaged_and_foreign_weights_are_refused(run, tmp_path, capsys):
    content = (run / "model.safetensors").read_bytes()
    changes = ((b"semantic-fpn", b"semantic-fpm"), (b'\\"num_classes\\": 3', b'\\"num_classes\\": 4'))
    changes += ((b"[96, 128, 192]", b"[96, 128, 999]"), (b'\\"mode\\": \\"whole\\"', b'\\"mode\\": \\"whola\\"'))
    for old, new in changes:
        assert old in content
        damaged = tmp_path / "model.safetensors"
        damaged.write_bytes(content.replace(old, new))
        code, _, errors = call(["predict", "a.png", "--checkpoint", damaged], capsys)
        assert code == 65
        assert "its description of the segmenter is not valid" in errors
    old, new = b'\\"num_heads\\": [1, 1, 2, 2]', b'\\"num_heads\\": [3, 1, 2, 2]'
    assert old in content
    damaged.write_bytes(content.replace(old, new))
    code, _, errors = call(["predict", "a.png", "--checkpoint", damaged], capsys)
    assert code == 65
    assert "its segmenter cannot be built: backbone pola_pvt_tiny: " in " ".join(errors.split())
    assert load_predictor(run / "model.safetensors").classes == NAMES


def test_help_dry_run_and_check(scenes, capsys):
    code, out, _ = call(["train", "ade20k/semantic-fpn-pola-pvt-tiny", "--help"], capsys)
    assert code == 0
    assert "38.3" in out
    dry_run = ["--crop-size", "64", "--dry-run", "--json"]
    code, out, errors = call(["train", "camvid/semantic-fpn-pola-pvt-nano", "--data", scenes, *dry_run], capsys)
    assert code == 0, errors
    needs = json.loads(out)["needs"]
    assert (needs["train_images"], needs["val_images"], needs["test_images"], needs["classes"]) == (10, 5, 2, 3)
    assert needs["class_names"] == ", ".join(NAMES)
    code, out, _ = call(["check", scenes, "--json"], capsys)
    assert code == 0
    facts = json.loads(out)["parts"]["train"]
    assert (facts["images"], facts["label_set"]) == (10, f"{scenes}/classes.txt")


def test_models_are_listed_at_both_sizes(capsys):
    code, out, errors = call(["models", "semantic-fpn-*-pvt-tiny", "--task", "segmentation", "--json"], capsys)
    assert code == 0, errors
    found = [(one["name"], one["size"], round(one["macs"] / 1e9, 1)) for one in json.loads(out)["models"]]
    assert found == [
        ("semantic-fpn-pola-pvt-tiny", [512, 512], 33.2),
        ("semantic-fpn-pola-pvt-tiny", [512, 2048], 132.9),
        ("semantic-fpn-softmax-pvt-tiny", [512, 512], 33.2),  # as PVT's paper says
        ("semantic-fpn-softmax-pvt-tiny", [512, 2048], 157.7),
    ]


@pytest.mark.long
@pytest.mark.parametrize("segmenter", [tiny, upernet])
def test_two_processes_evaluate_with_the_same_batch_norm(scenes, tmp_path, segmenter):
    """Each process has statistics of its own; the journal must tell what the shipped weights achieve."""
    recipe = segmenter(scenes, accumulation=1, steps=2, eval_every_steps=2)
    assert faults.run(tmp_path / "run", recipe, processes=2, port=faults.free_port()) == [0, 0]
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    told = next(line for line in reversed(lines) if "mIoU" in line and line.get("split", "val") == "val")
    [(code, out, errors)] = run_apart(["eval", "--checkpoint", tmp_path / "run", "--json"], tmp_path)
    assert code == 0, errors
    found = json.loads(out)["result"]
    assert {name: told[name] for name in found} == found


def test_a_backbone_of_another_family_trains_too(scenes, tmp_path):
    """Swin's windows and PVTv2's convolutions meet crops that their strides do not divide."""
    for model, dims in (("pola_swin_tiny", (8, 16, 32, 64)), ("pola_pvt_v2_b0", (8, 8, 16, 16))):
        recipe = upernet(scenes, model=model, dims=dims, crop_size=50)
        job = recipe.job()
        batch = next(job.training_batches(0, 0, 1))
        assert batch.images.shape == (4, 3, 64, 64)
        loss = job.objective.loss(job.model.train(), batch)
        loss.backward()
        assert torch.isfinite(loss)


def test_classes_of_the_data_are_the_classes_of_the_model_and_paths_are_absolute(tmp_path, monkeypatch):
    data = write_scenes(tmp_path / "scenes", 4)
    assert tiny(data).job().classes == NAMES
    with pytest.raises(DataError, match=r"there is no label set 'ade20' .*did you mean 'ade20k'"):
        tiny(data, label_set="ade20").job()
    (tmp_path / "scenes/classes.txt").unlink()
    write_classes(tmp_path, ("a", "b", "c"))
    assert tiny(data, label_set=str(tmp_path / "classes.txt")).job().classes == ("a", "b", "c")
    monkeypatch.chdir(tmp_path)
    pairs = "scenes/images/training:scenes/annotations/training"
    for label_set in ("classes.txt", "camvid", None):
        values = tiny(pairs, label_set=label_set, checkpoint="a").values_with_absolute_paths()
        assert values["data"] == ":".join(f"{tmp_path}/{one}" for one in pairs.split(":"))
        assert values["label_set"] == (f"{tmp_path}/classes.txt" if label_set == "classes.txt" else label_set)
        assert values["checkpoint"] == f"{tmp_path}/a"
