"""In which precision the operators compute, whatever they are given."""

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


def without_autocast(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates a function whose first argument is a tensor: autocast is off inside.

    Enters no context when autocast is off already, so that exported graphs hold nothing but tensor operations.
    """

    @functools.wraps(function)
    def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        assert isinstance(args[0], Tensor)
        device_type = args[0].device.type
        if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
            return function(*args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            return function(*args, **kwargs)

    return wrapper
