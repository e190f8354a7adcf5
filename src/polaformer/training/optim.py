"""timm's optimisers, their parameter groups and saved state, and the schedule that sets the learning rates."""

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
    """timm's optimiser for the parameters that require gradients; raises SettingsError."""
    check_settings(settings)
    return create_optimizer_v2(
        parameter_groups(model, settings),
        opt=settings.optimizer,
        lr=settings.scaled(settings.lr),
        weight_decay=0.0,
        **_epsilon(settings.optimizer_eps),
    )


def _epsilon(eps: float | None) -> dict[str, float]:
    return {} if eps is None else {"eps": eps}


def parameter_groups(model: nn.Module, settings: Settings) -> list[dict[str, Any]]:
    """timm's parameter groups: with and without weight decay, and per layer with layer decay; raises SettingsError.

    Vectors, biases, parameters in `model.no_weight_decay()` and those that match `settings.no_decay` are not decayed. With
    layer decay each group has a factor of the learning rate, "lr_scale": layer_decay^(number of layers above), 1 for the head.
    """
    exempt = set(settings.no_decay)
    if problems := _unmatched_patterns(model, settings.no_decay):
        raise SettingsError(problems)
    if hasattr(model, "no_weight_decay"):
        exempt |= model.no_weight_decay()  # type: ignore[operator]
    if settings.layer_decay is None:
        return param_groups_weight_decay(model, settings.weight_decay, no_weight_decay_list=exempt)
    if not hasattr(model, "group_matcher"):
        raise SettingsError(
            f"layer_decay is {settings.layer_decay:g}, but {type(model).__name__} has no group_matcher to name its layers; "
            "pass --layer-decay None"
        )
    # Without layer decay, timm exempts biases of any shape; with it, only vectors.
    exempt.add("*.bias")
    return param_groups_layer_decay(model, settings.weight_decay, no_weight_decay_list=exempt, layer_decay=settings.layer_decay)


def check_trainable(model: nn.Module, settings: Settings) -> None:
    """Raises SettingsError unless the model supports the settings: frozen stages, layer decay, gradient checkpointing."""
    problems = []
    if settings.grad_checkpointing and not hasattr(model, "set_grad_checkpointing"):
        kind = type(model).__name__
        problems.append(f"grad_checkpointing is true, but {kind} does not support it; pass --grad-checkpointing false")
    raise_all(problems, [lambda: _check_frozen(model, settings), lambda: parameter_groups(model, settings)])


def _check_frozen(model: nn.Module, settings: Settings) -> None:
    frozen = frozen_names(model, settings.frozen_stages)
    if all(name in frozen for name, parameter in model.named_parameters() if parameter.requires_grad):
        raise SettingsError(f"frozen_stages is {settings.frozen_stages}, which leaves nothing to train; give fewer")


def _unmatched_patterns(model: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    names = [name for name, _ in model.named_parameters()]
    return [
        f"no_decay has {pattern!r}, which matches no parameter of {type(model).__name__}; {nearest(pattern, names)}names "
        f"look like {names[len(names) // 2]!r}, and * matches anything"
        for pattern in patterns
        if not any(fnmatch(name, pattern) for name in names)
    ]


def check_settings(settings: Settings) -> None:
    """Raises SettingsError unless the optimiser can be used here with these settings."""
    check_optimizer(settings.optimizer, settings.optimizer_eps, cycles_momentum=settings.momentum_cycle is not None)


def check_optimizer(name: str, eps: float | None = None, *, cycles_momentum: bool = False) -> None:
    """Raises SettingsError unless timm has an optimiser of that name that works here and whose state can be saved.

    eps: its epsilon, if it must have one. cycles_momentum: whether it must also have a momentum or betas.
    """
    if name not in list_optimizers():
        raise SettingsError(f"optimizer is {name!r}; {nearest(name, list_optimizers())}timm.optim.list_optimizers() lists them")
    trial = nn.Linear(2, 2)
    try:
        optimizer = create_optimizer_v2(trial, opt=name, lr=1e-3, weight_decay=0.01, **_epsilon(eps))
        trial(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        restore_optimizer_state(optimizer, trial, *optimizer_state(optimizer, trial))
    except Exception as error:
        # It may need anything: a package, a GPU, second derivatives, another kind of state.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SettingsError(f"optimizer is {name!r}, which cannot be used here: {reason}; choose another") from error
    if cycles_momentum and not any({"betas", "momentum"} & set(group) for group in optimizer.param_groups):
        raise SettingsError(
            f"momentum_cycle is given, but optimizer {name!r} has no momentum; choose another, such as adamw, or pass "
            "--momentum-cycle None"
        )


class Schedule:
    """Sets the learning rate and momentum of the optimiser, which depend on nothing but the step."""

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings, steps_per_epoch: int) -> None:
        self.optimizer, self.settings, self.timeline = optimizer, settings, Timeline(settings, steps_per_epoch)

    def set(self, step: int) -> float:
        """Sets the learning rate of update `step`, counted from 0, times each group's "lr_scale"; returns the unscaled rate."""
        rate, momentum = values_at(step, self.settings, self.timeline)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"] if "lr_scale" in group else rate
            if momentum is not None:
                _set_momentum(group, momentum)
        return rate


def _set_momentum(group: dict[str, Any], momentum: float) -> None:
    """Sets betas, momentum or both: some optimisers, such as Muon, use each for some of their parameters."""
    if "betas" in group:
        group["betas"] = (momentum, *group["betas"][1:])
    if "momentum" in group:
        group["momentum"] = momentum


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of the optimiser: tensors by "<parameter>/<kind>", and numbers per parameter and group; raises TypeError."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {"groups": [_numbers_of(group) for group in optimizer.param_groups], "parameters": {}}
    for parameter, state in optimizer.state.items():
        for kind, value in state.items():
            key = f"{names[id(parameter)]}/{kind}"
            if isinstance(value, Tensor):
                tensors[key] = value.detach().contiguous()
            elif isinstance(value, int | float):
                numbers["parameters"][key] = value
            elif value is not None:
                raise TypeError(f"its state has a {type(value).__name__}, which cannot be saved")
    return tensors, numbers


def restore_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor], numbers: dict[str, Any]
) -> None:
    """Gives the optimiser the state that `optimizer_state` returned."""
    states: dict[str, dict[str, Any]] = {}
    for key, value in {**tensors, **numbers["parameters"]}.items():
        name, kind = key.rsplit("/", 1)
        states.setdefault(name, {})[kind] = value
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    order = [names[id(parameter)] for parameter in parameters]
    state = {index: states[name] for index, name in enumerate(order) if name in states}
    groups = [group | saved for group, saved in zip(optimizer.state_dict()["param_groups"], numbers["groups"], strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter, name in zip(parameters, order, strict=True):
        for kind, value in states.get(name, {}).items():
            loaded = optimizer.state[parameter][kind]
            if isinstance(value, Tensor) and loaded.dtype != value.dtype:  # PyTorch casts state to the parameter's dtype
                optimizer.state[parameter][kind] = value.to(loaded.device)


def _numbers_of(group: dict[str, Any]) -> dict[str, float]:
    """The numbers of a group; some optimisers count their steps there, as numbers or as scalar tensors."""
    scalars = {name: value for name, value in group.items() if not isinstance(value, Tensor) or value.ndim == 0}
    found = {name: float(value) if isinstance(value, Tensor) else value for name, value in scalars.items()}
    return {name: value for name, value in found.items() if isinstance(value, int | float) and not isinstance(value, bool)}
