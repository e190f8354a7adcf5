"""The optimiser and the schedule, both timm's."""

import torch
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn

from polaformer.errors import SettingsError
from polaformer.training.settings import Settings


def create_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """timm's optimiser of that name; vectors, biases and what `model.no_weight_decay()` names are not decayed."""
    check_optimizer(settings.optimizer)
    rate = settings.scaled(settings.lr)
    return create_optimizer_v2(model, opt=settings.optimizer, lr=rate, weight_decay=settings.weight_decay)


def check_optimizer(name: str) -> None:
    """Raises SettingsError unless timm has an optimiser of that name."""
    from difflib import get_close_matches

    if name not in list_optimizers():
        near = get_close_matches(name, list_optimizers(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise SettingsError(f"optimizer is {name!r}; {hint}timm.optim.list_optimizers() lists them")


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


def state_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimiser's memory as tensors, "<parameter>/<kind>"; numbers become tensors of no dimension."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{kind}": _as_tensor(value)
        for parameter, memory in optimizer.state.items()
        for kind, value in memory.items()
        if value is not None
    }


def state_numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """The numbers of each group of parameters; some optimisers count their steps there."""
    return [
        {name: float(value) if isinstance(value, Tensor) else value for name, value in group.items() if _is_number(value)}
        for group in optimizer.param_groups
    ]


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


def restore_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor], numbers: list[dict[str, float]]
) -> None:
    """Gives the optimiser the memory of `state_tensors` and `state_numbers`."""
    memories: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, kind = key.rsplit("/", 1)
        memories.setdefault(name, {})[kind] = tensor
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    state = {place: memories[name] for place, name in enumerate(order) if name in memories}
    groups = [group | mine for group, mine in zip(optimizer.state_dict()["param_groups"], numbers, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _as_tensor(value: Tensor | float) -> Tensor:
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    return tensor.contiguous()
