"""The optimiser, timm's, the groups of its parameters, and the schedule that sets their rates."""

from fnmatch import fnmatch
from typing import Any

import torch
from timm.optim import create_optimizer_v2, list_optimizers, param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn

from polaformer.errors import SettingsError, nearest, raise_all
from polaformer.training.freezing import frozen_names
from polaformer.training.schedules import values_at
from polaformer.training.settings import Settings
from polaformer.training.timeline import Timeline


def create_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """timm's optimiser of that name, for the parameters that require gradients; raises SettingsError."""
    check_settings(settings)
    return create_optimizer_v2(
        parameter_groups(model, settings), opt=settings.optimizer, lr=settings.scaled(settings.lr), weight_decay=0.0
    )


def parameter_groups(model: nn.Module, settings: Settings) -> list[dict[str, Any]]:
    """timm's groups: with and without weight decay, and of each layer where there is layer decay; raises SettingsError.

    Not decayed are vectors, biases, what `model.no_weight_decay()` names and what matches `settings.no_decay`. With layer decay
    each group has a factor of the learning rate, "lr_scale": layer_decay to the number of layers above it; 1 for the head.
    """
    spared = set(settings.no_decay)
    if wrong := _unmatched(model, settings.no_decay):
        raise SettingsError(wrong)
    if hasattr(model, "no_weight_decay"):
        spared |= model.no_weight_decay()  # type: ignore[operator]
    if settings.layer_decay is None:
        return param_groups_weight_decay(model, settings.weight_decay, no_weight_decay_list=spared)
    if not hasattr(model, "group_matcher"):
        raise SettingsError(
            f"layer_decay is {settings.layer_decay:g}, but {type(model).__name__} has no group_matcher, to name its layers; "
            "pass --layer-decay None"
        )
    # Without layer decay timm spares biases of any shape, with it only vectors.
    spared.add("*.bias")
    return param_groups_layer_decay(model, settings.weight_decay, no_weight_decay_list=spared, layer_decay=settings.layer_decay)


def check_trainable(model: nn.Module, settings: Settings) -> None:
    """Raises SettingsError unless the model can do what the settings ask for: frozen stages, layers, gradient checkpointing."""
    problems = []
    if settings.grad_checkpointing and not hasattr(model, "set_grad_checkpointing"):
        problems.append(f"grad_checkpointing is true, but {type(model).__name__} has none; pass --grad-checkpointing false")
    raise_all(problems, [lambda: _check_frozen(model, settings), lambda: parameter_groups(model, settings)])


def _check_frozen(model: nn.Module, settings: Settings) -> None:
    frozen = frozen_names(model, settings.frozen_stages)
    if all(name in frozen for name, parameter in model.named_parameters() if parameter.requires_grad):
        raise SettingsError(f"frozen_stages is {settings.frozen_stages}, which leaves nothing to train; give fewer")


def _unmatched(model: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    names = [name for name, _ in model.named_parameters()]
    return [
        f"no_decay has {pattern!r}, which matches no parameter of {type(model).__name__}; {nearest(pattern, names)}names are "
        f"such as {names[len(names) // 2]!r}, and * stands for anything"
        for pattern in patterns
        if not any(fnmatch(name, pattern) for name in names)
    ]


def check_settings(settings: Settings) -> None:
    """Raises SettingsError unless the optimiser can be used here with these settings."""
    check_optimizer(settings.optimizer, cycles_momentum=settings.momentum_cycle is not None)


def check_optimizer(name: str, *, cycles_momentum: bool = False) -> None:
    """Raises SettingsError unless timm has an optimiser of that name that works here and whose memory can be saved.

    cycles_momentum: and that has a momentum or betas.
    """
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
    if cycles_momentum and not any({"betas", "momentum"} & set(group) for group in optimizer.param_groups):
        raise SettingsError(
            f"momentum_cycle is given, but optimizer {name!r} has no momentum; choose another, such as adamw, or pass "
            "--momentum-cycle None"
        )


class Schedule:
    """Gives the optimiser the learning rate and momentum of each update, which are functions of the update alone."""

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings, steps_per_epoch: int) -> None:
        self.optimizer, self.settings, self.timeline = optimizer, settings, Timeline(settings, steps_per_epoch)

    def set(self, step: int) -> float:
        """Sets the rate of update `step`, counted from 0, times each group's "lr_scale", and returns the rate itself."""
        rate, momentum = values_at(step, self.settings, self.timeline)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"] if "lr_scale" in group else rate
            if momentum is not None:
                _set_momentum(group, momentum)
        return rate


def _set_momentum(group: dict[str, Any], momentum: float) -> None:
    """Some optimisers, such as Muon, have both kinds, each for some of their parameters."""
    if "betas" in group:
        group["betas"] = (momentum, *group["betas"][1:])
    if "momentum" in group:
        group["momentum"] = momentum


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
