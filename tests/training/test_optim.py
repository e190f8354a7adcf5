"""Parameter groups (weight decay, layer decay), optimiser state, and gradient clipping."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import faults
from polaformer.backbones import create_model
from polaformer.errors import SettingsError
from polaformer.tasks.classification.recipe import ClassificationRecipe
from polaformer.training.engine import Engine, take_batches
from polaformer.training.optim import (
    Schedule,
    check_trainable,
    create_optimizer,
    optimizer_state,
    parameter_groups,
    restore_optimizer_state,
)
from polaformer.training.processes import create_accelerator
from polaformer.training.settings import Settings

HIERARCHY = {"dims": (8, 16), "depths": (2, 1), "num_heads": (1, 2)}
SMALL: dict[str, dict[str, Any]] = {
    "pola_pvt_tiny": HIERARCHY | {"mlp_ratios": (1.0, 1.0), "reductions": (2, 1)},
    "pola_swin_tiny": HIERARCHY | {"attention": "pola,softmax"},
    "pola_deit_tiny": {"dims": (8,), "depths": (3,), "num_heads": (1,)},
}


def small(name: str) -> nn.Module:
    with torch.device("meta"):
        return create_model(name, num_classes=3, img_size=32, **SMALL[name])


def by_name(model: nn.Module, settings: Settings) -> dict[str, dict[str, float]]:
    """The group of each parameter that is trained."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, settings)
    found = {names[id(parameter)]: group for group in groups for parameter in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups)
    assert set(found) == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return found


def depth_of(model: str, name: str) -> int:
    """The layer of a parameter of the small models, counted from the patch embedding; three blocks between stem and head."""
    if name.startswith("head."):
        return 4
    if name.startswith("norm."):
        return 3
    if model == "pola_deit_tiny":
        return 1 + int(name.split(".")[1]) if name.startswith("blocks.") else 0
    _, stage, part, number = name.split(".")[:4]
    if part == "blocks":
        return 1 + 2 * int(stage) + int(number)
    return 3 if stage == "1" else 0  # the patch embedding of a later stage belongs to its first block


@pytest.mark.parametrize("name", SMALL)
def test_the_rate_of_a_layer_is_the_decay_to_the_number_of_layers_above(name: str) -> None:
    model = small(name)
    scales = {one: group["lr_scale"] for one, group in by_name(model, Settings(layer_decay=0.7)).items()}
    for one, scale in scales.items():
        assert scale == pytest.approx(0.7 ** (4 - depth_of(name, one)), rel=1e-12), one
    stem = "patch_embed.proj.weight" if name == "pola_deit_tiny" else "stages.0.patch_embed.proj.weight"
    assert scales[stem] == min(scales.values()) == pytest.approx(0.7**4)
    assert scales["head.weight"] == max(scales.values()) == 1.0


@pytest.mark.parametrize("layer_decay", [None, 0.7])
@pytest.mark.parametrize("name", SMALL)
def test_patterns_spare_parameters_in_addition_to_the_rule(name: str, layer_decay: float | None) -> None:
    model = small(name)
    settings = Settings(layer_decay=layer_decay, weight_decay=0.05)
    before = by_name(model, settings)
    after = by_name(model, replace(settings, no_decay=("*.power", "head*", "*.norm*")))
    for one, parameter in model.named_parameters():
        if one in before:
            exempt = parameter.ndim <= 1 or one.endswith(".bias") or one in model.no_weight_decay()  # type: ignore[operator]
            assert exempt or before[one]["weight_decay"] == 0.05 or "relative_positions" in one
            wanted = 0.0 if one.endswith(".power") or one.startswith("head") else before[one]["weight_decay"]
            assert after[one]["weight_decay"] == wanted, one
    assert before["head.weight"]["weight_decay"] == 0.05


@pytest.mark.parametrize("name", SMALL)
def test_layer_decay_decays_the_same_weights_as_none(name: str) -> None:
    model = small(name)
    plain, layered = by_name(model, Settings()), by_name(model, Settings(layer_decay=0.5))
    assert {one: group["weight_decay"] for one, group in plain.items()} == {
        one: group["weight_decay"] for one, group in layered.items()
    }


