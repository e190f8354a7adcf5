"""The numbers of the Long Range Arena's recipes are those of Skyformer's code and of the paper's appendix."""

from dataclasses import replace

import pytest

from polaformer.recipes.registry import OURS
from polaformer.tasks.sequence.published import TASKS
from polaformer.tasks.sequence.rows import ARENA_ROWS
from polaformer.training.schedules import values_at
from polaformer.training.timeline import Timeline

# Peak learning rate (Skyformer has 2e-4 for Pathfinder, the paper's appendix 5e-4), batch size, updates of the warm-up, updates
# between evaluations, sequences per evaluation. Image has 5,120 from an endless stream of 5,000: all of them.
PUBLISHED = {
    "listops": (1e-4, 32, 1000, 500, 62 * 32),
    "text": (1e-4, 32, 80, 500, 200 * 32),
    "retrieval": (2e-4, 16, 800, 1000, 300 * 16),
    "pathfinder": (5e-4, 128, 312, 500, 156 * 128),
    "image": (1e-4, 256, 175, 50, None),
}
OPTIONS = {"pola-a3": ("alpha=3",), "pola-a5": ("alpha=5",), "pola-a7": ("alpha=7",)}
OPTIONS |= {"softmax": ("dropout=0.1",), "kernelized": ("dropout=0.1",)}  # the only ones with dropout of attention weights


@pytest.mark.parametrize("row", ARENA_ROWS)
@pytest.mark.parametrize("task", TASKS)
def test_the_recipes_have_the_published_numbers(task, row):
    recipe = OURS[f"lra/{task}-{row}"]
    lr, batch, warmup, interval, sequences = PUBLISHED[task]
    assert (recipe.dataset, recipe.lr, recipe.lr_images, recipe.batch_size) == (task, lr, 0, batch)
    assert (recipe.steps, recipe.warmup_steps, recipe.eval_every_steps, recipe.eval_sequences) == (
        50_000,
        warmup,
        interval,
        sequences,
    )
    assert (recipe.optimizer, recipe.optimizer_eps, recipe.weight_decay) == ("adamw", 1e-6, 0.0)
    assert (recipe.clip_value, recipe.clip_norm, recipe.accumulation) == (1.0, None, 1)
    assert (recipe.ship, recipe.best_from, recipe.selection, recipe.ema_decay) == ("best", 0.2, "published", None)
    assert (recipe.dim, recipe.depth, recipe.num_heads, recipe.mlp_dim, recipe.dropout) == (64, 2, 2, 128, 0.1)
    assert (recipe.attention, recipe.attention_options) == (row.partition("-a")[0] if "pola" in row else row, OPTIONS.get(row))
    assert replace(recipe, data="data").problems() == []


@pytest.mark.parametrize("task", TASKS)
def test_the_rate_and_beta1_are_those_of_the_one_cycle_schedule(task):
    """lr / 25 and 0.95 at the beginning, lr and 0.85 after the warm-up, lr / 250,000 and 0.95 at the end."""
    recipe = OURS[f"lra/{task}-pola-a3"]
    lr, _, warmup, *_ = PUBLISHED[task]
    assert (recipe.schedule, recipe.anneal) == ("one-cycle", "linear")
    timeline = Timeline(recipe, 700)
    found = [values_at(step, recipe, timeline) for step in (0, warmup - 1, 49_999)]
    assert [one.lr for one in found] == pytest.approx([lr / 25, lr, lr / 250_000], rel=1e-6)
    assert [one.momentum for one in found] == pytest.approx([0.95, 0.85, 0.95])
