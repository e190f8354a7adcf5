"""The training loop: losses that are not finite, bad images, precisions, EMA, best weights, full disks."""

import copy
import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

import faults
from polaformer.data.labelled_images import LabelledImages
from polaformer.data.sources.opening import open_data
from polaformer.errors import CannotWriteError, DataError, DivergedError, ImageError, SettingsError
from polaformer.recipes.registry import find
from polaformer.tasks.classification.job import ClassificationJob
from polaformer.tasks.classification.objective import ClassificationCounts, CrossEntropy
from polaformer.tasks.classification.predictor import load_classifier
from polaformer.tasks.classification.recipe import ClassificationRecipe
from polaformer.tasks.running import replay, resume, train
from polaformer.tasks.stored_recipe import load_recipe
from polaformer.training import checkpoint, divergence, journal
from polaformer.training.engine import Engine, NonFiniteError
from polaformer.training.loop import Training
from polaformer.training.processes import create_accelerator
from polaformer.training.run import Run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return faults.write_data(tmp_path_factory.mktemp("data") / "digits.npz")


@pytest.fixture
def recipe(data: str) -> ClassificationRecipe:
    return faults.tiny(data, epochs=1)


def quiet(event: str, record: dict[str, Any]) -> None:
    """Ignore all events."""


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [line for line in journal.read(folder) if line["kind"] == "eval"]


def training_of(recipe: ClassificationRecipe, folder: Path) -> Training:
    return Training(recipe.job(), recipe, Run.create(folder, {}), create_accelerator(recipe.precision), quiet, recipe.terms)


def test_a_run_leaves_all_that_the_user_needs(recipe: ClassificationRecipe, tmp_path: Path) -> None:
    finished = train(recipe, tmp_path / "run", quiet)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {"config.json", "journal.jsonl", "metrics.csv", "tensorboard", "checkpoints", "model.safetensors"}
    assert load_recipe(tmp_path / "run") == replace(recipe, name=recipe.name)
    assert (
        (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0].startswith("epoch,grad_norm,kind,loss,lr,step,seconds")
    )
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    loaded = load_classifier(tmp_path / "run" / "model.safetensors")
    assert loaded.classes == finished.job.data.classes
    assert loaded.preprocessing == finished.job.preprocessing
    images = [finished.job.data.val.read(index, 1) for index in range(5)]
    assert loaded.predict(images) == finished.predictor.predict(images)


def test_training_learns(data: str, tmp_path: Path) -> None:
    """On easy images, in a few seconds."""
    easy = {
        "mixup": 0.0,
        "cutmix": 0.0,
        "auto_augment": None,
        "erase_prob": 0.0,
        "drop_path_rate": 0.0,
        "crop_scale": (0.9, 1.0),
    }
    train(
        faults.tiny(data, epochs=12, patch_size=2, ema_decay=None, hflip=0.0, accumulation=1, **easy), tmp_path / "run", quiet
    )
    found = evaluations(tmp_path / "run")
    assert found[-1]["accuracy"] > 40
    assert found[-1]["loss"] < found[0]["loss"]


class Poison:
    """An objective whose loss, or one gradient, is not finite at one step."""

    def __init__(self, job: ClassificationJob, kind: str, value: float, at: int) -> None:
        self.job, self.kind, self.value, self.at = job, kind, value, at
        self.task, self.mixup, self.calls = job.objective, job.objective.mixup, 0

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        loss = self.task.loss(model, batch)
        if self.calls != self.at:
            return loss
        if self.kind == "loss":
            return loss * self.value
        weight = next(iter(self.job.model.parameters()))
        weight.register_hook(lambda gradient: gradient * self.value)  # type: ignore[no-untyped-call]
        return loss

    def new_counts(self) -> Any:
        return self.task.new_counts()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("at", [1, 2, 12])  # the first part of the first update, its second part, a later update