class Wide(nn.Module):
    """A model whose bias is not a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
        self.stem.bias = nn.Parameter(torch.zeros(1, 2))

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        return {"stem": "^stem"}


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_biases_are_not_decayed_whatever_their_shape(layer_decay: float | None) -> None:
    decays = {one: group["weight_decay"] for one, group in by_name(Wide(), Settings(layer_decay=layer_decay)).items()}
    assert decays == {"stem.weight": 0.05, "stem.bias": 0.0, "head.weight": 0.05, "head.bias": 0.0}


def test_a_pattern_that_matches_nothing_is_refused_before_training() -> None:
    model = small("pola_swin_tiny")
    with pytest.raises(SettingsError) as caught:
        create_optimizer(model, Settings(no_decay=("*relative_position_bias*", "*.bias", "no.such")))
    assert len(caught.value.problems) == 2
    assert "no_decay has '*relative_position_bias*', which matches no parameter of Swin; " in caught.value.problems[0]
    assert "* matches anything" in caught.value.problems[0]


def test_layer_decay_of_a_model_that_does_not_name_its_layers_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"layer_decay is 0.5, but Linear has no group_matcher.*--layer-decay None"):
        create_optimizer(nn.Linear(2, 2), Settings(layer_decay=0.5))


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(SettingsError, match="leaves nothing to train"):
        check_trainable(nn.Linear(2, 2).requires_grad_(False), Settings())


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_memory_and_rates_of_many_groups_are_restored_to_the_last_bit(name: str) -> None:
    """Momentum and betas are set before each update; the state of the optimiser is saved."""
    settings = Settings(
        optimizer=name, schedule="one-cycle", momentum_cycle=(0.9, 0.7), layer_decay=0.6, steps=9, warmup_steps=3, lr=0.1
    )

    def made() -> tuple[nn.Module, torch.optim.Optimizer, Schedule]:
        torch.manual_seed(0)
        model = create_model("pola_deit_tiny", num_classes=3, img_size=32, **SMALL["pola_deit_tiny"])
        optimizer = create_optimizer(model, settings)
        return model, optimizer, Schedule(optimizer, settings, 10)

    def update(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule) -> None:
        schedule.set(step)
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    whole, stopped = made(), made()
    for step in range(6):
        update(step, *whole)
        if step < 3:
            update(step, *stopped)
    model, optimizer, schedule = made()
    model.load_state_dict(stopped[0].state_dict())
    restore_optimizer_state(optimizer, model, *optimizer_state(stopped[1], stopped[0]))
    for step in range(3, 6):
        update(step, model, optimizer, schedule)
    assert len(optimizer.param_groups) >= 9
    for wanted, found in zip(whole[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(wanted, found)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> ClassificationRecipe:
    return faults.tiny(faults.write_data(tmp_path_factory.mktemp("data") / "digits.npz"), mixup=0.0, cutmix=0.0)


def gradients(recipe: ClassificationRecipe) -> tuple[float, dict[str, torch.Tensor]]:
    """The reported gradient norm of the first update, and the gradients that the optimiser receives."""
    job = recipe.job()
    engine = Engine(job.model, job.objective, recipe, job.steps_per_epoch, create_accelerator())
    found: dict[str, torch.Tensor] = {}

    def keep() -> None:
        found.update({name: one.grad.clone() for name, one in engine.inner.named_parameters() if one.grad is not None})

    engine.optimizer.step = keep
    return engine.update(take_batches(job.training_batches(0, 0, 1), recipe.accumulation), 0).grad_norm, found


def test_gradients_are_clipped_by_value_and_the_norm_is_that_before(recipe: ClassificationRecipe, tmp_path: Path) -> None:
    norm, plain = gradients(replace(recipe, clip_norm=None))
    limit = 0.01
    assert max(float(one.abs().max()) for one in plain.values()) > 2 * limit
    clipped_norm, clipped = gradients(replace(recipe, clip_norm=None, clip_value=limit))
    assert clipped_norm == norm
    for name, one in plain.items():
        assert torch.equal(clipped[name], one.clamp(-limit, limit)), name
