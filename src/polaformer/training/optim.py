"""The optimiser and the schedule, both timm's."""

from typing import Any

import torch
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn

from polaformer.errors import SettingsError, nearest
from polaformer.training.settings import Settings


def create_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """timm's optimiser of that name; vectors, biases and what `model.no_weight_decay()` names are not decayed."""
    check_optimizer(settings.optimizer)
    rate = settings.scaled(settings.lr)
    return create_optimizer_v2(model, opt=settings.optimizer, lr=rate, weight_decay=settings.weight_decay)


def check_optimizer(name: str) -> None:
    """Raises SettingsError unless timm has an optimiser of that name that works here and whose memory can be saved."""
    if name not in list_optimizers():
        raise SettingsError(f"optimizer is {name!r}; {nearest(name, list_optimizers())}timm.optim.list_optimizers() lists them")
    trial = nn.Linear(2, 2)
    try:
        optimizer = create_optimizer_v2(trial, opt=name, lr=1e-3, weight_decay=0.01)
        trial(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        restore_state(optimizer, trial, *state_of(optimizer, trial))
    except Exception as error:
        # Whatever it needs that is not here: a package, a GPU, second derivatives, another kind of memory.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SettingsError(f"optimizer is {name!r}, which cannot be used here: {reason}; choose another") from error


class Schedule:
    """The learning rate as a function of the update: cosine with a linear warm-up, as the authors use timm's.

    The cosine is counted from the first update on, so the rate drops where the warm-up ends. After the epochs of the schedule
    it stays at the smallest.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings, steps_per_epoch: int) -> None:
        self.optimizer = optimizer
        self.timm = CosineLRScheduler(
            optimizer,
            t_initial=settings.epochs * steps_per_epoch,
            lr_min=settings.scaled(settings.min_lr),
            warmup_t=settings.warmup_epochs * steps_per_epoch,
            warmup_lr_init=settings.scaled(settings.warmup_lr),
            cycle_limit=1,
            t_in_epochs=False,
        )

    def set(self, step: int) -> float:
        """Gives the optimiser the rate of update `step`, counted from 0, and returns it."""
        self.timm.step_update(step)
        return self.optimizer.param_groups[0]["lr"]


def state_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimiser's memory: tensors by "<parameter>/<kind>", and numbers, of parameters and of groups; raises TypeError."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {"groups": [_numbers_of(group) for group in optimizer.param_groups], "parameters": {}}
    for parameter, memory in optimizer.state.items():
        for kind, value in memory.items():
            key = f"{names[id(parameter)]}/{kind}"
            if isinstance(value, Tensor):
                tensors[key] = value.detach().contiguous()
            elif isinstance(value, int | float):
                numbers["parameters"][key] = value
            elif value is not None:
                raise TypeError(f"its memory has a {type(value).__name__}, which cannot be saved")
    return tensors, numbers


def restore_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor], numbers: dict[str, Any]
) -> None:
    """Gives the optimiser the memory of `state_of`."""
    memories: dict[str, dict[str, Any]] = {}
    for key, value in {**tensors, **numbers["parameters"]}.items():
        name, kind = key.rsplit("/", 1)
        memories.setdefault(name, {})[kind] = value
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    order = [names[id(parameter)] for parameter in parameters]
    state = {place: memories[name] for place, name in enumerate(order) if name in memories}
    groups = [group | mine for group, mine in zip(optimizer.state_dict()["param_groups"], numbers["groups"], strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter, name in zip(parameters, order, strict=True):
        for kind, value in memories.get(name, {}).items():
            loaded = optimizer.state[parameter][kind]
            if isinstance(value, Tensor) and loaded.dtype != value.dtype:  # PyTorch rounds memory to the parameter's precision
                optimizer.state[parameter][kind] = value.to(loaded.device)


def _numbers_of(group: dict[str, Any]) -> dict[str, float]:
    """Some optimisers count their steps in their groups, as numbers or as tensors of one."""
    scalars = {name: value for name, value in group.items() if not isinstance(value, Tensor) or value.ndim == 0}
    found = {name: float(value) if isinstance(value, Tensor) else value for name, value in scalars.items()}
    return {name: value for name, value in found.items() if isinstance(value, int | float) and not isinstance(value, bool)}
