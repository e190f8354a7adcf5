"""How the tensors of heads are laid out in memory, so that the next operation need not copy them.

# B batch, H heads, T tokens, D head width
"""

import torch
from torch import Tensor


def empty_like_heads(x: Tensor) -> Tensor:
    """An uninitialised dense tensor with the shape and dtype of x (B, H, T, D).

    If x is a view of tokens (B, T, H·D), as projections return it, so is the result: merging the heads then needs no copy.
    """
    batch, heads, tokens, width = x.shape
    if x.stride(1) < x.stride(2):
        return torch.empty((batch, tokens, heads, width), dtype=x.dtype, device=x.device).transpose(1, 2)
    return torch.empty((batch, heads, tokens, width), dtype=x.dtype, device=x.device)


def match_layout(result: Tensor, x: Tensor) -> Tensor:
    """`result`, of the shape of x, with the strides and dtype of `empty_like_heads(x)`; copied only if it differs in them."""
    _, heads, tokens, width = (max(size, 1) for size in x.shape)
    steps = (width, heads * width) if x.stride(1) < x.stride(2) else (tokens * width, width)
    matches = result.stride() == (heads * tokens * width, *steps, 1)
    return result if matches and result.dtype == x.dtype else empty_like_heads(x).copy_(result)


def with_contiguous_rows(x: Tensor) -> Tensor:
    """x with a last stride of 1, as the kernels read it; copied only if it has another one."""
    return x if x.stride(-1) == 1 else x.contiguous()
