"""Recipes: the paper's hyperparameters, the authors' schedule, and every kind of invalid option."""

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import FrozenInstanceError, asdict, replace
from math import isclose
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from polaformer.backbones import create_model
from polaformer.backbones.published import ROWS as PUBLISHED
from polaformer.backbones.registry import MODELS
from polaformer.cli.options import parse
from polaformer.cli.train import Train
from polaformer.errors import SettingsError
from polaformer.recipes import imagenet
from polaformer.recipes.registry import OURS, find
from polaformer.tasks.classification.job import ClassificationJob
from polaformer.tasks.classification.recipe import ClassificationRecipe
from polaformer.tasks.options import with_values
from polaformer.tasks.recipe import as_values, option_names
from polaformer.tasks.running import prepare
from polaformer.training.optim import Schedule, create_optimizer


def with_words(recipe: Any, words: list[str], *others: Any) -> tuple[Any, ...]:
    """The recipe, and other dataclasses, with the options given on the command line."""
    return parse(words, recipe, *others, program="polaformer train")


IMAGENET_IMAGES = 1_281_167
RECIPES = {name: recipe for name, recipe in OURS.items() if isinstance(recipe, ClassificationRecipe)}
DIGITS = RECIPES["digits/pola-vit-tiny"]


def test_recipes_are_importable_without_pytorch() -> None:
    code = "import sys, polaformer.recipes.registry; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("name", "golden_name"),
    [
        ("imagenet/pola-swin-tiny-300", "pola_swin_t"),
        ("imagenet/pola-pvt-tiny-300", "pola_pvt_t"),
        ("imagenet/pola-pvt-small-300", "pola_pvt_s"),
        ("imagenet/pola-swin-base-384", "pola_swin_b_384"),
    ],
)
def test_learning_rates_are_the_authors(name: str, golden_name: str, golden: Path) -> None:
    wanted = json.loads((golden / "lr_schedule.json").read_text())[golden_name]
    recipe = find(name)
    steps_per_epoch = IMAGENET_IMAGES // recipe.batch_size
    assert (steps_per_epoch, recipe.batch_size) == (wanted["steps_per_epoch"], wanted["global_batch"])
    assert (recipe.epochs, recipe.cooldown_epochs) == (wanted["epochs"], wanted["cooldown"])
    assert isclose(recipe.scaled(recipe.lr), wanted["scaled_base_lr"], rel_tol=1e-12)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=recipe.scaled(recipe.lr))
    schedule = Schedule(optimizer, recipe, steps_per_epoch)
    for step, rate in wanted["lr_at_update"]:
        assert isclose(schedule.set(step), rate, rel_tol=1e-9), step


def test_the_rate_is_a_function_of_the_step_alone() -> None:
    recipe = find("imagenet/pola-swin-tiny")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=recipe.scaled(recipe.lr))
    schedule = Schedule(optimizer, recipe, 10)
    forward = [schedule.set(step) for step in range(0, 4000, 37)]
    assert [schedule.set(step) for step in reversed(range(0, 4000, 37))] == forward[::-1]


def test_every_variant_of_the_paper_has_its_400_epochs_and_the_released_300() -> None:
    wanted = [name for name in MODELS if name.startswith("pola") and not name.endswith("_384")]
    for model in wanted:
        name = f"imagenet/{model.replace('_', '-')}"
        paper, released = find(name), find(f"{name}-300")
        assert (paper.model, paper.epochs, paper.warmup_epochs, paper.cooldown_epochs) == (model, 400, 20, 0)
        assert (released.model, released.epochs) == (model, 300)
        assert (released.warmup_epochs, released.cooldown_epochs) == ((5, 10) if "pvt" in model else (20, 0))
        assert isclose(paper.scaled(paper.lr), 1e-3 * paper.batch_size / 1024)
        smallest = (1e-6, 1e-5) if "pvt" in model else (5e-7, 5e-6)
        assert (paper.warmup_lr, paper.min_lr) == (released.warmup_lr, released.min_lr) == smallest
    assert {find(f"imagenet/pola-swin-{size}-384").epochs for size in ("tiny", "small", "base")} == {30}