def test_what_is_not_finite_stops_before_the_update_and_leaves_the_batch(
    kind: str, value: float, at: int, recipe: ClassificationRecipe, tmp_path: Path
) -> None:
    """Row C8."""
    training = training_of(recipe, tmp_path / "run")
    training.engine.objective = Poison(training.job, kind, value, at)  # type: ignore[arg-type]
    with pytest.raises(DivergedError, match=r"nothing was updated. The batch is kept in .*diverged"):
        training.train()
    step = (at - 1) // recipe.accumulation
    weights = {name: one.detach().clone() for name, one in training.engine.inner.named_parameters()}
    assert checkpoint.newest(tmp_path / "run" / "checkpoints").path.name == f"step-{step:09d}"  # type: ignore[union-attr]
    [left] = (tmp_path / "run" / "diverged").iterdir()
    parts, about = divergence.read(left, LabelledImages)
    assert (about["step"], about["rank"], len(parts)) == (step, 0, recipe.accumulation)
    assert about["names"][0].startswith("train/")
    assert sum(len(part.labels) for part in parts) == recipe.batch_size == len(about["names"])
    clean = training_of(replace(recipe, epochs=1), tmp_path / "clean")
    batches = clean.job.training_batches(0, 0, 1)
    for number in range(step):
        clean.engine.update([next(batches) for _ in range(2)], number)
    for name, one in clean.engine.inner.named_parameters():
        assert torch.equal(one, weights[name]), name


def test_a_diverged_batch_can_be_replayed(data: str, tmp_path: Path) -> None:
    """With a learning rate that blows up the weights; the batch diverges again, and so does the resumed run."""
    wild = faults.tiny(data, lr=1e30, warmup_lr=1e30, warmup_epochs=0, min_lr=0.0, clip_norm=None, ema_decay=None)
    with pytest.raises(DivergedError) as caught:
        train(wild, tmp_path / "run", quiet)
    found = replay(tmp_path / "run")
    [one] = found.values()
    assert one.bad_parameters
    assert f"at step {divergence.read(next(iter(found)), LabelledImages)[1]['step']}" in str(caught.value)
    with pytest.raises(DivergedError):
        resume(tmp_path / "run", quiet)


