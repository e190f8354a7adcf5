"""Whether a model of a dense task can be trained and evaluated at an image size, decided before either.

Images of dense tasks have many times the tokens of those of classification: mechanisms that materialise a map of all pairs of
tokens exceed any memory there, and those with parameters per token support no length beyond the one that they were built for.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polaformer.attention import facts
from polaformer.backbones.backbone import Backbone
from polaformer.errors import SettingsError
from polaformer.ops.grid import Grid
from polaformer.training.memory_estimate import MemoryEstimate, estimate_inference, estimate_memory
from polaformer.training.settings import Settings

GB = 1e9


def check_fits(
    build: Callable[[Grid | None], nn.Module],
    size: Grid,
    batch: int,
    settings: Settings,
    *,
    forward: Callable[[Any, Tensor], Any] | None = None,
    limit: int | None = None,
    device: str = "cpu",
) -> MemoryEstimate:
    """The memory to train a model on `batch` images of the given (height, width); nothing is computed.

    Raises SettingsError, with the estimate in GB and the limit, if it exceeds the limit (None: the memory of the device), or if
    a mechanism was built for fewer tokens.

    build: makes the model for images of that native size, None: as it is to be trained; called on the meta device.
    forward: the part to estimate, from the model and the images (batch, 3, height, width); None: the call.
    """
    images = torch.empty(batch, 3, *size, device="meta")

    def estimate(native: Grid | None) -> MemoryEstimate:
        with torch.device("meta"):
            model = build(native)
        model.set_grad_checkpointing(settings.grad_checkpointing)  # type: ignore[operator]
        with _Estimating():
            return estimate_memory(model, lambda one: one(images) if forward is None else forward(one, images), settings)

    where = _images(batch, size)
    if reason := _too_long(build, size):
        raise SettingsError(
            f"{where}: {reason}; built for this size (img_size), training would need {_gb(estimate(size).total)}; choose a "
            "mechanism without parameters per token"
        )
    found = estimate(None)
    most = device_memory(device) if limit is None else limit
    if most is not None and found.total > most:
        linear = "" if _is_linear(build) else "attention with linear memory, "
        raise SettingsError(
            f"{where}: training needs at least {_gb(found.total)}, {_gb(found.activations)} of it for activations, but "
            f"{device} has {_gb(most)}; choose {linear}fewer images per process (accumulation), smaller images, bf16, or "
            "gradient checkpointing"
        )
    return found


def check_length(build: Callable[[Grid | None], nn.Module], size: Grid, *, advice: str) -> None:
    """Raises SettingsError if a mechanism was built for fewer tokens than an image of that (height, width) has.

    build: as of `check_fits`. advice: what can be done about it.
    """
    if reason := _too_long(build, size):
        where = f"evaluation on {_images(1, size)}"
        raise SettingsError(f"{where}: {reason}; {advice}, or choose a mechanism without parameters per token")


def check_inference(
    build: Callable[[Grid | None], nn.Module],
    size: Grid,
    batch: int,
    *,
    advice: str,
    seen: Grid | None = None,
    forward: Callable[[Any, Tensor], Any] | None = None,
    precision: str = "fp32",
    limit: int | None = None,
    device: str = "cpu",
) -> int:
    """The bytes to predict `batch` images of the given (height, width) at once; nothing is computed.

    Raises SettingsError if they exceed the limit, or as `check_length`. seen: the part of an image that the model sees at once;
    None: all of it. The other arguments are those of `check_fits` and `check_length`.
    """
    most = device_memory(device) if limit is None else limit
    needed = 3 * 4 * batch * size[0] * size[1]  # for the images alone, as they may be too large for anything else
    if most is None or needed <= most:
        check_length(build, seen or size, advice=advice)
        with torch.device("meta"):
            model, images = build(None), torch.empty(batch, 3, *size)
        with _Estimating():
            run = (lambda one: one(images)) if forward is None else (lambda one: forward(one, images))
            needed += estimate_inference(model, run, precision)
    if most is not None and needed > most:
        where = f"evaluation on {_images(batch, size)}"
        raise SettingsError(f"{where} needs at least {_gb(needed)}, but {device} has {_gb(most)}; {advice}")
    return needed


def _images(number: int, size: Grid) -> str:
    return f"{number} image{'s' * (number > 1)} of {size[0]}×{size[1]} pixels"


def device_name() -> str:
    """The device that a run computes on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_memory(device: str = "cpu") -> int | None:
    """All memory of the device in bytes; None if the system does not report it."""
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).total_memory)
    names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
    if hasattr(os, "sysconf") and all(name in os.sysconf_names for name in names):
        return os.sysconf(names[0]) * os.sysconf(names[1])
    return None


class _Estimating(TorchFunctionMode):
    """Operators that differ on the meta device from real ones.

    Softmax attention stores no maps, as with PyTorch's kernels on real devices; with a learnable bias it does there too.
    Resizing stores nothing but its result; on the meta device alone it would be a thousand small operations.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stand_in = {F.scaled_dot_product_attention: _fused_attention, F.interpolate: _resized}.get(func, func)
        return stand_in(*args, **(kwargs or {}))


def _fused_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, scale: float | None = None
) -> Tensor:
    if dropout_p > 0 or (attn_mask is not None and attn_mask.requires_grad):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, scale=scale)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = fused(q, k, v, 0.0, False, attn_mask=attn_mask, scale=scale)[0]
    return out


def _resized(image: Tensor, size: Grid | None = None, scale_factor: float = 1.0, mode: str = "nearest", **_: Any) -> Tensor:
    grid = [int(side * scale_factor) for side in image.shape[-2:]] if size is None else size
    return image.mean(dim=(-2, -1), keepdim=True).expand(*image.shape[:2], *grid).clone()


def _too_long(build: Callable[[Grid | None], nn.Module], size: Grid) -> str | None:
    """Why the attention of the model cannot have as many tokens as images of that size; None if it can."""
    for backbone in _backbones(build):
        try:
            with _Estimating():
                backbone.set_input_size(size)
        except ValueError as error:
            names = ", ".join(name for name in dict.fromkeys(backbone.attention) if facts(name).needs_length)
            return f"{names} has parameters per token: {str(error).partition(';')[0]}"
    return None


def _is_linear(build: Callable[[Grid | None], nn.Module]) -> bool:
    """Whether all attention of the model has linear memory. Softmax has: it stores no maps, or only those of windows."""
    mechanisms = {name for backbone in _backbones(build) for name in backbone.attention}
    return all(facts(name).cost != "quadratic" or facts(name).in_windows for name in mechanisms)


def _backbones(build: Callable[[Grid | None], nn.Module]) -> list[Backbone]:
    with torch.device("meta"):
        model = build(None)
    return [module for module in model.modules() if isinstance(module, Backbone)]


def _gb(number: int) -> str:
    return f"{number / GB:.1f} GB"
