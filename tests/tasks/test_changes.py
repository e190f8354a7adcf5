"""What a user changes about a recipe, on the command line and in sweeps, where one setting depends on others."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from polaformer.cli.options import as_arguments, parse
from polaformer.recipes.registry import find
from polaformer.tasks.changes import with_changes
from polaformer.tasks.options import with_values
from polaformer.tasks.recipe import Recipe, as_values
from polaformer.tasks.sequence.recipe import SequenceRecipe
from polaformer.tasks.stored_recipe import load_recipe
from polaformer.tasks.sweep import read_cells

SWEEPS = Path(__file__).resolve().parents[2] / "docs" / "sweeps"
POLA = replace(find("lra/text-pola-a3"), data="imdb")
SOFTMAX = replace(find("lra/text-softmax"), data="imdb")
DIGITS = find("digits/pola-vit-tiny")


def on_the_command_line(recipe: Recipe, words: list[str]) -> Recipe:
    return parse(words, recipe, program="polaformer train")[0]


def in_a_sweep(recipe: Recipe, options: str, folder: Path) -> Recipe:
    text = f'seeds = [0]\n[[cell]]\nname = "a"\nrecipe = "{recipe.name}"\n[cell.options]\n{options}\n'
    data = "" if recipe.data is None else f'data = "{recipe.data}"\n'
    (folder / "sweep.toml").write_text(text + data)
    [cell] = read_cells([folder / "sweep.toml"], find)
    return cell.recipe


@pytest.mark.parametrize(
    ("recipe", "attention", "given", "wanted"),
    [
        (POLA, None, ["conv=None"], ("alpha=3", "conv=None")),
        (POLA, None, ["conv=None", "alpha=5"], ("alpha=5", "conv=None")),
        (POLA, "pola", ["gate=None"], ("alpha=3", "gate=None")),
        (POLA, "softmax", ["gate=linear"], ("gate=linear",)),
        (POLA, "linear", None, None),
        (SOFTMAX, None, ["gate=linear", "conv=depthwise"], ("dropout=0.1", "gate=linear", "conv=depthwise")),
        (SOFTMAX, None, ["gate=linear", "dropout=0"], ("dropout=0", "gate=linear")),
        (SOFTMAX, "kernelized", ["dropout=0.1"], ("dropout=0.1",)),
        (SOFTMAX, None, "None", None),
        (DIGITS, "softmax", ["gate=linear"], ("gate=linear",)),
        (replace(DIGITS, name=""), None, ["gate=None"], ("gate=None",)),
    ],
)
def test_given_attention_options_are_added_to_the_recipes_own(recipe, attention, given, wanted, tmp_path):
    words = ["--attention", attention] if attention else []
    words += ["--attention-options", *([given] if given == "None" else given)] if given else []
    changed = on_the_command_line(recipe, words)
    assert changed == replace(recipe, attention=attention or recipe.attention, attention_options=wanted)
    if recipe.name:
        lines = [f"attention = {json.dumps(attention)}"] * bool(attention)
        lines += [f"attention_options = {json.dumps(given)}"] * bool(given)
        assert in_a_sweep(recipe, "\n".join(lines), tmp_path) == changed


def test_mistakes_in_given_attention_options_are_still_found():
    for pairs, message in (
        (("alpha",), "attention_options has 'alpha'"),
        (("alpha=5", "alpha=7"), "gives alpha twice"),
        (("conv=None", "conv=None"), "gives conv twice"),
    ):
        assert message in " ".join(with_changes(POLA, {"attention_options": pairs}).problems())


def test_the_options_of_a_recipe_with_its_own_kind_of_attention_are_added_too():
    """For any recipe that has attention options, also of another task."""
    own = replace(DIGITS, attention_options=("gate=linear",))
    assert with_changes(own, {"attention_options": ("conv=None",)}).attention_options == ("gate=linear", "conv=None")
    assert with_changes(own, {"lr": 1e-3}) == replace(own, lr=1e-3)


@pytest.mark.parametrize("options", [None, ("conv=None",), ("alpha=3", "conv=None")])
def test_a_stored_recipe_is_taken_as_it_is(options, tmp_path):
    recipe = replace(POLA, attention_options=options, lr=1e-3)
    config = {"version": 1, "recipe": recipe.name, "task": "sequence", "options": as_values(recipe), "data": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = load_recipe(tmp_path)
    assert as_values(stored) == as_values(recipe)
    # As when a process of a sweep is started, and when a run resumes.
    assert with_values(SequenceRecipe(name=recipe.name, attention_options=("alpha=7",)), as_values(recipe)) == replace(
        recipe, paper="", expected=""
    )


def test_the_learning_rates_of_a_one_cycle_recipe_change_together(tmp_path):
    """OneCycleLR begins at lr / 25 and ends at lr / 250,000."""
    for changed in (on_the_command_line(POLA, ["--lr", "1e-3"]), in_a_sweep(POLA, "lr = 1e-3", tmp_path)):
        assert (changed.warmup_lr, changed.min_lr) == (4e-5, 4e-9)  # exactly, since runs are found by their values
        assert changed == replace(POLA, lr=1e-3, warmup_lr=changed.warmup_lr, min_lr=changed.min_lr)
    given = on_the_command_line(POLA, ["--lr", "1e-3", "--warmup-lr", "4e-6"])
    assert (given.warmup_lr, given.min_lr) == (4e-6, 4e-9)
    for recipe, words in ((POLA, ["--schedule", "cosine"]), (DIGITS, []), (DIGITS, ["--schedule", "one-cycle"])):
        words = [*words, "--lr", "1e-2"] + (["--momentum-cycle", "None"] if recipe is POLA else [])
        changed = on_the_command_line(recipe, words)
        assert (changed.warmup_lr, changed.min_lr) == (recipe.warmup_lr, recipe.min_lr)


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": 1e-3},  # with the recipe's own warmup_lr and min_lr
        {"lr": 1e-3, "warmup_lr": 4e-5, "min_lr": 4e-9},
        {"attention_options": ("alpha=3", "conv=None")},
        {"attention_options": None},
        {"attention": "linear", "attention_options": None},
        {"attention": "softmax", "attention_options": ("alpha=3",)},
    ],
)
def test_the_command_in_a_report_gives_the_same_recipe(changes):
    recipe = replace(POLA, **changes)
    assert on_the_command_line(POLA, as_arguments(recipe, POLA)) == recipe


def test_the_sweeps_of_the_long_range_arena_train_what_they_say():
    cells = {
        cell.name: cell.recipe for name in ("lra-text", "lra-gates") for cell in read_cells([SWEEPS / f"{name}.toml"], find)
    }
    options = {name: recipe.attention_options for name, recipe in cells.items()}
    assert options["pola-a3-without-convolution"] == ("alpha=3", "conv=None")
    assert options["softmax"] == ("dropout=0",)
    # Without dropout, like the other cells: PyTorch's fused kernel for CPUs has none.
    assert options["softmax-with-convolution-and-gate"] == ("dropout=0", "gate=linear", "conv=depthwise")
    assert [options[name] for name in ("zeros", "ones")] == [("alpha=3", "gate_init=zeros"), ("alpha=3", "gate_init=ones")]
    for name in ("lra-text", "lra-gates", "lra-listops", "lra-image", "lra-retrieval"):
        for cell in read_cells([SWEEPS / f"{name}.toml"], find):
            rates = cell.recipe.lr / 25, cell.recipe.lr / 250_000
            assert (cell.recipe.warmup_lr, cell.recipe.min_lr) == pytest.approx(rates)
            published = find(cell.recipe.name).lr
            times = {5: "five", 10: "ten"}[round(cell.recipe.lr / published)]
            assert f"learning rate is {times} times the published one" in (SWEEPS / f"{name}.toml").read_text()
