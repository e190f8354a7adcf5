"""How an operator of this library is called: as plain operations, through PyTorch's registration, or directly."""

import torch
from torch import Tensor, nn


def plain_operations_wanted() -> bool:
    """Whether a registered operator must not be used.

    An exported program holds plain ATen operations, so that it runs where this library is not installed; and PyTorch's
    function transforms and forward-mode derivatives do not see the derivative of a registered operator.
    """
    return (
        torch.compiler.is_exporting()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def nobody_looks(*tensors: Tensor | None) -> bool:
    """Whether a registered operator may be left out, as in inference: it costs as much as the kernel does on a few tokens.

    Nothing may need it: no derivative, no compiler, tracer or profiler, no mode that counts or fakes operations, no special
    tensors: not a class of somebody's own, nor one whose memory does not hold its values, such as the imaginary part of a
    conjugate, which is negated only when PyTorch's own operations read it.
    """
    there = [tensor for tensor in tensors if tensor is not None]
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.autograd.profiler._is_profiler_enabled
        or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in there))
        or any(type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type not in ("cpu", "cuda") for tensor in there)
        or any(tensor.is_neg() or tensor._is_zerotensor() for tensor in there)
    )