def test_a_replay_gives_the_loss_and_gradient_of_the_update_each_time(recipe: ClassificationRecipe, tmp_path: Path) -> None:
    """Including mixup: the batch is saved before mixing, and mixed in the same way again."""
    training = training_of(replace(recipe, clip_norm=None), tmp_path / "run")
    assert training.job.objective.mixup is not None
    batches = training.job.training_batches(0, 0, 1)
    parts = [next(batches) for _ in range(2)]
    about = {"step": 0, "rank": 0, "seed": recipe.seed}
    training.engine.optimizer.step = lambda: None
    update = training.engine.update(parts, 0)
    error = NonFiniteError(update.loss, update.grad_norm, update.lr, True)
    left = divergence.save_diverged_batch(tmp_path, parts, ["a"] * 16, error, about)
    stored, known = divergence.read(left, LabelledImages)
    for _ in range(2):
        again = divergence.replay(training.engine, stored, known)
        assert again.loss == pytest.approx(update.loss, rel=1e-6)
        assert again.grad_norm == pytest.approx(update.grad_norm, rel=1e-6)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_image_ends_the_run_by_default_and_nothing_is_lost(workers: int, tmp_path: Path) -> None:
    run_data = write_folder(tmp_path / "images", broken=1)
    recipe = of_folder(run_data, workers)
    with pytest.raises(ImageError, match=r"broken-0\.png is .*fetch it again, or remove it"):
        train(recipe, tmp_path / "run", quiet)
    found = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert json.loads(found.files["state.json"])["progress"]["step"] == int(found.path.name.split("-")[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_are_skipped_counted_and_listed_if_so_asked(workers: int, tmp_path: Path) -> None:
    run_data = write_folder(tmp_path / "images", broken=1)
    recipe = replace(of_folder(run_data, workers), on_bad_image="skip", max_bad_share=0.1)
    train(recipe, tmp_path / "run", quiet)
    listed = [line for line in journal.read(tmp_path / "run") if line["kind"] == "bad images"]
    assert [line["epoch"] for line in listed] == [1.0, 2.0]
    assert all(len(line["images"]) == 1 and "broken-0.png" in line["images"][0] for line in listed)
    assert evaluations(tmp_path / "run")[-1]["unreadable"] == 0
    workers_apart = [{name: value for name, value in line.items() if name != "wall"} for line in journal.read(tmp_path / "run")]
    reference = tmp_path / "other"
    train(replace(recipe, num_workers=1), reference, quiet)
    assert workers_apart == [
        {name: value for name, value in line.items() if name != "wall"} for line in journal.read(reference)
    ]


def test_bad_images_of_an_epoch_that_the_training_ends_within_are_listed_at_its_end(tmp_path: Path) -> None:
    """Seven updates per epoch."""
    recipe = replace(of_folder(write_folder(tmp_path / "images", broken=1), 0), on_bad_image="skip", max_bad_share=0.1)
    train(replace(recipe, steps=13), tmp_path / "run", quiet)
    listed = [line for line in journal.read(tmp_path / "run") if line["kind"] == "bad images"]
    assert [line["step"] for line in listed] == [7, 13]


def test_too_many_bad_images_end_the_run_after_it_was_saved(tmp_path: Path) -> None:
    recipe = replace(of_folder(write_folder(tmp_path / "images", broken=3), 0), on_bad_image="skip", max_bad_share=0.05)
    with pytest.raises(DataError, match=r"[3-6] images of this epoch could not be used, more than the 2 allowed"):
        train(recipe, tmp_path / "run", quiet)
    assert faults.saved_steps(tmp_path / "run") == [17]
    resume(tmp_path / "run", quiet, {"max_bad_share": 0.5})


def test_a_bad_validation_image_ends_the_run_after_it_was_saved(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images")
    (folder / "val" / "dark" / "broken.png").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"broken\.png .* saved at step 6 of 12; .*--on-bad-image skip"):
        train(of_folder(folder, 0), tmp_path / "run", quiet)
    assert faults.saved_steps(tmp_path / "run") == [6]
    resume(tmp_path / "run", quiet, {"on_bad_image": "skip"})
    assert evaluations(tmp_path / "run")[-1]["unreadable"] == 1


def test_a_worker_that_the_system_ends_is_one_error_and_nothing_is_lost(recipe: ClassificationRecipe, tmp_path: Path) -> None:
    def kill_workers(event: str, record: dict[str, Any]) -> None:
        if event == "update" and record["step"] == 4:
            for child in psutil.Process().children():
                if "forkserver" not in " ".join(child.cmdline()):
                    child.kill()
                    child.wait()  # PyTorch's signal handler would raise an error here, in the middle of an update

    with pytest.raises(DataError, match=r"a data loading process was killed by the system.*--num-workers.*saved at step"):
        train(replace(recipe, num_workers=1, epochs=40, warmup_epochs=1, save_every=1000), tmp_path / "run", kill_workers)
    assert faults.saved_steps(tmp_path / "run")[-1] >= 4


def test_bad_validation_images_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images")
    (folder / "val" / "dark" / "broken.png").write_bytes(b"no image")
    recipe = replace(of_folder(folder, 0), on_bad_image="skip", max_bad_share=0.5)
    train(recipe, tmp_path / "run", quiet)
    last = evaluations(tmp_path / "run")[-1]
    assert (last["samples"], last["unreadable"]) == (8, 1)


def test_a_full_disk_is_one_error_and_the_older_checkpoints_are_intact(
    recipe: ClassificationRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = training_of(recipe, tmp_path / "run")
    written: list[int] = []

    def fail(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "mkdir":
            written.append(number)
        if name == "write" and len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with faults.seen_by(checkpoint, faults.Counting(fail)), pytest.raises(CannotWriteError, match="No space left on device"):
        training.train()
    assert faults.saved_steps(tmp_path / "run") == [5]
    run = tmp_path / "run"
    (run / "config.json").unlink()
    assert checkpoint.newest(run / "checkpoints") is not None


def test_the_journal_is_on_the_disk_before_a_checkpoint_that_counts_its_bytes(
    recipe: ClassificationRecipe, tmp_path: Path
) -> None:
    """Otherwise a power cut could leave a checkpoint that expects more lines than the journal has, which is refused."""
    calls: list[tuple[str, str]] = []

    def noted(who: str) -> faults.Counting:
        return faults.Counting(lambda number, name, arguments: calls.append((who, name)))

    with faults.seen_by(journal, noted("journal")), faults.seen_by(checkpoint, noted("checkpoint")):
        training_of(recipe, tmp_path / "run").train()
    state = "synced"
    for call in calls:
        state = {("journal", "write"): "written", ("journal", "fsync"): "synced"}.get(call, state)
        assert call != ("checkpoint", "rename") or state == "synced"
    assert calls.count(("checkpoint", "rename")) == len(faults.saved_steps(tmp_path / "run")) == 2
    assert calls.count(("journal", "write")) > 2


def test_two_processes_cannot_train_one_run(recipe: ClassificationRecipe, tmp_path: Path) -> None:
    training = training_of(recipe, tmp_path / "run")
    with training.run.lock(), pytest.raises(SettingsError, match="is being trained by another process"):
        training.train()


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16"},
        {"precision": "fp64"},
        {"grad_checkpointing": True},
        {"ema_decay": None},
        pytest.param({"clip_norm": None}, marks=pytest.mark.long),
        pytest.param({"optimizer": "sgd"}, marks=pytest.mark.long),
        pytest.param({"optimizer": "lamb"}, marks=pytest.mark.long),
        {"optimizer": "laprop"},
        {"optimizer": "nadamlegacy"},
        {"optimizer": "muon"},
        {"accumulation": 4},
        pytest.param({"attention": "softmax"}, marks=pytest.mark.long),
        pytest.param({"attention": "linear"}, marks=pytest.mark.long),
        pytest.param({"smoothing": 0.0, "mixup": 0.0, "cutmix": 0.0}, marks=pytest.mark.long),
        {"cooldown_epochs": 1},
        {"ship": "best", "eval_every_steps": 2},
        pytest.param({"ship": "best", "eval_every_steps": 2, "ema_decay": None}, marks=pytest.mark.long),
        {"schedule": "multi-step", "steps": 13, "milestones": (4, 9), "warmup_steps": 3, "layer_decay": 0.8},
        {
            "schedule": "one-cycle",
            "momentum_cycle": (0.95, 0.85),
            "anneal": "linear",
            "steps": 13,
            "warmup_steps": 4,
            "clip_norm": None,
            "clip_value": 0.01,
            "layer_decay": 0.7,
            "no_decay": ("*.power", "*key_positions*"),
            "frozen_stages": 1,
            "eval_every_steps": 4,
        },
        {
            "model": "pola_pvt_tiny",
            "dims": (8, 8),
            "depths": (1, 1),
            "num_heads": (1, 1),
            "mlp_ratios": (1.0, 1.0),
            "patch_size": 2,
        },
    ],
    ids=str,
)
def test_every_option_trains_and_resumes_to_the_same_bits(
    changes: dict[str, Any], recipe: ClassificationRecipe, tmp_path: Path
) -> None:
    changed = replace(recipe, **changes)
    finished = train(changed, tmp_path / "whole", quiet)
    assert np.isfinite(finished.counts["val"].loss)
    whole = faults.outcome(tmp_path / "whole")
    stopped = training_of(changed, tmp_path / "stopped")
    (tmp_path / "stopped" / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())

    def stop(event: str, record: dict[str, Any]) -> None:
        if event == "update" and record["step"] == 7:
            raise KeyboardInterrupt

    stopped.watch = stop
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resume(tmp_path / "stopped", quiet)
    assert faults.outcome(tmp_path / "stopped") == whole


def test_a_budget_of_updates_ends_within_an_epoch_with_a_line_an_evaluation_and_a_checkpoint(
    recipe: ClassificationRecipe, tmp_path: Path
) -> None:
    """Ten updates per epoch."""
    changes = {"steps": 13, "eval_every_steps": 6, "save_every": None, "save_every_epochs": 2, "log_every": 5}
    train(replace(recipe, **changes), tmp_path / "run", quiet)
    lines = [(line["kind"], line["step"]) for line in journal.read(tmp_path / "run")]
    assert lines == [("train", 5), ("eval", 6), ("train", 10), ("eval", 12), ("train", 13), ("eval", 13)]
    assert [line["epoch"] for line in evaluations(tmp_path / "run")] == [0.6, 1.2, 1.3]
    assert faults.saved_steps(tmp_path / "run") == [13]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "a longer --warmup-epochs or a --clip-norm may help"),
        ({"steps": 40, "warmup_steps": 0, "clip_value": 1e30}, "a longer --warmup-steps or a smaller --clip-value may help"),
    ],
)
def test_a_diverged_run_names_the_options_in_use(changes: dict[str, Any], message: str, data: str, tmp_path: Path) -> None:
    wild: dict[str, Any] = {"lr": 1e30, "warmup_lr": 1e30, "warmup_epochs": 0, "min_lr": 0.0, "clip_norm": None}
    with pytest.raises(DivergedError, match=message):
        train(faults.tiny(data, ema_decay=None, **wild | changes), tmp_path / "run", quiet)


