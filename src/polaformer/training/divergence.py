"""If a loss or gradient is not finite: save the batch, and replay it later."""

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
from polaformer.training.evaluation import to_model
from polaformer.training.settings import Settings

FOLDER = "diverged"


class Replay(NamedTuple):
    """The loss and gradient norm of a replayed batch, and the parameters whose gradients are not finite."""

    loss: float
    grad_norm: float
    bad_parameters: list[str]


def save_diverged_batch(
    folder: Path, parts: Sequence[Batch], names: list[str], error: NonFiniteError, about: dict[str, int]
) -> Path:
    """Writes the parts of the update, as the model saw them, and everything known about it into one file; returns its path.

    about: the step, the rank of the process and the seed, which determine the draws of mixup, dropout and drop path.
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
    """The parts, as batches of class `kind`, and what is known about them; raises DataError."""
    try:
        with open_regular(path), safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, it is not a dict
            about = json.loads(file.metadata()["about"])
        outlines = about["parts"] if "parts" in about else _outlines_from_names(tensors)
        return [kind.unflatten(tensors, outline) for outline in outlines], about
    except Exception as error:
        # safetensors and JSON raise their own errors for other files.
        raise DataError(f"{path} is not the batch of a diverged step: {error}; give a file from {FOLDER}/") from error


def _outlines_from_names(tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The outlines of a file of version 0.1.0, which stores none: its tensors are called FIELD.PART."""
    parts = sorted({int(name.rpartition(".")[2]) for name in tensors})
    names = {name.rpartition(".")[0] for name in tensors}
    return [{name: {"tensor": f"{name}.{part}"} for name in names} | {"bad": []} for part in parts]


def advice(settings: Settings) -> str:
    """What may keep a training run with these settings from diverging."""
    warmup = "--warmup-epochs" if settings.warmup_steps is None else "--warmup-steps"
    clipping = "--clip-norm" if settings.clip_value is None else "smaller --clip-value"
    return f"A smaller --lr, a longer {warmup} or a {clipping} may help"


def replay(engine: Engine, parts: Sequence[Batch], about: dict[str, Any]) -> Replay:
    """Computes the loss and gradients of an update again, with the current weights of the engine; nothing is updated."""
    reseed(derive("step", about["seed"], about["step"], about["rank"]))
    engine.train_mode()
    model: nn.Module = engine.inner
    model.zero_grad(set_to_none=True)
    losses: list[Tensor] = []
    for part in parts:
        with engine.accelerator.autocast():
            losses.append(engine.objective.loss(model, to_model(part, model, engine.accelerator)))
        (losses[-1] / len(parts)).backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    bad = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
    norm = torch.nn.utils.get_total_norm(gradients.values())
    return Replay(float(torch.stack(losses).mean().detach()), float(norm), bad)
