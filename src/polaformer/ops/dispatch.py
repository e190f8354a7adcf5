"""How an operator of this library is called: as plain operations, through PyTorch's dispatcher, or directly."""

import torch
from torch import Tensor, nn


def must_use_plain_operations() -> bool:
    """Whether the registered operator cannot be used.

    An exported program contains plain ATen operations only, so that it runs where this library is not installed. PyTorch's
    function transforms and forward-mode derivatives do not see the derivative of a registered operator.
    """
    return (
        torch.compiler.is_exporting()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def can_bypass_dispatcher(*tensors: Tensor | None) -> bool:
    """Whether the kernel can be called directly, as in inference: on a few tokens the dispatcher costs as much as the kernel.

    Nothing may depend on the registered operator: no derivative, no compiler, tracer or profiler, no mode that counts or fakes
    operations, no special tensors. Special are tensor subclasses and tensors whose memory does not hold their values, such as
    the imaginary part of a conjugate, which is negated only when PyTorch's own operations read it.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.autograd.profiler._is_profiler_enabled
        or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given))
        or any(type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type not in ("cpu", "cuda") for tensor in given)
        or any(tensor.is_neg() or tensor._is_zerotensor() for tensor in given)
    )
