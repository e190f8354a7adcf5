"""How tensors are handed to the native kernels."""

import ctypes
from typing import Any

import torch
from torch import Tensor

STORAGE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # `Storage` in vectors.h
poison = False  # set by tests: the kernel's working memory is filled with NaN before use


def address(x: Tensor | None) -> int | None:
    """Where the tensor's numbers begin; null for None."""
    return None if x is None else x.data_ptr()


def run(library: Any, name: str, problem: ctypes.Structure, x: Tensor) -> None:
    """Runs the kernel of that name on a problem about x; the caller keeps all tensors that the problem points to alive."""
    if getattr(library, name)(ctypes.byref(problem)) != 0:
        raise MemoryError(f"{name}: no working memory for the kernel on shape {tuple(x.shape)}")
