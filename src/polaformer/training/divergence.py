"""What is left behind when a loss or gradient is not finite: the batch, and a way to run it again."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from polaformer.data.batch import Batch
from polaformer.data.randomness import derive, reseed
from polaformer.errors import DataError
from polaformer.regular_files import open_regular, writing
from polaformer.training.engine import Engine, NonFiniteError
from polaformer.training.evaluation import moved
from polaformer.training.settings import Settings

FOLDER = "diverged"


class Replay(NamedTuple):
    """What a batch does to the weights as they were: the loss, and the names of parameters whose gradients are not finite."""

    loss: float
    grad_norm: float
    bad_parameters: list[str]


def leave_behind(folder: Path, parts: Sequence[Batch], names: list[str], error: NonFiniteError, about: dict[str, int]) -> Path:
    """Writes the parts of the update as they went into the model, and what is known of it, into one file.

    about: the step, the rank of the process and the seed, from which the draws of mixup, dropout and drop path follow.
    """
    target = folder / FOLDER / f"step-{about['step']:09d}-rank-{about['rank']}.safetensors"
    stored = [part.flatten(str(number)) for number, part in enumerate(parts)]
    tensors = {name: tensor for found, _ in stored for name, tensor in found.items()}
    known = {**about, "lr": error.lr, "loss": repr(error.loss), "grad_norm": repr(error.grad_norm), "names": names}
    known["parts"] = [outline for _, outline in stored]
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, target, {"about": json.dumps(known)})
    return target


def read(path: Path, kind: type[Batch]) -> tuple[list[Batch], dict[str, Any]]:
    """The parts, batches of that kind, and what is known of them; raises DataError."""
    try:
        with open_regular(path), safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, it is not a dict
            about = json.loads(file.metadata()["about"])
        outlines = about["parts"] if "parts" in about else _outlines_of_names(tensors)
        return [kind.unflatten(tensors, outline) for outline in outlines], about
    except Exception as error:
        # safetensors and JSON have their own errors for what is not theirs.
        raise DataError(f"{path} is no file of a diverged step: {error}; give one from {FOLDER}/") from error


def _outlines_of_names(tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """What files of version 0.1.0 do not say: their tensors are called FIELD.PART, and there is nothing else."""
    parts = sorted({int(name.rpartition(".")[2]) for name in tensors})
    names = {name.rpartition(".")[0] for name in tensors}
    return [{name: {"tensor": f"{name}.{part}"} for name in names} | {"bad": []} for part in parts]


def advice(settings: Settings) -> str:
    """What may keep a training with these settings from diverging."""
    warmup = "--warmup-epochs" if settings.warmup_steps is None else "--warmup-steps"
    clipping = "--clip-norm" if settings.clip_value is None else "smaller --clip-value"
    return f"A smaller --lr, a longer {warmup} or a {clipping} may help"


def replay(engine: Engine, parts: Sequence[Batch], about: dict[str, Any]) -> Replay:
    """The same loss and gradients once more, with the weights that the engine has; nothing is updated."""
    reseed(derive("step", about["seed"], about["step"], about["rank"]))
    engine.train_mode()
    model: nn.Module = engine.inner
    model.zero_grad(set_to_none=True)
    losses: list[Tensor] = []
    for part in parts:
        with engine.accelerator.autocast():
            losses.append(engine.objective.loss(model, moved(part, model, engine.accelerator)))
        (losses[-1] / len(parts)).backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    bad = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
    norm = torch.nn.utils.get_total_norm(gradients.values())
    return Replay(float(torch.stack(losses).mean().detach()), float(norm), bad)
