"""Freezing the patch embedding and the first stages, as timm's group_matcher counts them."""

from collections.abc import Iterator

from timm.models._manipulate import group_with_matcher
from torch import nn

from polaformer.errors import SettingsError

HEAD = "<a name that no pattern of a group_matcher matches>"


def freeze(model: nn.Module, num_stages: int) -> list[nn.Module]:
    """Disables gradients of the patch embedding and the first `num_stages` stages; returns the frozen modules.

    Keep these in eval mode during training, so that drop path is off and batch norm keeps its statistics. With 0 stages,
    nothing is frozen, not even the patch embedding. Raises SettingsError if the model has fewer stages.
    """
    names = frozen_names(model, num_stages)
    frozen = {id(parameter) for name, parameter in model.named_parameters() if name in names}
    for parameter in model.parameters():
        if id(parameter) in frozen:
            parameter.requires_grad_(False)
    return list(_wholly_frozen(model, frozen))


def frozen_names(model: nn.Module, num_stages: int) -> set[str]:
    """Names of the parameters of the patch embedding and the first stages; the head belongs to no stage."""
    if num_stages == 0:
        return set()
    if not hasattr(model, "group_matcher"):
        raise SettingsError(
            f"frozen_stages is {num_stages}, but {type(model).__name__} has no group_matcher, which names its stages; give 0"
        )
    named = [(name, None) for name, _ in model.named_parameters()]
    matcher = model.group_matcher(coarse=True)  # type: ignore[operator]
    groups = group_with_matcher(iter([*named, (HEAD, None)]), matcher, reverse=True)
    most = groups.pop(HEAD) - 1  # group 0 is the stem, then come the stages, then everything else
    if num_stages > most:
        kind = type(model).__name__
        raise SettingsError(f"frozen_stages is {num_stages}, but {kind} has {most} to freeze; give at most {most}")
    return {name for name, group in groups.items() if group <= num_stages}


def _wholly_frozen(module: nn.Module, frozen: set[int]) -> Iterator[nn.Module]:
    """The outermost modules whose parameters are all frozen; modules without parameters are left out."""
    parameters = [id(parameter) for parameter in module.parameters()]
    if parameters and frozen.issuperset(parameters):
        yield module
        return
    for child in module.children():
        yield from _wholly_frozen(child, frozen)