def test_parts_of_a_batch_give_the_gradient_of_the_whole(data: str, tmp_path: Path) -> None:
    """Gradient accumulation; the gradient of the whole batch is clipped in the same way."""
    plain = faults.tiny(data, precision="fp64", mixup=0.0, cutmix=0.0, drop_path_rate=0.0, accumulation=1, clip_norm=0.1)
    norms = []
    for number, accumulation in enumerate((1, 2, 4)):
        training = training_of(replace(plain, accumulation=accumulation), tmp_path / str(number))
        batches = training.job.training_batches(0, 0, 1)
        norms.append(training.engine.update([next(batches) for _ in range(accumulation)], 0).grad_norm)
    assert norms[1:] == pytest.approx(norms[:1] * 2, rel=1e-12)


def test_the_average_of_weights_is_what_is_evaluated_and_shipped(recipe: ClassificationRecipe, tmp_path: Path) -> None:
    finished = train(recipe, tmp_path / "run", quiet)
    found = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert found is not None
    shipped = faults.outcome(tmp_path / "run")["shipped"]
    assert shipped == faults.tensor_bytes(found.files["ema.safetensors"])
    assert shipped != faults.tensor_bytes(found.files["model.safetensors"])
    assert finished.counts["val"].samples == 23


def test_the_throwaway_pass_of_several_processes_leaves_the_statistics_of_batch_norm_alone(
    recipe: ClassificationRecipe, tmp_path: Path
) -> None:
    """The pass happens at every start, so a resumed run would count one batch more than an uninterrupted one."""
    batches = recipe.job().training_batches(0, 0, 1)
    parts = [next(batches) for _ in range(recipe.accumulation)]
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10))
    found = []
    for is_warm in (True, False):
        settings = replace(recipe, ema_decay=None)
        engine = Engine(copy.deepcopy(model), CrossEntropy(10), settings, 10, create_accelerator())
        engine._is_warm = is_warm
        engine.update(parts, 0)
        found.append(engine.inner.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert int(found[0]["1.num_batches_tracked"]) == recipe.accumulation


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_the_best_weights_are_evaluated_again_and_shipped_where_the_recipe_says_so(
    ema_decay: float | None, recipe: ClassificationRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With invented accuracies, of which the second of five is the best."""
    honest, made_up = ClassificationCounts.record, iter([10.0, 30.0, 20.0, 30.0, 25.0, 77.0])
    monkeypatch.setattr(ClassificationCounts, "record", lambda self: honest(self) | {"accuracy": next(made_up)})
    training = training_of(replace(recipe, ship="best", eval_every_steps=2, ema_decay=ema_decay), tmp_path / "run")
    weights: list[dict[str, torch.Tensor]] = []

    def keep(event: str, record: dict[str, Any]) -> None:
        if event == "eval":
            weights.append({name: one.clone() for name, one in training.engine.evaluated_model.state_dict().items()})

    training.watch = keep
    counts = training.train()
    shipped = training.engine.evaluated_model.state_dict()
    assert all(torch.equal(shipped[name], weights[1][name]) for name in shipped)
    assert any(not torch.equal(shipped[name], weights[4][name]) for name in shipped)
    last = journal.read(tmp_path / "run")[-1]
    assert (last["kind"], last["split"], last["best_step"], last["step"]) == ("final", "val", 4, 10)
    assert last["loss"] == pytest.approx(evaluations(tmp_path / "run")[1]["loss"])
    assert counts["val"].loss / 23 == pytest.approx(last["loss"])


def test_the_last_weights_are_shipped_by_default_and_no_others_are_kept(recipe: ClassificationRecipe, tmp_path: Path) -> None:
    train(replace(recipe, eval_every_steps=5), tmp_path / "run", quiet)
    found = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert "best.safetensors" not in found.files
    assert {line["kind"] for line in journal.read(tmp_path / "run")} == {"train", "eval"}


def test_the_average_of_weights_begins_with_those_of_the_second_update(recipe: ClassificationRecipe, tmp_path: Path) -> None:
    """The initial weights of a run are not part of the EMA."""
    engine = (training := training_of(recipe, tmp_path / "run")).engine
    batches = training.job.training_batches(0, 0, 1)
    average: dict[str, torch.Tensor] = {}
    for step in range(4):
        engine.update([next(batches) for _ in range(2)], step)
        weights = {name: one.detach().clone() for name, one in engine.inner.named_parameters()}
        average = weights if step < 2 else {name: average[name].lerp(weights[name], 0.1) for name in weights}
        for name, one in engine.ema.module.named_parameters():  # type: ignore[union-attr]
            torch.testing.assert_close(one, average[name], rtol=1e-6, atol=1e-7)
    assert any(not torch.equal(average[name], weights[name]) for name in weights)


def test_fp16_without_a_gpu_is_refused_before_anything_is_written(recipe: ClassificationRecipe, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SettingsError, match=r"fp16.*needs a GPU"):
        train(replace(recipe, precision="fp16"), tmp_path / "run", quiet)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["adahessian", "kron", "fusedadam", "bnbadam", "no such thing"])
def test_an_optimiser_that_cannot_be_used_or_saved_is_refused_before_the_work(
    name: str, recipe: ClassificationRecipe, tmp_path: Path
) -> None:
    # kron would start a compiler for its step; run eagerly, it is refused for the same reason.
    with torch.compiler.set_stance("force_eager"), pytest.raises(SettingsError, match="optimizer is"):
        train(replace(recipe, optimizer=name), tmp_path / "run", quiet)
    assert not (tmp_path / "run").exists()


def test_a_folder_called_digits_does_not_stand_for_the_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    small = {"epochs": 1, "warmup_epochs": 0, "dims": (16,), "depths": (1,), "num_workers": 0}
    train(replace(find("digits/pola-vit-tiny"), **small), Path("run"), quiet)
    resume(Path("run"), quiet)


@pytest.mark.faults
def test_a_compiled_model_trains_and_ships_plain_weights(recipe: ClassificationRecipe, tmp_path: Path) -> None:
    train(replace(recipe, compile=True), tmp_path / "run", quiet)
    load_classifier(tmp_path / "run" / "model.safetensors")


def test_a_shorter_journal_than_the_checkpoint_knows_is_an_error(recipe: ClassificationRecipe, tmp_path: Path) -> None:
    train(recipe, tmp_path / "run", quiet)
    (tmp_path / "run" / "journal.jsonl").write_text("")
    with pytest.raises(DataError, match="shorter than when the checkpoint was written"):
        resume(tmp_path / "run", quiet)


def write_folder(root: Path, broken: int = 0) -> Path:
    """Dark and light noise images of several sizes, 24 of each for training and 4 for validation."""
    draws = np.random.default_rng(0)
    for part, number in (("train", 24), ("val", 4)):
        for name, level in (("dark", 0), ("light", 128)):
            (root / part / name).mkdir(parents=True)
            for index in range(number):
                pixels = draws.integers(level, level + 127, (9 + index % 3, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{index:02d}.png")
    for index in range(broken):
        content = (root / "train" / "dark" / "00.png").read_bytes()
        (root / "train" / "dark" / f"broken-{index}.png").write_bytes(content[: len(content) // 2])
    return root


def of_folder(folder: Path, workers: int) -> ClassificationRecipe:
    """A recipe of two epochs whose batch size divides the number of images, so that every epoch uses all of them."""
    number = len(open_data(str(folder)).train)
    small = {"accumulation": 1, "mixup": 0.0, "cutmix": 0.0, "epochs": 2, "save_every": 100, "log_every": 100}
    colours = {"mean": (0.5,) * 3, "std": (0.3,) * 3}
    batch_size = 8 if number % 8 == 0 else 7 if number % 7 == 0 else 3
    return faults.tiny(str(folder), num_workers=workers, batch_size=batch_size, **small, **colours)


def test_a_run_can_be_resumed_from_another_folder_and_without_the_weights_it_started_from(
    recipe: ClassificationRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    faults.write_data(tmp_path / "here.npz")
    train(replace(recipe, data="here.npz"), Path("first"), quiet)
    train(replace(recipe, data="here.npz", checkpoint="first/model.safetensors", seed=1), Path("second"), quiet)
    (tmp_path / "first" / "model.safetensors").unlink()
    monkeypatch.chdir("/")
    resume(tmp_path / "second", quiet)
    checkpoint_folders = list((tmp_path / "second" / "checkpoints").iterdir())
    for folder in checkpoint_folders:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    with pytest.raises(DataError, match=r"first/model.safetensors"):
        resume(tmp_path / "second", quiet)


def test_other_data_than_a_run_was_begun_with_are_refused(recipe: ClassificationRecipe, tmp_path: Path) -> None:
    train(recipe, tmp_path / "run", quiet)
    other = faults.write_data(tmp_path / "other.npz", num_train=96)
    with pytest.raises(DataError, match=r"the data are not those that .* was started with"):
        resume(tmp_path / "run", quiet, {"data": other})


def test_starting_weights_for_other_classes_keep_all_but_the_classifier(recipe: ClassificationRecipe, tmp_path: Path) -> None:
    finished = train(recipe, tmp_path / "run", quiet)
    weights = str(tmp_path / "run" / "model.safetensors")
    found = np.load(recipe.data or "")
    chosen = found["y_train"] < 3, found["y_test"] < 3
    arrays = {"x_train": found["x_train"][chosen[0]], "y_train": found["y_train"][chosen[0]]}
    np.savez(tmp_path / "three.npz", **arrays, x_test=found["x_test"][chosen[1]], y_test=found["y_test"][chosen[1]])
    job = replace(recipe, data=str(tmp_path / "three.npz"), checkpoint=weights, img_size=12).job()
    trained = finished.predictor.model.state_dict()
    for name, tensor in job.model.state_dict().items():
        if tensor.shape == trained[name].shape and not name.startswith("head."):
            assert torch.equal(tensor, trained[name]), name
    assert job.model.state_dict()["head.weight"].shape[0] == 3
