"""The tail of the attention layer: (attended + depthwise convolution of the values) ⊙ gate, on tokens.

On a CPU a native kernel computes all of it in one pass over the tokens, without rearranging them (cpu_convolution.cpp).
Elsewhere, and without a compiler, PyTorch's convolution does (plain.py). The layer's option `backend` selects the
implementation of polarity attention, not this one: a layer with backend="torch" uses this kernel too, unless
POLAFORMER_NATIVE=0 switches all native code off.

# B batch, P prefix tokens, H·W cells of the grid, C = heads · D channels, k kernel
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from polaformer.ops.dispatch import can_bypass_dispatcher, must_use_plain_operations
from polaformer.ops.gated_convolution import cpu, plain
from polaformer.ops.gated_convolution.inputs import ConvolutionInputs
from polaformer.ops.grid import Grid
from polaformer.ops.second_derivative import second_derivative

WHERE = "gated_convolution"


def gated_convolution(
    attended: Tensor, values: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, grid: Grid
) -> Tensor:
    """(attended + convolution of the values) ⊙ gate, (B, P + H·W, C), in the dtype of `attended`.

    attended (B, P + H·W, C); values (B, H·W, C), row by row on the grid (H, W); weight (D, 1, k, k) and bias (D,) of a
    depthwise convolution with zero padding, k odd, the same for every head; gate: broadcastable to `attended`, or None for 1.
    The first P tokens are not convolved. The kernel sums in float32 or wider.
    """
    inputs = ConvolutionInputs(attended, values, weight, bias, gate, grid)
    _check(inputs)
    if gate is not None and gate.shape != attended.shape:
        _check_gate(gate, attended)
    if must_use_plain_operations() or cpu.unsupported_reason(inputs) is not None:
        return plain.forward(inputs)
    if gate is not None and gate.shape != attended.shape:
        inputs = inputs._replace(gate=gate.expand(attended.shape))
    if can_bypass_dispatcher(*inputs.tensors):
        return _compute(inputs)
    return _forward(*inputs.tensors, *grid)


def _compute(inputs: ConvolutionInputs) -> Tensor:
    """By the kernel if it can, else in plain operations; dense either way."""
    return cpu.forward(inputs) if cpu.fallback_reason(inputs) is None else plain.forward(inputs).contiguous()


def _check(inputs: ConvolutionInputs) -> None:
    """Raises ValueError, before any work, for shapes that do not match: the kernel would read beyond the tensors."""
    attended, values, weight, bias, _, (height, width) = inputs
    if attended.ndim != 3 or values.ndim != 3 or attended.shape[0] != values.shape[0] or attended.shape[2] != values.shape[2]:
        raise ValueError(
            f"{WHERE}: attended has shape {tuple(attended.shape)} and values {tuple(values.shape)}; "
            "give both 3 axes (batch, tokens, channels), with equal batch and channel sizes"
        )
    if height < 0 or width < 0 or height * width != values.shape[1]:
        raise ValueError(
            f"{WHERE}: the grid is {height}×{width} but values has {values.shape[1]} tokens; "
            "give the (height, width) whose product is that number"
        )
    if attended.shape[1] < values.shape[1]:
        raise ValueError(
            f"{WHERE}: attended has {attended.shape[1]} tokens but values has {values.shape[1]}; "
            "give at least as many, those of the prefix first"
        )
    if weight.ndim != 4 or weight.shape[1] != 1 or weight.shape[2] % 2 == 0 or weight.shape[3] % 2 == 0:
        raise ValueError(f"{WHERE}: weight has shape {tuple(weight.shape)}; give (head width, 1, k, k) with odd kernel sizes")
    if weight.shape[0] == 0 or attended.shape[2] % weight.shape[0] != 0:
        raise ValueError(
            f"{WHERE}: weight is for heads of width {weight.shape[0]} but there are {attended.shape[2]} channels; "
            "give a width that divides them"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{WHERE}: bias has shape {tuple(bias.shape)}; give ({weight.shape[0]},), or None")


def _check_gate(gate: Tensor, attended: Tensor) -> None:
    sizes = zip(reversed(gate.shape), reversed(attended.shape), strict=False)
    if gate.ndim > attended.ndim or any(size not in (1, needed) for size, needed in sizes):
        raise ValueError(
            f"{WHERE}: gate has shape {tuple(gate.shape)} but attended has {tuple(attended.shape)}; "
            "give one that can be broadcast to it"
        )


def _check_registered(inputs: ConvolutionInputs, grad: Tensor | None = None) -> None:
    """Also checks what only `gated_convolution` ensures: a registered operator can be called directly."""
    _check(inputs)
    attended = inputs.attended
    for name, x in {"gate": inputs.gate, "grad": grad}.items():
        if x is not None and x.shape != attended.shape:
            raise ValueError(
                f"{WHERE}: {name} has shape {tuple(x.shape)} but attended has {tuple(attended.shape)}; give them one shape"
            )
    reason = cpu.unsupported_reason(inputs, grad)
    if reason is not None:
        raise TypeError(f"{WHERE}: {reason}")


@torch.library.custom_op("polaformer::gated_convolution", mutates_args=())
def _forward(
    attended: Tensor, values: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, height: int, width: int
) -> Tensor:
    inputs = ConvolutionInputs(attended, values, weight, bias, gate, (height, width))
    _check_registered(inputs)
    return _compute(inputs)


@_forward.register_fake
def _fake_forward(attended: Tensor, *_: Any) -> Tensor:
    return attended.new_empty(attended.shape)


@torch.library.custom_op("polaformer::gated_convolution_backward", mutates_args=())
def _backward(
    grad: Tensor, attended: Tensor, values: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None,
    height: int, width: int,
) -> list[Tensor]:  # fmt: skip
    """The gradients of attended, values and weight, then of bias and gate if given."""
    inputs = ConvolutionInputs(attended, values, weight, bias, gate, (height, width))
    _check_registered(inputs, grad)
    return cpu.backward(grad, inputs) if cpu.fallback_reason(inputs) is None else plain.backward(grad, inputs)


@_backward.register_fake
def _fake_backward(grad: Tensor, *inputs: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in inputs if isinstance(x, Tensor)]


def _save_for_backward(ctx: Any, inputs: tuple, output: Tensor | list[Tensor]) -> None:
    *tensors, ctx.height, ctx.width = inputs
    ctx.save_for_backward(*tensors)


def _first_derivative(ctx: Any, grad: Tensor) -> tuple:
    tensors = ctx.saved_tensors  # once: with gradient checkpointing reading it recomputes, and works only once
    found = iter(_backward(grad, *tensors, ctx.height, ctx.width))
    return *(None if x is None else next(found) for x in tensors), None, None


def _save_for_second_backward(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    _save_for_backward(ctx, inputs, output)
    ctx.set_materialize_grads(False)


def _second_derivative(ctx: Any, cotangents: list[Tensor | None]) -> tuple:
    grad, *tensors = ctx.saved_tensors
    grid = ctx.height, ctx.width
    found = second_derivative(
        lambda attended, values, weight, bias, gate: plain.forward(
            ConvolutionInputs(attended, values, weight, bias, gate, grid)
        ),
        grad,
        tensors,
        cotangents,
    )
    return *found, None, None


_forward.register_autograd(_first_derivative, setup_context=_save_for_backward)
_backward.register_autograd(_second_derivative, setup_context=_save_for_second_backward)


@register_flop_formula(torch.ops.polaformer.gated_convolution)
def _forward_flops(attended: torch.Size, values: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    """What PyTorch counts for the convolution."""
    return 2 * values[0] * values[1] * values[2] * weight[2] * weight[3]


@register_flop_formula(torch.ops.polaformer.gated_convolution_backward)
def _backward_flops(
    grad: torch.Size, attended: torch.Size, values: torch.Size, weight: torch.Size, bias: Any, gate: Any, *_: Any, **__: Any
) -> int:
    """The gradients of values and weight, and the convolution once more for the gradient of the gate."""
    return (2 if gate is None else 3) * _forward_flops(attended, values, weight)
