"""Rows P1 and P2: several processes compute what one computes, and count what one counts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import faults
from faults import free_port
from polaformer.tasks.classification.recipe import ClassificationRecipe
from polaformer.training.slurm import first_host, num_processes, slurm_variables

TOLERANCE = 1e-12


def gradients_of_a_step(recipes: dict[str, ClassificationRecipe], step: int, target: str) -> None:
    """Write the gradients of an update of each recipe; runs in each of several processes."""
    from polaformer.training.engine import Engine, take_batches
    from polaformer.training.processes import create_accelerator

    found: dict[str, torch.Tensor] = {}
    for key, recipe in recipes.items():
        job, accelerator = recipe.job(), create_accelerator(recipe.precision)
        engine = Engine(job.model, job.objective, recipe, job.steps_per_epoch, accelerator)

        def keep(key: str = key, engine: Engine = engine) -> None:
            gradients = {name: one.grad for name, one in engine.inner.named_parameters()}
            found.update({f"{key}/{name}": one.clone() for name, one in gradients.items() if one is not None})

        engine.optimizer.step = keep
        batches = job.training_batches(step, accelerator.process_index, accelerator.num_processes)
        update = engine.update(take_batches(batches, recipe.accumulation), step)
        found[f"{key}/loss"] = torch.tensor(update.loss, dtype=torch.float64)
    if accelerator.is_main_process:
        save_file(found, target)


def counts_of_processes(recipe: ClassificationRecipe, sizes: tuple[int, ...], target: str) -> None:
    """Write the evaluation counts of the first `size` images, for several sizes."""
    from polaformer.data.sources.source import DataSplits, Subset
    from polaformer.tasks.classification.job import ClassificationJob
    from polaformer.training.evaluation import count
    from polaformer.training.processes import create_accelerator

    accelerator = create_accelerator("fp32")
    found: dict[str, torch.Tensor] = {}
    for size in sizes:
        whole = recipe.job().data
        job = ClassificationJob(recipe, data=DataSplits(whole.train, Subset(whole.val, list(range(size)))))
        batches = job.evaluation_batches("val", accelerator.process_index, accelerator.num_processes)
        counts = count(job.model, job.objective, batches, accelerator)
        found[f"{size}.confusion"], found[f"{size}.top5"] = counts.confusion, torch.tensor(counts.top5)
        found[f"{size}.loss"] = torch.tensor(counts.loss, dtype=torch.float64)
    if accelerator.is_main_process:
        save_file(found, target)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> ClassificationRecipe:
    """In float64, without mixup and drop path, whose draws differ between processes by design."""
    data = faults.write_data(tmp_path_factory.mktemp("data") / "digits.npz")
    return faults.tiny(data, precision="fp64", mixup=0.0, cutmix=0.0, drop_path_rate=0.0, accumulation=1, clip_norm=None)


HIERARCHY = {"patch_size": 1, "dims": (8, 16), "depths": (1, 1), "num_heads": (1, 2), "mlp_ratios": (1.0, 1.0)}
MODELS: dict[str, dict[str, Any]] = {
    "pola_deit_tiny": {},
    "pola_pvt_tiny": HIERARCHY,
    "pola_swin_tiny": HIERARCHY | {"attention": "pola,softmax", "mlp_ratios": None},
}


def gradients(recipe: ClassificationRecipe, target: Path, processes: int, accumulation: int) -> dict[str, torch.Tensor]:
    """The gradients of every model, by "model/parameter"."""
    recipes = {name: replace(recipe, model=name, accumulation=accumulation, **changes) for name, changes in MODELS.items()}
    faults.call(gradients_of_a_step, recipes, 3, str(target), processes=processes, port=free_port())
    return load_file(target)


@pytest.fixture(scope="module")
def gradients_of_one(recipe: ClassificationRecipe, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return gradients(recipe, tmp_path_factory.mktemp("one") / "one", 1, 1)


@pytest.mark.parametrize(("processes", "accumulation"), [(2, 1), (4, 1), (2, 4), (1, 2)])
def test_gradients_of_several_processes_are_those_of_one(
    processes: int, accumulation: int, recipe: ClassificationRecipe, gradients_of_one: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    found = gradients(recipe, tmp_path / "several", processes, accumulation)
    assert gradients_of_one.keys() == found.keys()
    for model in MODELS:
        names = [name for name in found if name.startswith(f"{model}/")]
        largest = max(float(gradients_of_one[name].abs().max()) for name in names)
        for name in names:
            assert float((gradients_of_one[name] - found[name]).abs().max()) <= TOLERANCE * max(largest, 1.0), name
        assert largest > 1e-3


def test_evaluation_counts_are_equal_whatever_the_number_of_processes(recipe: ClassificationRecipe, tmp_path: Path) -> None:
    sizes = (1, 7, 16, 23)
    single = replace(recipe, precision="fp32", batch_size=4)
    for world in (1, 2, 3, 4):
        faults.call(counts_of_processes, single, sizes, str(tmp_path / f"{world}"), processes=world, port=free_port())
    wanted = load_file(tmp_path / "1")
    for size in sizes:
        assert int(wanted[f"{size}.confusion"].sum()) == size
    for world in (2, 3, 4):
        found = load_file(tmp_path / f"{world}")
        for name in wanted:
            if name.endswith("loss"):
                torch.testing.assert_close(found[name], wanted[name], rtol=1e-6, atol=0)
            else:
                assert torch.equal(found[name], wanted[name]), (world, name)


def update_of_a_resumed_engine(recipe: ClassificationRecipe, target: str) -> None:
    """Write the weights after three updates of an uninterrupted engine and of one that resumed after the second update."""
    from polaformer.training.engine import Engine, Progress, take_batches
    from polaformer.training.processes import create_accelerator

    job, accelerator = recipe.job(), create_accelerator(recipe.precision)
    batches = job.training_batches(0, accelerator.process_index, accelerator.num_processes)
    parts = [take_batches(batches, recipe.accumulation) for _ in range(3)]
    whole = Engine(job.model, job.objective, recipe, job.steps_per_epoch, accelerator)
    for step in range(2):
        whole.update(parts[step], step)
    files = whole.files(Progress(step=2), {}, seconds=0.0)
    resumed = Engine(recipe.job().model, job.objective, recipe, job.steps_per_epoch, accelerator)
    resumed.restore(files)
    found = {}
    for name, engine in {"whole": whole, "resumed": resumed}.items():
        engine.update(parts[2], 2)
        found |= {f"{name}.{key}": one.detach() for key, one in engine.inner.named_parameters()}
    if accelerator.is_main_process:
        save_file(found, target)


def test_the_first_update_of_three_resumed_processes_adds_gradients_in_the_same_order(
    recipe: ClassificationRecipe, tmp_path: Path
) -> None:
    """The sum of two gradients does not depend on their order, that of three does; only the first update could differ."""
    single = replace(recipe, precision="fp32", batch_size=12)
    faults.call(update_of_a_resumed_engine, single, str(tmp_path / "found"), processes=3, port=free_port())
    found = load_file(tmp_path / "found")
    names = [name.removeprefix("whole.") for name in found if name.startswith("whole.")]
    assert names
    assert [name for name in names if not torch.equal(found[f"whole.{name}"], found[f"resumed.{name}"])] == []


def unreadable_of_processes(folder: str, target: str) -> None:
    """Write the images that an evaluation could not read."""
    from polaformer.data.labelled_images import ImageReader
    from polaformer.data.order import EvaluationOrder
    from polaformer.data.samples import Samples, batches
    from polaformer.data.sources.opening import open_data
    from polaformer.data.transforms import Preprocessing
    from polaformer.tasks.classification.objective import CrossEntropy
    from polaformer.training.evaluation import count
    from polaformer.training.processes import create_accelerator

    accelerator, source = create_accelerator("fp32"), open_data(folder).val
    transform = Preprocessing((8, 8), (0.5,), (0.5,)).transform()
    samples = Samples(ImageReader(source, transform, channels=1), seed=0, on_bad="skip", replace=False)
    read = batches(samples, EvaluationOrder(len(source), 2, accelerator.process_index, accelerator.num_processes))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    counts = count(model, CrossEntropy(2), read, accelerator)
    if accelerator.is_main_process:
        Path(target).write_text("\n".join([str(counts.samples), *counts.bad]))


def test_images_that_cannot_be_read_are_counted_once_whatever_the_number_of_processes(tmp_path: Path) -> None:
    for part in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for number in range(4):
                Image.new("L", (8, 8), number).save(tmp_path / "data" / part / name / f"{number}.png")
    for number in (0, 3):
        (tmp_path / "data" / "val" / "a" / f"{number}.png").write_bytes(b"broken")
    for world in (1, 2, 3):
        target = str(tmp_path / f"{world}")
        faults.call(unreadable_of_processes, str(tmp_path / "data"), target, processes=world, port=free_port())
    found = [(tmp_path / f"{world}").read_text() for world in (1, 2, 3)]
    assert found[0].startswith("6\n")
    assert found[0].count(".png") == 2
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("a,b", "a"),
        ("node[007-012,20],other", "node007"),
        ("gpu-a-[3,5]", "gpu-a-3"),
        ("x1,node[1-2]", "x1"),
    ],
)
def test_the_first_host_of_slurms_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_slurms_variables_become_torchruns() -> None:
    given = {
        "SLURM_PROCID": "11",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "16",
        "SLURM_LOCALID": "3",
        "SLURM_JOB_NODELIST": "gpu[04-05]",
        "SLURM_TASKS_PER_NODE": "8(x2)",
        "SLURM_JOB_ID": "1234567",
    }
    wanted = {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "gpu04"}
    found = slurm_variables(given)
    assert str(num_processes(given)) == found["WORLD_SIZE"]
    assert found.pop("MASTER_PORT").isdecimal()
    assert found == wanted


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {"RANK": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"},
    ],
)
def test_outside_srun_and_under_torchrun_nothing_is_set(environment: dict[str, str]) -> None:
    assert slurm_variables(environment) == {}
    assert num_processes(environment) == int(environment.get("WORLD_SIZE", "1"))