def test_expected_results_are_those_that_the_paper_prints() -> None:
    printed = {name: row.top1 for name, row in PUBLISHED.items() if name.startswith("pola")}
    ours = {name: row.top1 for name, row in imagenet.ROWS.items()} | imagenet.FINE_TUNED
    assert {name: top1 for name, top1 in ours.items() if top1 is not None} == printed


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_every_recipe_makes_sense_and_says_where_it_comes_from(recipe: ClassificationRecipe) -> None:
    given = replace(recipe, checkpoint="weights.safetensors") if recipe.needs_checkpoint else recipe
    given = replace(given, data="photos") if recipe.needs_data else given
    assert given.problems() == []
    assert recipe.paper
    assert recipe.expected
    assert recipe.name in recipe.command
    with torch.device("meta"):
        create_model(recipe.model, num_classes=10, **recipe.model_options())
        create_model(recipe.model, num_classes=10, **replace(recipe, attention="softmax").model_options())
    with pytest.raises(FrozenInstanceError):
        recipe.lr = 1.0  # type: ignore[misc]


def test_published_weight_decay_is_off_for_vectors_and_what_the_authors_name() -> None:
    """Powers, scales and position tables are decayed, as in their code; relative position tables are not."""
    with torch.device("meta"):
        swin = create_model("pola_swin_tiny")
    optimizer = create_optimizer(swin, find("imagenet/pola-swin-tiny"))
    names = {id(parameter): name for name, parameter in swin.named_parameters()}
    groups = {group["weight_decay"]: {names[id(one)] for one in group["params"]} for group in optimizer.param_groups}
    assert set(groups) == {0.0, 0.05}
    for name, parameter in swin.named_parameters():
        free = parameter.ndim <= 1 or name.endswith(("bias", "relative_positions.table"))
        assert name in groups[0.0 if free else 0.05], name
    assert any("power" in name for name in groups[0.05])


def test_words_change_every_kind_of_field() -> None:
    words = ["--epochs", "7", "--lr=1e-2", "--dims", "8", "16", "--compile", "--clip-norm", "None", "--attention", "softmax"]
    words += [
        "--crop-scale",
        "0.5",
        "1",
        "--num-heads",
        "1,2",
        "--grad-checkpointing",
        "false",
        "--warmup-epochs",
        "2",
        "--out",
        "x",
    ]
    recipe, others = with_words(DIGITS, words, Train())
    wanted: dict[str, Any] = {"epochs": 7, "lr": 0.01, "dims": (8, 16), "compile": True, "clip_norm": None}
    wanted |= {"crop_scale": (0.5, 1.0), "num_heads": (1, 2), "grad_checkpointing": False, "warmup_epochs": 2}
    assert recipe == replace(DIGITS, attention="softmax", **wanted)
    assert others == Train(out="x")


def test_words_give_the_settings_of_the_other_experiments() -> None:
    words = ["--steps", "50000", "--warmup-steps", "80", "--schedule", "one-cycle", "--anneal", "linear"]
    words += ["--momentum-cycle", "0.95", "0.85", "--clip-norm", "None", "--clip-value", "1", "--eval-every-steps", "500"]
    words += ["--no-decay", "*.norm*,*.power", "*key_positions*", "--layer-decay", "0.75", "--frozen-stages", "2"]
    (recipe,) = with_words(DIGITS, words)
    wanted: dict[str, Any] = {"steps": 50_000, "warmup_steps": 80, "schedule": "one-cycle", "anneal": "linear"}
    wanted |= {"momentum_cycle": (0.95, 0.85), "clip_norm": None, "clip_value": 1.0, "eval_every_steps": 500}
    wanted |= {"no_decay": ("*.norm*", "*.power", "*key_positions*"), "layer_decay": 0.75, "frozen_stages": 2}
    assert recipe == replace(DIGITS, **wanted)
    assert with_values(DIGITS, json.loads(json.dumps(as_values(recipe)))) == recipe
    (detection,) = with_words(DIGITS, ["--schedule", "multi-step", "--milestones", "8", "11", "--epochs", "12"])
    assert detection == replace(DIGITS, schedule="multi-step", milestones=(8, 11), epochs=12)


