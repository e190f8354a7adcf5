"""Argument checks of polarity attention. They look at types, dtypes, devices and shapes, never at the values of tensors."""

from math import inf

import torch
from torch import Tensor

from polaformer.ops.polarity.backends import BACKENDS
from polaformer.ops.polarity.inputs import Inputs
from polaformer.ops.precision import DTYPES

WHERE = "polarity_attention"


def check_backend(where: str, backend: str) -> None:
    """Raises unless there is such a backend."""
    if backend not in BACKENDS:
        raise ValueError(f"{where}: backend is {backend!r}; choose one of {', '.join(BACKENDS)}")


def check_eps(where: str, eps: float) -> None:
    """Raises unless eps can be added to a mean of non-negative numbers."""
    if not isinstance(eps, int | float):
        raise TypeError(f"{where}: eps is a {type(eps).__name__}; give a number, for instance 0 or 1e-6")
    if not 0 <= eps < inf:
        raise ValueError(f"{where}: eps is {eps}; give 0 (the paper's equation) or a small positive number such as 1e-6")


def check(inputs: Inputs, backend: str) -> None:
    """Raises TypeError for wrong types and dtypes, ValueError for wrong shapes, devices and names; power, scale may be (D,)."""
    check_backend(WHERE, backend)
    q, k, v, power, scale, mask, eps = inputs
    named = {"q": q, "k": k, "v": v, "power": power}
    if scale is not None:
        named["scale"] = scale
    if mask is not None:
        named["mask"] = mask
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{WHERE}: {name} is a {type(tensor).__name__}; give a torch.Tensor")
    for name, tensor in named.items():
        if name != "mask" and not tensor.is_floating_point():
            raise TypeError(
                f"{WHERE}: {name} has dtype {tensor.dtype}; give a floating-point tensor, for instance {name}.float()"
            )
    if q.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"{WHERE}: q has dtype {q.dtype}; give q, k and v in one of {allowed}, for instance q.bfloat16()")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"{WHERE}: q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; give them one dtype")
    for name, tensor in named.items():
        if name in ("power", "scale") and (
            tensor.dtype not in (q.dtype, torch.float32, torch.float64) or tensor.dtype.itemsize < q.dtype.itemsize
        ):
            raise TypeError(
                f"{WHERE}: {name} has dtype {tensor.dtype}, which cannot hold {q.dtype}; "
                f"give {name} in q's dtype or a wider one"
            )
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"{WHERE}: mask has dtype {mask.dtype}; give a boolean mask that is True where the key exists")
    if any(tensor.device != q.device for tensor in named.values()):
        listed = ", ".join(f"{name} on {tensor.device}" for name, tensor in named.items())
        raise ValueError(f"{WHERE}: the tensors are on different devices ({listed}); move them to one")
    _check_shapes(inputs)
    check_eps(WHERE, eps)


def check_registered(inputs: Inputs, backend: str) -> None:
    """Also checks what only `polarity_attention` ensures: a registered operator can be called directly."""
    check(inputs, backend)
    q = inputs.q
    for name, parameter in (("power", inputs.power), ("scale", inputs.scale)):
        if parameter is not None:
            check_like(q, name, parameter, (q.shape[1], q.shape[3]), parameter.dtype)


def check_like(q: Tensor, name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises unless x has the shape and dtype, and is on the device of q."""
    if x.shape != shape:
        raise ValueError(f"{WHERE}: {name} has shape {tuple(x.shape)} but belongs to q; give {tuple(shape)}")
    if x.dtype != dtype:
        raise TypeError(f"{WHERE}: {name} has dtype {x.dtype} but belongs to q; give {dtype}")
    if x.device != q.device:
        raise ValueError(f"{WHERE}: {name} is on {x.device} but q is on {q.device}; move them to one device")


def _check_shapes(inputs: Inputs) -> None:
    q, k, v, power, scale, mask, _ = inputs
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        if tensor.ndim != 4:
            raise ValueError(f"{WHERE}: {name} has shape {tuple(tensor.shape)}; give 4 axes (batch, heads, tokens, head width)")
    batch, heads, _, width = q.shape
    if width < 2:
        raise ValueError(f"{WHERE}: q has head width {width}; give at least 2, one channel for each polarity of v")
    key_batch, key_heads, num_keys, key_width = k.shape
    if (key_batch, key_heads, key_width) != (batch, heads, width):
        raise ValueError(
            f"{WHERE}: k has shape {tuple(k.shape)} but q has shape {tuple(q.shape)}; "
            "batch, heads and head width must agree, only the number of tokens may differ"
        )
    if v.shape != k.shape:
        raise ValueError(f"{WHERE}: v has shape {tuple(v.shape)} but k has shape {tuple(k.shape)}; give them one shape")
    for name, parameter in {"power": power, "scale": scale}.items():
        if parameter is not None and parameter.shape not in ((heads, width), (width,)):
            raise ValueError(
                f"{WHERE}: {name} has shape {tuple(parameter.shape)} but q has {heads} heads of width {width}; "
                f"give {name} of shape ({heads}, {width}) or ({width},)"
            )
    if mask is not None and mask.shape != (batch, num_keys):
        raise ValueError(
            f"{WHERE}: mask has shape {tuple(mask.shape)} but there are {batch} samples of {num_keys} keys; "
            f"give mask of shape ({batch}, {num_keys})"
        )
