"""The gated convolution in PyTorch's own operations, and its gradients."""

import torch
import torch.nn.functional as F
from torch import Tensor

from polaformer.ops.gated_convolution.inputs import ConvolutionInputs
from polaformer.ops.grid import Grid


def forward(inputs: ConvolutionInputs) -> Tensor:
    """(attended + convolution of the values) ⊙ gate; weight and bias are cast to the dtype of the values. Differentiable."""
    attended, values, weight, bias, gate, grid = inputs
    weight, bias = weight.to(values.dtype), None if bias is None else bias.to(values.dtype)
    prefix, width = attended.shape[1] - values.shape[1], weight.shape[0]
    if 0 in grid:  # PyTorch's convolution refuses it; this is empty too, with the same derivatives
        tokens = values * weight.sum() + (0.0 if bias is None else bias.sum())
    else:
        images = F.conv2d(_to_images(values, grid, width), weight, bias, padding=_padding(weight), groups=width)
        tokens = _to_tokens(images, values)
    out = attended + (F.pad(tokens, (0, 0, prefix, 0)) if prefix else tokens)
    return out if gate is None else out * gate


def backward(grad: Tensor, inputs: ConvolutionInputs) -> list[Tensor]:
    """The gradients of attended, values and weight, then of bias and gate if given, as autograd would find them for `forward`.

    In closed form, because a registered operator cannot call autograd.
    """
    attended, values, weight, bias, gate, grid = inputs
    prefix, width = attended.shape[1] - values.shape[1], weight.shape[0]
    slope = dense_copy(grad if gate is None else grad * gate)
    if 0 in grid:
        zeros = [x.new_zeros(x.shape) for x in (values, weight, bias) if x is not None]
        return [slope, *zeros, *([] if gate is None else [dense_copy(grad * attended)])]
    cells = _to_images(slope[:, prefix:], grid, width)
    needed, bias_sizes = [True, True, bias is not None], None if bias is None else [width]
    geometry = ([1, 1], _padding(weight), [1, 1], False, [0, 0], width)
    images = _to_images(values, grid, width)
    found = torch.ops.aten.convolution_backward(cells, images, weight.to(values.dtype), bias_sizes, *geometry, needed)
    gradients = [slope, _to_tokens(found[0], values).contiguous(), found[1].to(weight.dtype)]
    gradients += [] if bias is None else [found[2].to(bias.dtype)]
    return gradients + ([] if gate is None else [dense_copy(grad * forward(inputs._replace(gate=None)))])


def dense_copy(x: Tensor) -> Tensor:
    """A copy with the strides of a new tensor, as the registration of the operator promises."""
    return x.clone(memory_format=torch.contiguous_format)


def _to_images(tokens: Tensor, grid: Grid, width: int) -> Tensor:
    """(B, H·W, heads · width) to (B · heads, width, H, W)."""
    return tokens.unflatten(1, grid).unflatten(-1, (tokens.shape[2] // width, width)).permute(0, 3, 4, 1, 2).flatten(0, 1)


def _to_tokens(images: Tensor, like: Tensor) -> Tensor:
    """(B · heads, D, H, W) to (B, H·W, heads · D), the shape of `like`."""
    heads = like.shape[2] // images.shape[1]
    return images.unflatten(0, (like.shape[0], heads)).permute(0, 3, 4, 1, 2).flatten(3).flatten(1, 2)


def _padding(weight: Tensor) -> tuple[int, int]:
    return int(weight.shape[2]) // 2, int(weight.shape[3]) // 2