def test_attention_options_reach_the_model_as_values() -> None:
    words = ["--attention-options", "gate=None", "conv=depthwise,alpha=2.5", "kernel_size=3", "learn_scale=false"]
    (recipe,) = with_words(DIGITS, words)
    wanted = {"gate": None, "conv": "depthwise", "alpha": 2.5, "kernel_size": 3, "learn_scale": False}
    assert recipe.model_options()["attention_options"] == wanted
    layer = ClassificationJob(recipe).model.blocks[0].attn
    assert (layer.gate, layer.core.alpha, layer.conv.kernel_size) == (None, 2.5, (3, 3))


def test_a_recipe_survives_json() -> None:
    for recipe in RECIPES.values():
        given = replace(recipe, data="photos", checkpoint="weights.safetensors", attention_options=("gate=None", "eps=0"))
        bare = ClassificationRecipe(
            **{name: getattr(given, name) for name in ("name", "paper", "expected", "needs_data", "needs_checkpoint")}
        )
        assert with_values(bare, json.loads(json.dumps(as_values(given)))) == given


def test_all_problems_are_told_at_once() -> None:
    words = ["--epoch", "3", "--lr", "much", "--batch-size", "-3", "--precision", "fp8", "--lr", "1", "--mixup", "-1"]
    with pytest.raises(SettingsError) as caught:
        with_words(DIGITS, ["stray", *words])
    problems = caught.value.problems
    for text in (
        "--epochs",
        "batch_size is -3",
        "precision is 'fp8'",
        "mixup is -1.0",
        "unexpected argument 'stray'",
        "given twice",
    ):
        assert any(text in problem for problem in problems), text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"warmup_epochs": 61}, "warmup_epochs is 61, but there are only 60 epochs"),
        ({"batch_size": 7, "accumulation": 2}, "batch_size is 7, which is not a multiple of accumulation, 2"),
        ({"lr": 0.0}, "lr is 0.0; give a number > 0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"min_lr": 1.0}, "must not be below"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"ema_decay": 1.0}, "ema_decay is 1.0"),
        ({"precision": "fp8"}, "choose one of fp32"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "give an integer < 2^63"),
        ({"keep": 2}, "keep is 2; give an integer ≥ 3"),
        ({"save_every": 0}, "save_every is 0"),
        ({"steps": 0}, "steps is 0; give an integer ≥ 1"),
        ({"steps": 2**41}, "≥ 1 and ≤ 2^40"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"steps": 9, "warmup_steps": 10}, "warmup_steps is 10, but there are only 9 steps; give no more than that"),
        ({"eval_every_steps": 0}, "eval_every_steps is 0"),
        ({"save_every": None, "save_every_epochs": 0}, "save_every_epochs is 0"),
        ({"save_every_epochs": 2}, "save_every is 220 updates and save_every_epochs is 2 epochs; give one: to save by epochs"),
        ({"log_every_epochs": 0}, "log_every_epochs is 0"),
        ({"schedule": "step"}, "choose one of cosine, one-cycle, polynomial, multi-step, constant"),
        ({"anneal": "cos"}, "anneal is 'cos'; choose one of cosine, linear"),
        ({"momentum_cycle": (0.95, 1.0), "schedule": "one-cycle"}, "momentum_cycle is 0.95 and 1; give two numbers"),
        ({"momentum_cycle": (0.95, 0.85)}, "momentum_cycle is for schedule one-cycle, but schedule is 'cosine'"),
        ({"poly_power": 0.0}, "poly_power is 0.0; give a number > 0"),
        ({"poly_power": float("nan")}, "poly_power is nan"),
        ({"milestones": (8, 11)}, "schedule is 'cosine' and milestones is (8, 11); only multi-step uses them"),
        ({"schedule": "multi-step"}, "schedule is 'multi-step' and milestones is empty; give some with --milestones"),
        ({"schedule": "multi-step", "milestones": (11, 8)}, "milestones is (11, 8); give increasing numbers of epochs"),
        ({"schedule": "multi-step", "milestones": (60,)}, "> 0 and < 60, where the schedule ends"),
        ({"schedule": "multi-step", "milestones": (5,), "steps": 5}, "give increasing numbers of steps, > 0 and < 5"),
        ({"lr_decay": 0.0}, "lr_decay is 0.0; give a number in (0, 1]"),
        ({"layer_decay": 1.5}, "layer_decay is 1.5; give a number in (0, 1], or None"),
        ({"frozen_stages": -1}, "frozen_stages is -1; give an integer ≥ 0"),
        ({"clip_norm": None, "clip_value": 0.0}, "clip_value is 0.0; give a number > 0, or None"),
        (
            {"clip_value": 1.0},
            "clip_norm is 1 and clip_value is 1, but only one of them can be used; to clip by value",
        ),
        ({"val_share": 1.0}, "val_share is 1.0"),
        ({"on_bad_image": "ignore"}, "choose one of error, skip"),
        ({"resize": "long"}, "choose one of square, shorter"),
        ({"interpolation": "cubic"}, "choose one of bicubic"),
        ({"crop_pct": 0.0}, "crop_pct is 0.0"),
        ({"crop_scale": (1.0, 0.5)}, "the smaller one first"),
        ({"crop_ratio": (0.0, 1.0)}, "crop_ratio is 0 to 1"),
        ({"hflip": 2.0}, "hflip is 2.0; give a number in [0, 1]"),
        ({"smoothing": 1.0}, "smoothing is 1.0"),
        ({"img_size": 0}, "img_size is 0"),
        ({"dims": ()}, "dims is ()"),
        ({"depths": (0,)}, "depths is (0,)"),
        ({"mean": (0.1, 0.2)}, "give three numbers each, or one each"),
        ({"std": (0.0,)}, "std above 0"),
        ({"mixup": 0.5, "batch_size": 9}, "mixup and cutmix need an even number of images"),
        ({"needs_checkpoint": True}, "fine-tuning starts from weights"),
        ({"attention_options": ("gate",)}, "attention_options has 'gate'; give NAME=VALUE"),
        ({"attention_options": ("gate=linear", "gate=None")}, "attention_options gives gate twice"),
    ],
)
def test_a_number_that_makes_no_sense_is_named(changes: dict[str, Any], message: str) -> None:
    problems = replace(DIGITS, **changes).problems()
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "pola_swim_tiny"}, "did you mean 'pola_swin_tiny'"),
        ({"attention": "sofmax"}, "softmax"),
        ({"attention": "softmax", "attention_options": ("polarity=same",)}, "polarity='same', which no stage supports"),
        ({"optimizer": "adamww"}, "did you mean 'adamw'"),
        ({"optimizer": "adagrad", "schedule": "one-cycle", "momentum_cycle": (0.9, 0.8)}, "'adagrad' has no momentum"),
        ({"no_decay": ("*.norm*", "*.nrm*")}, r"no_decay has '\*\.nrm\*', which matches no parameter of DeiT"),
        ({"frozen_stages": 9}, "frozen_stages is 9, but DeiT has 3 to freeze; give at most 3"),
        ({"warmup_steps": 10_000}, "warmup_steps is 10000, but the schedule has only 1320"),
        ({"dims": (63,), "num_heads": (2,)}, "model pola_deit_tiny"),
        ({"auto_augment": "rand-q9"}, "auto_augment"),
        ({"auto_augment": "nonsense"}, "auto_augment"),
        ({"batch_size": 2000}, "batch_size is 2000, but there are only 1437 training images"),
    ],
)
def test_what_needs_pytorch_to_be_checked_is_checked_before_the_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        prepare(replace(DIGITS, **changes))


scalars = some.one_of(some.none(), some.booleans(), some.integers(), some.floats(), some.text(max_size=4))
names = some.one_of(some.sampled_from(option_names(DIGITS)), some.text(max_size=5))
flags = some.sampled_from([f"--{name.replace('_', '-')}" for name in option_names(DIGITS)])


@settings(max_examples=300)
@given(some.dictionaries(names, scalars | some.lists(scalars)))
def test_law_any_values_give_a_recipe_that_makes_sense_or_one_error(values: dict[str, Any]) -> None:
    with suppress(SettingsError):
        recipe = with_values(DIGITS, values)
        assert recipe.problems() == []
        assert asdict(recipe)


@settings(max_examples=300)
@given(some.lists(some.one_of(flags, some.text(max_size=6))))
def test_law_any_words_give_a_recipe_that_makes_sense_or_one_error(words: list[str]) -> None:
    with suppress(SettingsError):
        (recipe,) = with_words(DIGITS, words)
        assert recipe.problems() == []
