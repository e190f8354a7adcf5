"""Frozen stages: their weights, batch norm statistics and drop path."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import faults
from polaformer.backbones import create_model
from polaformer.errors import SettingsError
from polaformer.tasks.classification.recipe import ClassificationRecipe
from polaformer.tasks.running import train
from polaformer.training import checkpoint, divergence
from polaformer.training.engine import Engine, take_batches
from polaformer.training.freezing import freeze, frozen_names
from polaformer.training.processes import create_accelerator

HIERARCHY = {"patch_size": 1, "dims": (8, 8), "depths": (1, 1), "num_heads": (1, 1), "mlp_ratios": (1.0, 1.0)}
MODELS: dict[str, dict[str, Any]] = {
    "pola_deit_tiny": {},
    "pola_pvt_tiny": HIERARCHY,
    "pola_swin_tiny": HIERARCHY | {"attention": "pola,softmax", "mlp_ratios": None},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return faults.write_data(tmp_path_factory.mktemp("data") / "digits.npz")


def quiet(event: str, record: dict[str, Any]) -> None:
    """Ignore all events."""


def recipe_of(data: str, model: str, **changes: Any) -> ClassificationRecipe:
    return faults.tiny(data, **{"model": model, "epochs": 1, "frozen_stages": 1, "weight_decay": 0.5} | MODELS[model] | changes)


def is_frozen(model: str, name: str) -> bool:
    """Whether the parameter is frozen if one stage (of a DeiT: block) is."""
    first = ("patch_embed.", "pos_embed.", "cls_token", "blocks.0.") if model == "pola_deit_tiny" else ("stages.0.",)
    return name.startswith(first)


@pytest.mark.parametrize("name", MODELS)
def test_the_patch_embedding_and_the_first_stages_are_frozen(name: str, data: str) -> None:
    model = recipe_of(data, name).job().model
    trained = {one for one, parameter in model.named_parameters() if parameter.requires_grad}
    freeze(model, 1)
    for one, parameter in model.named_parameters():
        assert parameter.requires_grad == (one in trained and not is_frozen(name, one)), one


@pytest.mark.parametrize("name", MODELS)
def test_no_frozen_stages_change_nothing(name: str, data: str) -> None:
    model = recipe_of(data, name).job().model
    before = [parameter.requires_grad for parameter in model.parameters()]
    assert freeze(model, 0) == []
    assert [parameter.requires_grad for parameter in model.parameters()] == before


@pytest.mark.parametrize(("name", "number"), [("pola_pvt_tiny", 2), ("pola_swin_tiny", 2), ("pola_deit_tiny", 2)])
def test_all_stages_may_be_frozen_but_no_more_than_there_are(name: str, number: int, data: str) -> None:
    model = recipe_of(data, name).job().model
    names = frozen_names(model, number)
    assert {one for one, _ in model.named_parameters() if one.startswith("head.")}.isdisjoint(names)
    assert all(one in names for one, _ in model.named_parameters() if one.startswith(("stages.", "blocks.")))
    with pytest.raises(SettingsError, match=f"frozen_stages is 3, but .* has {number} to freeze; give at most {number}"):
        frozen_names(model, number + 1)


def test_all_stages_of_a_model_without_a_head_may_be_frozen() -> None:
    with torch.device("meta"):
        model = create_model("pola_deit_tiny", num_classes=0, img_size=32, dims=(8,), depths=(3,), num_heads=(1,))
    assert len(frozen_names(model, 3)) == len(list(model.parameters()))
    with pytest.raises(SettingsError, match="has 3 to freeze"):
        frozen_names(model, 4)


def test_any_model_of_timm_can_be_frozen_and_its_batch_norm_keeps_its_statistics() -> None:
    model = timm.create_model("resnet10t", num_classes=2)
    frozen = freeze(model, 2)
    model.train()
    for module in frozen:
        module.eval()
    before = {name: one.clone() for name, one in model.named_buffers()}
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    for name, one in model.named_buffers():
        first = name.startswith(("conv1.", "bn1.", "layer1.", "layer2."))
        assert torch.equal(one, before[name]) == first, name
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.startswith(("conv1.", "bn1.", "layer1.", "layer2.")), name


def test_a_model_that_does_not_name_its_stages_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"frozen_stages is 1, but Linear has no group_matcher.*give 0"):
        freeze(nn.Linear(2, 2), 1)


@pytest.mark.parametrize("name", MODELS)
def test_frozen_weights_are_the_same_bits_after_training_and_the_others_are_not(name: str, data: str, tmp_path: Path) -> None:
    """With weight decay, EMA and gradient checkpointing."""
    recipe = recipe_of(data, name, grad_checkpointing=True)
    before = {one: tensor.clone() for one, tensor in recipe.job().model.named_parameters() if tensor.requires_grad}
    train(recipe, tmp_path / "run", quiet)
    found = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert found is not None
    for file in ("model.safetensors", "ema.safetensors"):
        after = faults.tensor_bytes(found.files[file])
        same = {one for one, tensor in before.items() if after[one][1] == tensor.detach().numpy().tobytes()}
        # The last convolution over the patches does not reach a DeiT's class token, so it gets no gradient.
        assert same - {"blocks.1.attn.conv.bias"} == {one for one in before if is_frozen(name, one)}
    memory = faults.tensor_bytes(found.files["optimizer.safetensors"])
    assert not any(is_frozen(name, one) for one in memory)


def test_frozen_modules_stay_in_eval_mode_in_updates_and_in_a_replay(data: str) -> None:
    recipe = recipe_of(data, "pola_deit_tiny")
    job = recipe.job()
    engine = Engine(job.model, job.objective, recipe, job.steps_per_epoch, create_accelerator())
    seen: list[bool] = []
    for block in engine.inner.blocks:  # type: ignore[union-attr]
        block.register_forward_pre_hook(lambda module, _: seen.extend({one.training for one in module.modules()}))
    parts = take_batches(job.training_batches(0, 0, 1), recipe.accumulation)
    engine.update(parts, 0)
    engine.inner.eval()
    divergence.replay(engine, parts, {"seed": 0, "step": 0, "rank": 0})
    assert seen == [False, True] * 2 * recipe.accumulation


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_run_with_frozen_stages_resumes_to_the_same_bits(processes: int, data: str, tmp_path: Path) -> None:
    recipe = replace(recipe_of(data, "pola_deit_tiny"), layer_decay=0.7, accumulation=1)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert faults.run(whole, recipe, processes=processes, port=faults.free_port()) == [0] * processes, faults.errors(whole)
    kill = faults.Kill("update", 7)
    if processes == 1:
        assert faults.run(killed, recipe, kill) == [-9]
    else:
        kill = replace(kill, signal=15)
        assert faults.run(killed, recipe, kill, processes, faults.free_port()) == [143] * processes, faults.errors(killed)
    assert faults.run(killed, recipe, processes=processes, port=faults.free_port()) == [0] * processes, faults.errors(killed)
    assert faults.outcome(killed) == faults.outcome(whole)
