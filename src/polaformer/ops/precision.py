"""The precision that the operators compute in, whatever the dtype of their inputs."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # of q, k and v
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def computing_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def reciprocal(x: Tensor) -> Tensor:
    """1 / x, and 0 where x is 0."""
    empty = x == 0
    return torch.where(empty, 0.0, 1 / torch.where(empty, 1.0, x))


def without_autocast(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates a function, whose first argument is a tensor or a tuple that begins with one, to run with autocast off.

    Enters no context when autocast is off already, so that exported graphs contain nothing but tensor operations.
    """

    @functools.wraps(function)
    def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        first = args[0][0] if isinstance(args[0], tuple) else args[0]
        assert isinstance(first, Tensor)
        device_type = first.device.type
        if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
            return function(*args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            return function(*args, **kwargs)

    return wrapper
