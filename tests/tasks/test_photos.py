"""The recipes for your own photos: an image folder is all that they need."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from commands import run
from polaformer.errors import SettingsError
from polaformer.recipes.photos import RECIPES
from polaformer.recipes.registry import find
from polaformer.tasks.running import prepare, train

SMALL = {"dims": (8, 8), "depths": (1, 1), "num_heads": (1, 1), "mlp_ratios": (1.0, 1.0), "img_size": 32, "num_workers": 0}
SHORT = {"epochs": 1, "warmup_epochs": 0, "batch_size": 8}


def write_photos(root: Path, classes: tuple[str, ...], number: int = 12) -> Path:
    """Writes photos of several sizes."""
    draws = np.random.default_rng(0)
    for name in classes:
        (root / name).mkdir(parents=True)
        for index in range(number):
            pixels = draws.integers(0, 256, (40 + 8 * (index % 3), 56, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index:02d}.png")
    return root


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"), ("cat", "dog", "ox"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda one: one.name)
def test_a_folder_is_all_that_is_needed_and_asked_for(recipe, photos: Path) -> None:
    missing = ["give them with --data", "give a weights file with --checkpoint"] if recipe.needs_checkpoint else ["--data"]
    problems = recipe.problems()
    assert len(problems) == len(missing)
    assert all(message in problem for message, problem in zip(missing, problems, strict=True))
    if not recipe.needs_checkpoint:
        job, _ = prepare(replace(recipe, data=str(photos), batch_size=8))
        assert job.steps_per_epoch > 0


def test_the_rate_follows_the_size_of_the_batch() -> None:
    for recipe in RECIPES:
        assert recipe.scaled(recipe.lr) == recipe.lr
        assert replace(recipe, batch_size=256).scaled(recipe.lr) == pytest.approx(4 * recipe.lr)


def test_fine_tuning_takes_weights_for_other_classes_and_decays_the_rate_by_layer(photos: Path, tmp_path: Path) -> None:
    scratch = replace(find("photos/pola-pvt-tiny"), data=str(photos), **SMALL, **SHORT)
    train(scratch, tmp_path / "scratch", lambda event, record: None)
    weights = tmp_path / "scratch" / "model.safetensors"
    others = write_photos(tmp_path / "others", ("ant", "bee"))
    recipe = replace(find("photos/pola-pvt-tiny-finetune"), data=str(others), checkpoint=str(weights), **SMALL, **SHORT)
    job, _ = prepare(recipe)
    before, now = load_file(weights), job.model.state_dict()
    assert now["head.weight"].shape[0] == 2
    assert all(torch.equal(before[name], now[name]) for name in before if not name.startswith("head."))
    finished = train(recipe, tmp_path / "tuned", lambda event, record: None)
    assert finished.counts["val"].num_classes == 2
    same = prepare(replace(recipe, checkpoint=str(tmp_path / "tuned")))[0].model.state_dict()
    assert torch.equal(same["head.weight"], load_file(tmp_path / "tuned" / "model.safetensors")["head.weight"])
    as_many = write_photos(tmp_path / "as-many", ("wasp", "yak"))
    other = prepare(replace(recipe, data=str(as_many), checkpoint=str(tmp_path / "tuned")))[0].model.state_dict()
    assert not torch.equal(other["head.weight"], same["head.weight"])


def test_what_is_missing_is_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(["train", "photos/pola-swin-tiny"], capsys)
    assert code == 2
    assert "photos/pola-swin-tiny trains on your own images; give them with --data" in err


def test_fewer_photos_than_a_batch_are_one_error(photos: Path) -> None:
    with pytest.raises(SettingsError, match=r"batch_size is 64, but there are only \d+ training images; make it smaller"):
        prepare(replace(find("photos/pola-pvt-tiny"), data=str(photos)))
