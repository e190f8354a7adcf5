"""Stages that are not trained: the patch embedding and the first ones, as timm's group_matcher counts them."""

from collections.abc import Iterator

from timm.models._manipulate import group_with_matcher
from torch import nn

from polaformer.errors import SettingsError

HEAD = "<what no pattern of a group_matcher matches>"


def freeze(model: nn.Module, num_stages: int) -> list[nn.Module]:
    """Switches gradients off for the patch embedding and the first `num_stages` stages; returns the modules that are frozen.

    These belong in eval mode while the rest is trained, so that drop path is off and batch norm keeps its statistics. 0 stages:
    nothing is frozen. Raises SettingsError where there are not so many.
    """
    names = frozen_names(model, num_stages)
    frozen = {id(parameter) for name, parameter in model.named_parameters() if name in names}
    for parameter in model.parameters():
        if id(parameter) in frozen:
            parameter.requires_grad_(False)
    return list(_wholly_frozen(model, frozen))


def frozen_names(model: nn.Module, num_stages: int) -> set[str]:
    """The parameters of the patch embedding and the first stages; what belongs to no stage, such as a head, is among none."""
    if num_stages == 0:
        return set()
    if not hasattr(model, "group_matcher"):
        raise SettingsError(
            f"frozen_stages is {num_stages}, but {type(model).__name__} has no group_matcher, which names its stages; give 0"
        )
    named = [(name, None) for name, _ in model.named_parameters()]
    matcher = model.group_matcher(coarse=True)  # type: ignore[operator]
    groups = group_with_matcher(iter([*named, (HEAD, None)]), matcher, reverse=True)
    most = groups.pop(HEAD) - 1  # the stem is group 0, the stages follow from 1, what is left comes last
    if num_stages > most:
        kind = type(model).__name__
        raise SettingsError(f"frozen_stages is {num_stages}, but {kind} has {most} to freeze; give at most {most}")
    return {name for name, group in groups.items() if group <= num_stages}


def _wholly_frozen(module: nn.Module, frozen: set[int]) -> Iterator[nn.Module]:
    """The outermost modules that have parameters, all of them frozen."""
    parameters = [id(parameter) for parameter in module.parameters()]
    if parameters and frozen.issuperset(parameters):
        yield module
        return
    for child in module.children():
        yield from _wholly_frozen(child, frozen)
